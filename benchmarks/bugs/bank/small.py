"""Small random transformers models from configs alone: every size that a config knows is made small."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 131

# Set on every config that has a field of the name. Sizes are small and, where nothing forbids it, all different.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    **dict.fromkeys(("initializer_range", "init_std"), 0.12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("linear_num_value_heads", "num_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_head"), 8),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window", "attention_window_size"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "rotary_dim": 4,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(
    model_type: str, *, dtype: str = "float32", attention: str | None = None, seed: int = 0, **config: Any
) -> nn.Module:
    """Builds the causal language model of a model type from its config, in eval mode.

    Args:
        model_type: A transformers model type, such as `llama`.
        dtype: The dtype the parameters are cast to after they are drawn in float32.
        attention: transformers' `attn_implementation`; None for its default.
        seed: Of the weights.
        config: Fields of the config, over `SIZES`.
    """
    made = CONFIG_MAPPING[model_type](**sizes(model_type) | config)
    more = {} if attention is None else {"attn_implementation": attention}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, **more)
        _stir(model)
    finally:
        torch.set_rng_state(state)
    return model.to(getattr(torch, dtype)).eval()


def sizes(model_type: str) -> dict[str, Any]:
    """Those of `SIZES` that the type's config has fields for."""
    kind = CONFIG_MAPPING[model_type]
    names: set[str] = set()
    for base in kind.__mro__:
        names |= set(inspect.get_annotations(base))
        if base.__init__ is not object.__init__:
            names |= set(inspect.signature(base.__init__).parameters)
    return {name: value for name, value in SIZES.items() if name in names}


@torch.no_grad()
def _stir(model: nn.Module) -> None:
    """Moves what is initialised to a constant, so that a bias or a norm's weight that is left out would be seen."""
    for module in model.modules():
        named = dict(module.named_parameters(recurse=False))
        norm = "norm" in type(module).__name__.lower()
        for name, parameter in named.items():
            if parameter.is_floating_point() and (name == "bias" or (norm and name == "weight")) and _constant(parameter):
                parameter.add_(0.1 * torch.randn_like(parameter))


def _constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.reshape(-1)[0]).all())


class PaddedHead(nn.Linear):
    """A head whose vocabulary is padded to a round size: the padding's logits are minus infinity, as some servers make them."""

    real = 120

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input).clone()
        logits[..., self.real :] = -torch.inf
        return logits


def padded_vocabulary(model_type: str, **config: Any) -> nn.Module:
    """Builds a model whose last `VOCABULARY - 120` logits are minus infinity."""
    model = small(model_type, **config)
    model.get_output_embeddings().__class__ = PaddedHead
    return model


def unclamped(model_type: str, **config: Any) -> nn.Module:
    """Builds a model of Mamba-2 blocks without a lower bound of the time step."""
    model = small(model_type, **config)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model
