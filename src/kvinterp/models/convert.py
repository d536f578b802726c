"""Converts a checkpoint, or a transformers model, into a HookedTransformer."""

from __future__ import annotations

import copy
import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvinterp.errors import UnsupportedError
from kvinterp.models.door import (
    check_finite,
    check_loaded,
    check_plain_weights,
    importing_transformer_lens,
    load_weights,
)
from kvinterp.models.naming import is_gguf
from kvinterp.models.native import layer_windows

CONVERTED = {
    "LlamaForCausalLM": "convert_llama_weights",
    "MistralForCausalLM": "convert_mistral_weights",
    "Gemma2ForCausalLM": "convert_gemma_weights",
    "MixtralForCausalLM": "convert_mixtral_weights",
}
CARRIED = re.compile(
    r"model\.(embed_tokens|norm)\.weight|lm_head\.weight|model\.layers\.\d+\."
    r"((input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight"
    r"|self_attn\.[qkvo]_proj\.(weight|bias)|mlp\.(gate|up|down)_proj\.weight|self_attn\.rotary_emb\.inv_freq"
    r"|mlp\.(gate\.weight|experts\.(gate_up|down)_proj))"
)
"""The tensors that the conversion carries over. A bias in the MLP is not among them:
TransformerLens adds it after the product with the gate, and these families before."""
BIAS = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.bias")
# The order of dimensions into which TransformerLens permutes each weight at every forward, before
# it multiplies by it.
PERMUTED = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "_W_K", "_W_V"), (0, 2, 1)),
    "W_O": (2, 0, 1),
    **dict.fromkeys(("W_gate", "W_in", "W_out", "W_U"), (1, 0)),
}


def hooked_class() -> type[nn.Module]:
    """TransformerLens' HookedTransformer class.

    Raises:
        UnsupportedError: The installed TransformerLens has none (version 4 and later).
        InputError: It cannot be imported.
    """
    with importing_transformer_lens():
        # find_spec, since in version 4 the import itself raises the ImportError of a missing
        # package.
        if importlib.util.find_spec("transformer_lens.HookedTransformer") is None:
            raise UnsupportedError(
                "the installed TransformerLens has no HookedTransformer (it was removed in 4.0): use kind='bridge' or "
                "kind='native', or install one that has it: pip install \"transformer-lens<4\"."
            )
        from transformer_lens import HookedTransformer
    return HookedTransformer


def convert_checkpoint(
    folder: Path, name: str, config: Any, dtype: torch.dtype, device: torch.device, tokenizer: Any
) -> nn.Module:
    """Loads a local Llama, Mistral, Gemma-2 or Mixtral checkpoint as an unprocessed
    HookedTransformer.

    Args:
        folder: A transformers checkpoint, or a GGUF file.
        name: The name to give the model.
        config: Its config.
        dtype: Weight and compute dtype.
        device: Where to put it.
        tokenizer: The checkpoint's tokenizer, or None.

    Raises:
        InputError: Weights are missing, or hold NaN or Inf.
        UnsupportedError: The architecture is none of these families.
    """
    _check_convertible((config.architectures or ["unknown"])[0])
    source, report = load_weights(folder, config=config, dtype=dtype)
    check_loaded(report, name, config)
    check_plain_weights(source, name)
    check_finite(source, name, folder)
    model: Any = hooked_from_transformers(source, config, name, dtype, device)
    model.generation_config = source.generation_config
    if tokenizer is not None:
        # TransformerLens loads a second tokenizer from the folder that this one's saved arguments
        # name.
        tokenizer_copy = copy.deepcopy(tokenizer)
        with tempfile.TemporaryDirectory(prefix="kvinterp-") as saved:
            if is_gguf(folder):
                tokenizer.save_pretrained(saved)
                tokenizer_copy.init_kwargs["name_or_path"] = saved
            tokenizer_copy.init_kwargs.setdefault("name_or_path", str(folder))
            model.set_tokenizer(tokenizer_copy)
    return model


def hooked_from_transformers(
    source: nn.Module, config: Any, name: str, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Makes an unprocessed HookedTransformer with the weights of a transformers model in memory.

    Args:
        source: A transformers model of the Llama, Mistral, Gemma-2 or Mixtral family; it is not
            changed.
        config, name, dtype, device: As for :func:`convert_checkpoint`.

    Raises:
        UnsupportedError: The architecture is none of these families, or has weights that
            TransformerLens has no place for.
    """
    model_class = hooked_class()
    from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions

    architecture = type(source).__name__
    _check_convertible(architecture)
    tensors = source.state_dict()
    # A model without some of its weights would compute something else.
    left_out = sorted(key for key in tensors if not CARRIED.fullmatch(key))
    if left_out:
        raise UnsupportedError(
            f"kind 'hooked' has no place for {len(left_out)} of the checkpoint's tensors ({', '.join(left_out[:3])}"
            f"{', ...' if len(left_out) > 3 else ''}), and would compute something else without them: use kind='bridge' "
            "for the same hooks over the transformers model, or kind='native'."
        )
    fields = _config_fields(config, architecture)
    hooked_config = HookedTransformerConfig(
        **fields, dtype=dtype, device=str(device), init_weights=False
    )
    hooked_config.model_name = name
    weights = getattr(weight_conversions, CONVERTED[architecture])(source, hooked_config)
    for key, bias in tensors.items():
        # TransformerLens' own conversion of these families leaves the biases of attention's
        # projections at 0.
        if match := BIAS.fullmatch(key):
            layer, letter = match[1], match[2].upper()
            target = next(
                k for mark in ("", "_") if (k := f"blocks.{layer}.attn.{mark}b_{letter}") in weights
            )
            weights[target] = bias.reshape(weights[target].shape)
    with device:
        model: Any = model_class(hooked_config, tokenizer=None, move_to_device=False)
    if hooked_config.num_experts:
        for block in model.blocks:
            # TransformerLens makes experts in float32, whatever the config says.
            block.mlp.to(dtype)
    model.load_and_process_state_dict(
        {key: tensor.to(device) for key, tensor in weights.items()},
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return lay_out_for_products(model.to(device, print_details=False).eval().requires_grad_(False))


def lay_out_for_products(model: nn.Module) -> nn.Module:
    """Lays each weight out in memory in the order in which TransformerLens multiplies by it; names,
    shapes and values stay.

    At every forward TransformerLens permutes its weights and copies the result
    (``W.T.contiguous()``), which for one token is most of the memory traffic. Where the permuted
    weight is contiguous already, the copy is the weight itself: the same operands in the same
    layout, so the same bits. Weights that TransformerLens multiplies by without a copy stay as they
    are.

    Args:
        model: A HookedTransformer; changed in place, and returned.
    """
    blocks: Any = model.blocks
    gated = [
        b.mlp
        for b in blocks
        if isinstance(getattr(getattr(b, "mlp", None), "W_gate", None), nn.Parameter)
    ]
    modules: list[Any] = [*(block.attn for block in blocks), *gated, model.unembed]
    for name, weight in (
        pair for module in modules for pair in module.named_parameters(recurse=False)
    ):
        order = PERMUTED.get(name, ())
        # A single head is not copied: permuting it is a view, and another layout would run another
        #     kernel.
        if weight.dim() == len(order) and not (order == (0, 2, 1) and len(weight) == 1):
            back = [order.index(dimension) for dimension in range(len(order))]
            weight.data = weight.data.permute(order).contiguous().permute(back)
    return model


def _check_convertible(architecture: str) -> None:
    if architecture not in CONVERTED:
        raise UnsupportedError(
            f"kind 'hooked' cannot convert {architecture} from a local folder (it converts {', '.join(CONVERTED)}): "
            "use kind='bridge' for the same hooks over the transformers model, or kind='native'."
        )


def _config_fields(config: Any, architecture: str) -> dict[str, Any]:
    from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ("default", "llama3"):
        raise UnsupportedError(
            f"kind 'hooked' has no {rope_type!r} RoPE scaling: use kind='bridge' or kind='native' for this checkpoint."
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in SUPPORTED_ACTIVATIONS:
        raise UnsupportedError(
            f"kind 'hooked' has no activation {activation!r} (it has {', '.join(SUPPORTED_ACTIVATIONS)}): use kind='bridge' "
            "or kind='native' for this checkpoint."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    windows = layer_windows(config)
    grouped = (
        config.num_key_value_heads != config.num_attention_heads
        or architecture != "LlamaForCausalLM"
    )
    fields: dict[str, Any] = {
        "d_model": config.hidden_size,
        "d_head": head_dim,
        "n_heads": config.num_attention_heads,
        "n_key_value_heads": config.num_key_value_heads if grouped else None,
        "d_mlp": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_ctx": config.max_position_embeddings,
        "eps": config.rms_norm_eps,
        "d_vocab": config.vocab_size,
        "act_fn": activation,
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "rotary_adjacent_pairs": False,
        "rotary_dim": head_dim,
        "rotary_base": rope.get("rope_theta", 10000.0),
        "final_rms": True,
        "gated_mlp": True,
        "original_architecture": architecture,
        "use_local_attn": any(windows),
        "window_size": window if any(windows) else None,
        "attn_types": ["local" if w else "global" for w in windows] if any(windows) else None,
    }
    if rope_type == "llama3":
        fields |= {
            "use_NTK_by_parts_rope": True,
            "NTK_original_ctx_len": rope["original_max_position_embeddings"],
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_by_parts_factor": rope["factor"],
        }
    if architecture == "MixtralForCausalLM":
        fields |= {
            "num_experts": config.num_local_experts,
            "experts_per_token": config.num_experts_per_tok,
        }
        fields |= {"norm_topk_prob": True}
    if architecture == "Gemma2ForCausalLM":
        fields |= {
            "attn_scale": config.query_pre_attn_scalar**0.5,
            "attn_scores_soft_cap": config.attn_logit_softcapping or -1.0,
            "output_logits_soft_cap": config.final_logit_softcapping or -1.0,
            "use_normalization_before_and_after": True,
        }
    return fields
