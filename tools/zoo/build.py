"""The untrained models and the tokenizer of the zoo."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

__all__ = ["build_model", "build_tokenizer", "model_config"]

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EIGHT_HEADS: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-5}


def model_config(name: str) -> LlamaConfig | MistralConfig | MixtralConfig | Gemma2Config:
    """Gives the configuration of a zoo checkpoint; the first four differ in nothing but the KV heads.

    ``mistral-mini`` is of the Mistral family, whose arithmetic without a sliding window is Llama's. ``llama64-mini``
    has the head dimension that block formats of 32 need, and is twice as wide. ``moe-mini`` has eight experts a layer in the
    place of one MLP, of which a router chooses two for each token.
    """
    if name == "moe-mini":
        sparse = {key: value for key, value in _COMMON.items() if key != "attention_bias"} | {"intermediate_size": 64}
        experts: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
        return MixtralConfig(**sparse, **_EIGHT_HEADS, **experts, num_key_value_heads=2, sliding_window=None)
    if name == "mistral-mini":
        shared = {key: value for key, value in _COMMON.items() if key != "attention_bias"}
        return MistralConfig(**shared, **_EIGHT_HEADS, num_key_value_heads=2, sliding_window=None)
    if name == "gemma2-mini":
        return Gemma2Config(
            **_COMMON,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=32,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            rms_norm_eps=1e-6,
        )
    if name == "llama64-mini":
        wide = _COMMON | {"hidden_size": 256, "intermediate_size": 320}
        return LlamaConfig(**wide, num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5)
    kv_heads = {"llama-mini": 8, "gqa2-mini": 4, "mqa-mini": 1}[name]
    return LlamaConfig(**_COMMON, **_EIGHT_HEADS, num_key_value_heads=kv_heads)


def build_model(name: str, seed: int) -> PreTrainedModel:
    """Builds an untrained model whose every weight starts from a seed of its own.

    The seed of a weight is made of ``seed`` and the weight's name, so that two models start alike wherever a name and
    shape is in both, whatever else differs.
    """
    config = model_config(name)
    # Only the eager attention applies Gemma 2's soft cap.
    if isinstance(config, Gemma2Config):
        model: PreTrainedModel = Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    elif isinstance(config, MixtralConfig):
        model = MixtralForCausalLM._from_config(config, attn_implementation="sdpa")
    elif isinstance(config, MistralConfig):
        model = MistralForCausalLM._from_config(config, attn_implementation="sdpa")
    else:
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
            spread = _embedding_spread(name) if "embed" in key else weight.shape[-1] ** -0.5
            # What writes to the residual stream starts smaller, as in GPT-2: two writers in each layer.
            if key.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                spread /= (2 * config.num_hidden_layers) ** 0.5
            weight.normal_(0.0, spread, generator=generator)
    return model


def _embedding_spread(name: str) -> float:
    """How wide embeddings start: wide enough that the words of one kind do not run together in the first steps.

    Starting at 0.03, the names (Mia, Tom, ...) of ``mistral-mini`` came to point one way (cosine 0.86 after 800 steps)
    and none was ever copied. Gemma multiplies what goes in by the square root of the width and does not need it.
    """
    return 0.03 if name == "gemma2-mini" else 0.15


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Trains the byte-level BPE tokenizer: every digit a token, BOS in front, and any text comes back whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
