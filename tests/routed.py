"""Small untrained mixtures of experts of five architectures, and a difference planted in what their routers choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

PROMPT = [3, 41, 5, 17, 29, 8]
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIX: dict[str, Any] = {**_COMMON, "intermediate_size": 24, "num_experts_per_tok": 2}
# As wide as its RoPE part: what caches hand over is annotated with one width.
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**_SIX, num_local_experts=6, sliding_window=None, head_dim=8),
    "qwen3": lambda: Qwen3MoeConfig(**_SIX, moe_intermediate_size=24, num_experts=6, head_dim=8, norm_topk_prob=True),
    "olmoe": lambda: OlmoeConfig(**_SIX, num_experts=6),
    "gpt-oss": lambda: GptOssConfig(**_SIX, num_local_experts=6, head_dim=8, rope_parameters={"rope_type": "default"}),
    # Its first layer is dense, and a bias and groups of experts have a say in the choice.
    "deepseek-v3": lambda: DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4},
        **_LATENT,
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
}
LAYERS = {name: [1, 2] if name == "deepseek-v3" else [0, 1, 2] for name in CONFIGS}
"""The layers with a router."""
EXPERTS = {name: 8 if name == "deepseek-v3" else 6 for name in CONFIGS}


def built(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """An untrained model of an architecture, whose routers tell tokens apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation="eager").eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.0 if "embed" in key else 0.3)
    return model


def router(model: Any, layer: int) -> nn.Module:
    mlp = model.model.layers[layer].mlp
    return mlp.gate if hasattr(mlp, "gate") else mlp.router
