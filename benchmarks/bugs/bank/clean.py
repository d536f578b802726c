"""Models that have no cache bug, as small random weights from configs alone: an audit of each must pass.

Clean is what plain transformers code says, in float64: prefill of 9 and of 40 tokens and three steps, and 9 tokens and then 4 at
once, are within 1e-9 relative of the full forward. Where something is cast to float32 inside (tagged `cast`) the difference
is float32's and does not fall in float64; it does once the cast is taken out (`measure.NoFloat32`). What differs
for another reason is no clean model and stands in `KNOWN_TRANSFORMERS_BUGS`. `measure.py` makes these numbers again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from bank import clean_blind, clean_engines
from bank.representations import FORMS, convolved, deferred, whole_numbers
from bank.representations import build as decoding
from bank.small import padded_vocabulary, small, unclamped


@dataclasses.dataclass(frozen=True)
class Clean:
    """A model an audit must pass.

    Args:
        name: The model type, or the variant.
        build: Makes the model, in eval mode and in `dtype`.
        dtype: The model's own.
        cast: Whether something inside is computed in float32 whatever the model's dtype.
    """

    name: str
    build: Callable[[], nn.Module]
    dtype: str = "float32"
    cast: bool = False


def _layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LATENT = {"num_key_value_heads": 4}
INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 512, "compress_ratio": 4}

# What a model type needs beyond small.SIZES.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Dense, with rotary positions.
    **{
        name: {}
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2")
    },
    **{
        name: {}
        for name in ("olmo3", "cohere", "cohere2", "granite", "granite_swa", "glm", "glm4", "helium", "nemotron", "smollm3")
    },
    **{
        name: {}
        for name in (
            "stablelm",
            "starcoder2",
            "seed_oss",
            "arcee",
            "apertus",
            "bitnet",
            "cwm",
            "diffllama",
            "doge",
            "ernie4_5",
        )
    },
    **{
        name: {}
        for name in (
            "exaone4",
            "hunyuan_v1_dense",
            "hyperclovax",
            "jais2",
            "ministral",
            "ministral3",
            "nanochat",
            "persimmon",
        )
    },
    **{name: {} for name in ("vaultgemma", "gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "modernbert-decoder")},
    # Positions learned, sinusoidal or ALiBi.
    **{name: {} for name in ("gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "biogpt", "ctrl")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "mpt": {"expansion_ratio": 2},
    # Decoders of encoder-decoder families and of BERT's, run as language models.
    **{name: {} for name in ("bart", "pegasus", "plbart", "trocr", "blenderbot", "bert", "roberta", "roformer", "electra")},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    # Experts.
    **{
        name: {}
        for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "granitemoeshared", "phimoe")
    },
    **{
        name: {}
        for name in ("flex_olmo", "hunyuan_v1_moe", "minimax_m2", "glm4_moe", "afmoe", "aria_text", "cohere2_moe", "laguna")
    },
    **{
        name: {}
        for name in ("mimo_v2_flash", "exaone_moe", "solar_open", "hy_v3", "granitemoe_swa", "mellum", "llama4_text")
    },
    "jetmoe": {"kv_channels": 8},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    # Latent attention.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "youtu", "axk1"), LATENT),
    # K and V shared between layers.
    "gemma3n_text": {"num_kv_shared_layers": 2, **_layers(SLIDING, FULL, SLIDING, FULL)},
    "gemma4_text": {},
    # Recurrent, and hybrids of recurrence and attention.
    **{name: {} for name in ("olmo_hybrid", "lfm2", "minimax")},
    "mamba2": {"n_groups": 2, "chunk_size": 16},
    "lfm2_moe": _layers("conv", FULL),
    "qwen3_next": _layers(LINEAR, FULL),
    "qwen3_5_text": _layers(LINEAR, FULL),
    "qwen3_5_moe_text": _layers(LINEAR, FULL),
    "granitemoehybrid": {**_layers(LINEAR, FULL), "mamba_chunk_size": 16, "shared_intermediate_size": 24},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "moe_shared_expert_intermediate_size": 24,
        "ssm_state_size": 8,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": [LINEAR, "hybrid", LINEAR],
        "n_mamba_heads": 8,
        "chunk_size": 16,
    },
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 2.0, "chunk_size": 16},
    "kimi_linear": {**LATENT, **_layers(LINEAR, FULL), "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4},
    "bailing_hybrid": {**LATENT, **_layers(LINEAR, FULL)},
    "lfm3": _layers("conv", FULL),
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "qwen4_exp_text": {**_layers(LINEAR, FULL), **{f"indexer_{name}": size for name, size in INDEXER.items()}},
    **{name: {} for name in ("beam", "flint", "kolibri1", "hy_v4", "minimax_m3_vl_text", "blenderbot-small", "marian")},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text"), LATENT),
    "deepseek_v4": {},
}

CAST = frozenset(
    [
        "axk1",
        "axk2",
        "bailing_hybrid",
        "beam",
        "codegen",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "dots3_note_text",
        "ernie4_5_moe",
        "exaone_moe",
        "falcon_h1",
        "flint",
        "gemma2",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_neo",
        "gptj",
        "granitemoe_swa",
        "granitemoehybrid",
        "hy_v3",
        "hy_v4",
        "kimi_linear",
        "kolibri1",
        "mamba2",
        "mimo_v2_flash",
        "minimax",
        "mpt",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "solar_open",
        "zamba2",
    ]
)
"""Model types within 1e-4 of the full forward in float64 and not within 1e-9: a router, a norm, a sine, a softmax
or a state is float32. Others may cast as well, where it did not show."""


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **more}}


# Variants: the model type, then what differs from the architecture above.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Attention written out, or one fused kernel.
    **{
        f"{name}-eager": (name, {"attention": "eager"})
        for name in ("llama", "gpt2", "mistral", "qwen2", "mixtral", "bloom", "opt")
    },
    **{
        f"{name}-eager": (name, {"attention": "eager"})
        for name in ("gemma2", "gemma3_text", "falcon", "phi", "qwen3_5_text", "deepseek_v3")
    },
    **{f"{name}-sdpa": (name, {"attention": "sdpa"}) for name in ("llama", "gpt_neox", "stablelm", "qwen3_moe", "gpt2")},
    # The dtype people serve in.
    **{
        f"{name}-float16": (name, {"dtype": "float16"})
        for name in ("llama", "gpt2", "mistral", "qwen2", "gemma2", "mixtral", "phi", "opt")
    },
    **{
        f"{name}-bfloat16": (name, {"dtype": "bfloat16"})
        for name in ("llama", "gemma", "qwen3", "gpt_neox", "olmoe", "mamba2", "deepseek_v3")
    },
    **{f"{name}-float64": (name, {"dtype": "float64"}) for name in ("llama", "gpt2", "gemma3_text", "opt", "falcon")},
    "llama-eager-float16": ("llama", {"attention": "eager", "dtype": "float16"}),
    "llama-eager-bfloat16": ("llama", {"attention": "eager", "dtype": "bfloat16"}),
    # Heads and sizes.
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-6": ("llama", {"head_dim": 6}),
    "llama-head-6-mha": ("llama", {"head_dim": 6, "num_key_value_heads": 4}),
    "llama-odd": (
        "llama",
        {"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 14, "intermediate_size": 53},
    ),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "llama-four-layers": ("llama", {"num_hidden_layers": 4}),
    "llama-wide": ("llama", {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-other-seed": ("llama", {"seed": 7}),
    "gpt2-one-layer": ("gpt2", {"n_layer": 1}),
    "gpt2-three-heads": ("gpt2", {"n_embd": 36, "n_head": 3}),
    # Tied embeddings, biases.
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "gpt_neox-no-bias": ("gpt_neox", {"attention_bias": False}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False}),
    # Windows, shorter and longer than the prompts.
    **{f"mistral-window-{window}": ("mistral", {"sliding_window": window}) for window in (4, 8, 33, 200)},
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "gemma2-window-5": ("gemma2", {"sliding_window": 5}),
    "gemma3-window-6": ("gemma3_text", {"sliding_window": 6, **_layers(SLIDING, FULL, SLIDING)}),
    "cohere2-window-4": ("cohere2", {"sliding_window": 4, **_layers(SLIDING, SLIDING, FULL)}),
    "gpt_oss-window-7": ("gpt_oss", {"sliding_window": 7}),
    "olmo3-window-8": ("olmo3", {"sliding_window": 8, **_layers(SLIDING, FULL)}),
    "qwen2-window-8": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, **_layers(FULL, SLIDING)}),
    "starcoder2-window-12": ("starcoder2", {"sliding_window": 12}),
    # Positions.
    "llama-rope-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-rope-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-rope-llama3": (
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "falcon-new-decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-multi-head": ("falcon", {"multi_query": False}),
    "falcon-sequential": ("falcon", {"parallel_attn": False}),
    "gpt_bigcode-multi-head": ("gpt_bigcode", {"multi_query": False}),
    "opt-norm-after": ("opt", {"do_layer_norm_before": False}),
    "opt-narrow-embedding": ("opt", {"word_embed_proj_dim": 16}),
    # Soft caps, experts, recurrence.
    "gemma2-strong-caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}),
    "mixtral-one-expert": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral-eight-experts": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen3_moe-not-normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v2-no-query-rank": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3-groups": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}),
    "mamba2-one-group": ("mamba2", {"n_groups": 1}),
    "mamba2-chunk-256": ("mamba2", {"chunk_size": 256}),
    "qwen3_5-four-layers": ("qwen3_5_text", _layers(LINEAR, LINEAR, LINEAR, FULL)),
    "lfm2-three-layers": ("lfm2", _layers("conv", FULL, "conv")),
}

CLAMPED = ("zamba2", "nemotron_h")
"""Their prefill clamps the time step and their step does not (see below): here built without the clamp."""

PADDED = ("llama", "gpt2", "qwen2", "mixtral", "gemma3_text")
"""Also built with a vocabulary whose last logits are minus infinity."""


def _clean() -> dict[str, Clean]:
    made = {}
    for name, config in ARCHITECTURES.items():
        made[name] = Clean(name, partial(unclamped if name in CLAMPED else small, name, **config), cast=name in CAST)
    for name, (kind, config) in VARIANTS.items():
        build = partial(small, kind, **ARCHITECTURES[kind] | config)
        made[name] = Clean(name, build, dtype=config.get("dtype", "float32"), cast=kind in CAST)
    for kind in PADDED:
        made[f"{kind}-padded"] = Clean(f"{kind}-padded", partial(padded_vocabulary, kind, **ARCHITECTURES[kind]))
    for name in (*FORMS, "split"):
        made[f"llama-{name}"] = Clean(f"llama-{name}", partial(decoding, name))
    for name in ("turned", "shifted"):
        made[f"llama-{name}-float16"] = Clean(f"llama-{name}-float16", partial(decoding, name, dtype="float16"), "float16")
    made["llama-deferred"] = Clean("llama-deferred", deferred)
    made["llama-convolved"] = Clean("llama-convolved", convolved)
    made["llama-convolved-bfloat16"] = Clean("llama-convolved-bfloat16", partial(convolved, dtype="bfloat16"), "bfloat16")
    made["llama-whole-numbers"] = Clean("llama-whole-numbers", whole_numbers)
    made |= {name: Clean(name, *how) for each in (clean_blind, clean_engines) for name, how in each.BUILDS.items()}
    return made


CLEAN: dict[str, Clean] = _clean()


@dataclasses.dataclass(frozen=True)
class KnownBug:
    """A model whose cached path differs in transformers 5.23 itself.

    Args:
        build: Makes the model, in float32.
        where: The path that differs: `steps` (token by token), `chunk` (several tokens on a cache), `batch` (two prompts side
            by side) or `positions` (steps without explicit `position_ids`; with them they are right, so `generate` is).
        difference: Largest relative difference of the logits, in float64, measured with plain transformers code.
        cause: What in transformers makes it.
    """

    build: Callable[[], nn.Module]
    where: str
    difference: float
    cause: str


KNOWN_TRANSFORMERS_BUGS: dict[str, KnownBug] = {
    "moshi": KnownBug(
        partial(small, "moshi"),
        "steps",
        1.3,
        "the cache drops what the window of 16 has left, the full forward's mask has no window",
    ),
    "zamba2": KnownBug(
        partial(small, "zamba2", **ARCHITECTURES["zamba2"]),
        "steps",
        1.6e-5,
        "the time step is clamped to time_step_min in the prefill and not in the step; 2e-7 without the clamp",
    ),
    "nemotron_h": KnownBug(
        partial(small, "nemotron_h", layers_block_type=["mamba", "attention", "mamba"]),
        "steps",
        3.2e-5,
        "the time step is clamped to time_step_min in the prefill and not in the step",
    ),
    "bamba": KnownBug(
        partial(small, "bamba", attn_layer_indices=[1], mamba_chunk_size=16),
        "positions",
        6.1e-2,
        "position_ids default to 0, 1, ... whatever the cache holds",
    ),
    "rwkv": KnownBug(
        partial(small, "rwkv"),
        "batch",
        3.6e-1,
        "two prompts side by side: each row decodes otherwise than alone; without a cache both are right to 1e-15",
    ),
    "mamba": KnownBug(
        partial(small, "mamba"), "chunk", 1.5e-3, "several tokens on a cache start from a recurrent state of zero"
    ),
    "falcon_mamba": KnownBug(partial(small, "falcon_mamba"), "chunk", 4.8e-2, "the same"),
    "zamba": KnownBug(
        partial(
            small,
            "zamba",
            num_hidden_layers=4,
            layers_block_type=["hybrid", LINEAR, LINEAR, "hybrid"],
            n_mamba_heads=2,
            intermediate_size=64,
        ),
        "chunk",
        2.1e-4,
        "the same",
    ),
    "jamba": KnownBug(partial(small, "jamba", attn_layer_period=2, attn_layer_offset=1), "chunk", 6.5e-2, "the same"),
}
