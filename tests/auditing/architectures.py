"""Small random models of the architectures the audit must know: each a config alone, weights from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 24


def _small(*without: str, **more: Any) -> dict[str, Any]:
    return {k: v for k, v in SMALL.items() if k not in without} | more


def _config(name: str) -> Any:
    import transformers as t

    few = {"num_hidden_layers": 4}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    }
    gpt = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.12}
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**SMALL),
        "mistral": lambda: t.MistralConfig(**_small(sliding_window=WINDOW)),
        "gemma2": lambda: t.Gemma2Config(
            **_small(sliding_window=WINDOW, query_pre_attn_scalar=12, attn_logit_softcapping=5.0)
        ),
        "gemma3": lambda: t.Gemma3TextConfig(**_small(sliding_window=WINDOW, query_pre_attn_scalar=12)),
        "qwen2": lambda: t.Qwen2Config(**_small("head_dim")),
        "qwen3": lambda: t.Qwen3Config(**SMALL),
        "qwen3_5": lambda: t.Qwen3_5TextConfig(**_small(**few, **linear)),
        "gpt2": lambda: t.GPT2Config(**gpt),
        "gpt_neox": lambda: t.GPTNeoXConfig(**_small("num_key_value_heads", "head_dim")),
        "phi": lambda: t.PhiConfig(**_small("head_dim")),
        "olmo2": lambda: t.Olmo2Config(**_small("head_dim")),
        "falcon": lambda: t.FalconConfig(
            **_small("num_key_value_heads", "head_dim", "intermediate_size"),
            new_decoder_architecture=False,
            multi_query=True,
        ),
        "bloom": lambda: t.BloomConfig(vocab_size=131, hidden_size=48, n_layer=3, n_head=4, initializer_range=0.12),
        "mamba": lambda: t.MambaConfig(vocab_size=131, hidden_size=32, num_hidden_layers=3, state_size=8),
        "mamba2": lambda: t.Mamba2Config(
            vocab_size=131,
            hidden_size=32,
            num_hidden_layers=3,
            state_size=16,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=32,
        ),
        "bamba": lambda: t.BambaConfig(
            **_small("head_dim"),
            attn_layer_indices=[1],
            mamba_n_heads=12,
            mamba_d_head=8,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=32,
            mamba_expand=2,
        ),
        "falcon_h1": lambda: t.FalconH1Config(
            **_small("head_dim"),
            mamba_d_ssm=96,
            mamba_n_heads=12,
            mamba_d_head=8,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=32,
        ),
        "jamba": lambda: t.JambaConfig(
            **_small("head_dim"),
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        "lfm2": lambda: t.Lfm2Config(
            **_small("head_dim", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)
        ),
        "mixtral": lambda: t.MixtralConfig(**_small(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
        "olmoe": lambda: t.OlmoeConfig(**_small("head_dim", num_experts=4, num_experts_per_tok=2)),
        "opt": lambda: t.OPTConfig(
            vocab_size=131,
            hidden_size=48,
            ffn_dim=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            word_embed_proj_dim=48,
            max_position_embeddings=256,
            init_std=0.12,
        ),
        "phi3": lambda: t.Phi3Config(**_small("head_dim")),
        "starcoder2": lambda: t.Starcoder2Config(**_small("head_dim")),
        "cohere": lambda: t.CohereConfig(**_small("head_dim")),
        "gpt_oss": lambda: t.GptOssConfig(**_small(num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)),
    }
    return makers[name]()


NAMES = (
    "llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "qwen3_5", "gpt2", "gpt_neox", "phi", "olmo2", "falcon", "bloom",
    "mamba", "mamba2", "bamba", "falcon_h1", "jamba", "lfm2", "mixtral", "olmoe", "opt", "phi3", "starcoder2", "cohere", "gpt_oss",
)  # fmt: skip


def some(names: Sequence[str], always: Sequence[str]) -> list[Any]:
    """All of them as parameters of a test; those not named run with ``--everything`` only."""
    import pytest

    return [name if name in always else pytest.param(name, marks=pytest.mark.long) for name in names]


def build(name: str, seed: int = 11) -> Any:
    """A random model in float32, from its config alone."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(_config(name)).eval().requires_grad_(False)
