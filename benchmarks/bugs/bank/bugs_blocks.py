"""Bugs of what decoding computes: sums, inputs between blocks, norms, experts, attention's numbers, embedding and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bank.bug import Bug, Plant
from bank.planting import Now, around, blocks, first, in_decode, mixer, set_in_decode, watched

Find = Callable[[nn.Module], nn.Module]


def _output(find: Find, change: Callable[[Tensor], Tensor]) -> Plant:
    """A module returns something else in decode."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        in_decode(find(watched(model)), lambda module, out: first(out, change))

    return plant


def _attribute(find: Find, name: str, value: Any) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        set_in_decode(find(watched(model)), name, value)

    return plant


def _inputs(find: Find, change: Callable[[tuple, dict], tuple[tuple, dict]], *, from_token: int = 1) -> Plant:
    """A module is called with something else in decode."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past >= from_token:
            args, keywords = change(args, keywords)
        return forward(*args, **keywords)

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(find(watched(model)), wrapper)

    return plant


def _block(layer: int) -> Find:
    return lambda model: blocks(model)[layer]


def _attention(layer: int) -> Find:
    return lambda model: mixer(model, layer)


def _named(name: str) -> Find:
    return lambda model: model.get_submodule(name)


def _hidden(factor: float) -> Callable[[tuple, dict], tuple[tuple, dict]]:
    def change(args: tuple, keywords: dict) -> tuple[tuple, dict]:
        if args:
            return (args[0] * factor, *args[1:]), keywords
        return args, keywords | {"hidden_states": keywords["hidden_states"] * factor}

    return change


def _routed(find: Find, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """A router returns other scores and other experts in decode, from its logits, scores and indices."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        in_decode(find(watched(model)), lambda module, out: (out[0], *change(*out)))

    return plant


def _worst(logits: Tensor, scores: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return scores, logits.topk(indices.shape[-1], largest=False).indices


def _not_normalised(logits: Tensor, scores: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return logits.float().softmax(-1).gather(-1, indices).to(scores.dtype), indices


def _next_expert(logits: Tensor, scores: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return scores, (indices + 1) % 4


def _dropped(tensor: Tensor) -> Tensor:
    # Dropout that was left on, with the mask of one seed: the same at every step, so that it is an error and no noise.
    keep = torch.rand(tensor.shape[-1], generator=torch.Generator().manual_seed(3)) > 0.1
    return tensor * keep.to(tensor.dtype) / 0.9


def _later(args: tuple, keywords: dict) -> tuple[tuple, dict]:
    return args, keywords | {"position_ids": keywords["position_ids"] + 1}


def _reversed_slopes(args: tuple, keywords: dict) -> tuple[tuple, dict]:
    return args, keywords | {"alibi": keywords["alibi"].flip(0)}


def _doubled_bias(args: tuple, keywords: dict) -> tuple[tuple, dict]:
    # Not shifted: a softmax does not see a bias that is off by a constant, as ALiBi shifted by one is.
    return args, keywords | {"position_bias": keywords["position_bias"] * 2}


def _next_row(args: tuple, keywords: dict) -> tuple[tuple, dict]:
    return ((args[0] + 1, *args[1:]) if args else args), {k: v + 1 if k == "input" else v for k, v in keywords.items()}


def _learned_position(model: nn.Module, monkeypatch: Any) -> None:
    _inputs(_named("transformer.wpe"), _next_row)(model, monkeypatch)


def _state_list(model: nn.Module, monkeypatch: Any) -> None:
    # RWKV's caches are a list: hidden of the feed-forward, of attention, numerator, denominator and maximum; here the numerator decays.
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        state = keywords.get("state")
        if state is not None and Now.past:
            state[2][:, :, self.layer_id] *= 0.9
        return forward(*args, **keywords)

    around(mixer(watched(model), 1), wrapper)


def _parts(layer: int) -> tuple[str, ...]:
    """What may be named of a block whose sum is wrong."""
    roots = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers")
    return (*(f"{root}.{layer}" for root in roots), "residual")


LOGITS = ("logits", "lm_head")
ATTENTION = (
    "attention",
    *(
        f"{root}.{layer}.{name}"
        for layer in (0, 1)
        for root, name in (
            ("model.layers", "self_attn"),
            ("transformer.h", "self_attention"),
            ("transformer.blocks", "attn"),
        )
    ),
)

BUGS = (
    Bug(
        "sum-of-a-block-off-by-half-a-percent",
        "llama",
        _output(_block(1), lambda x: x * 1.005),
        (1,),
        _parts(1),
        2.9e-03,
        config={"num_hidden_layers": 3},
    ),
    Bug("sum-of-a-block-off-by-one-percent", "gpt2", _output(_block(0), lambda x: x * 1.01), (0,), _parts(0), 8.2e-03),
    Bug("sum-of-a-block-off-by-ten-percent", "qwen2", _output(_block(0), lambda x: x * 1.1), (0,), _parts(0), 1.3e-01),
    Bug(
        "one-channel-of-a-block-doubled",
        "olmo2",
        _output(_block(0), lambda x: x * (1 + (torch.arange(x.shape[-1]) == 5).to(x.dtype))),
        (0,),
        _parts(0),
        2.0e-01,
    ),
    Bug(
        "input-between-blocks-zero",
        "llama",
        _inputs(_block(2), _hidden(0.0)),
        (1, 2),
        (),
        7.8e-01,
        config={"num_hidden_layers": 4},
    ),
    Bug("input-between-blocks-1.05", "mistral", _inputs(_block(1), _hidden(1.05)), (0, 1), (), 3.8e-02),
    Bug("input-of-attention-scaled", "exaone4", _inputs(_attention(1), _hidden(1.1)), (1,), (), 7.2e-03),
    Bug("wrong-scale", "llama", _attribute(_attention(1), "scaling", lambda s: s * 1.2), (1,), ATTENTION, 5.7e-02),
    Bug("scale-of-one", "glm4", _attribute(_attention(0), "scaling", 1.0), (0,), ATTENTION, 9.2e-01),
    Bug(
        "soft-cap-missing",
        "gemma2",
        _attribute(_attention(1), "attn_logit_softcapping", None),
        (1,),
        ATTENTION,
        2.5e-02,
        config={"attn_logit_softcapping": 0.05},
    ),
    Bug(
        "sinks-dropped",
        "gpt_oss",
        _attribute(_attention(1), "sinks", lambda s: torch.full_like(s, -1e4)),
        (1,),
        ATTENTION,
        1.3e-02,
    ),
    Bug(
        "gate-of-mlp-scaled",
        "llama",
        _output(_named("model.layers.1.mlp.gate_proj"), lambda x: x * 1.1),
        (1,),
        ("model.layers.1",),
        4.9e-02,
    ),
    Bug(
        "norm-epsilon",
        "seed_oss",
        _attribute(_named("model.layers.1.input_layernorm"), "variance_epsilon", 0.01),
        (1,),
        (),
        1.9e-02,
    ),
    Bug(
        "norm-before-head",
        "hunyuan_v1_dense",
        _output(_named("model.norm"), lambda x: x * 1.02),
        (None, 1, 2),
        ("model.norm", "logits"),
        2.0e-02,
    ),
    Bug(
        "worst-experts",
        "mixtral",
        _routed(_named("model.layers.1.mlp.gate"), _worst),
        (1,),
        ("model.layers.1", "router"),
        9.5e-01,
    ),
    Bug(
        "experts-off-by-one",
        "qwen3_moe",
        _routed(_named("model.layers.0.mlp.gate"), _next_expert),
        (0,),
        ("model.layers.0", "router"),
        4.1e-01,
    ),
    Bug(
        "expert-weights-not-normalised",
        "mixtral",
        _routed(_named("model.layers.0.mlp.gate"), _not_normalised),
        (0,),
        ("model.layers.0", "router"),
        7.7e-01,
    ),
    Bug(
        "shared-expert-skipped",
        "qwen2_moe",
        _output(_named("model.layers.1.mlp.shared_expert"), torch.zeros_like),
        (1,),
        ("model.layers.1",),
        1.6e-01,
    ),
    Bug(
        "shared-experts-of-deepseek-skipped",
        "deepseek_v3",
        _output(_named("model.layers.1.mlp.shared_experts"), torch.zeros_like),
        (1,),
        ("model.layers.1",),
        3.8e-01,
    ),
    Bug("dropout-left-on", "phi", _output(_attention(1), _dropped), (1,), (), 2.0e-01),
    Bug("attention-output-of-one-block-lost", "gpt_neox", _output(_attention(1), torch.zeros_like), (1,), (), 4.5e-01),
    Bug("alibi-slopes-reversed", "bloom", _inputs(_attention(1), _reversed_slopes), (1,), ATTENTION, 9.2e-02),
    Bug("alibi-slopes-doubled", "mpt", _inputs(_attention(0), _doubled_bias), (0,), ATTENTION, 2.0e-01),
    Bug("learned-position-off-by-one", "gpt2", _learned_position, (None, -1, 0), (), 8.3e-01),
    Bug(
        "rotary-offset-after-40-tokens",
        "llama",
        _inputs(_named("model.rotary_emb"), _later, from_token=40),
        (0,),
        ("Q", "K"),
        8.4e-02,
        position=40,
        lengths=(9, 40),
    ),
    Bug(
        "embedding-scale-missing",
        "gemma",
        _output(_named("model.embed_tokens"), lambda x: x / 32**0.5),
        (None, -1, 0),
        ("embedding", "model.embed_tokens"),
        9.9e-01,
    ),
    Bug("logits-scaled", "cohere", _output(_named("lm_head"), lambda x: x * 1.03), (None, 1, 2), LOGITS, 3.0e-02),
    Bug(
        "logits-shifted-by-a-token-id",
        "qwen3",
        _output(_named("lm_head"), lambda x: x.roll(1, -1)),
        (None, 1, 2),
        LOGITS,
        1.5e00,
    ),
    Bug("logits-soft-capped", "llama", _output(_named("lm_head"), lambda x: x.tanh()), (None, 1, 2), LOGITS, 3.1e-01),
    Bug("recurrent-numerator-decays", "rwkv", _state_list, (1,), (), 1.2e-01),
    Bug(
        "gated-output-of-a-mamba-block",
        "falcon_h1",
        _output(_named("model.layers.1.mamba"), lambda x: x * 1.1),
        (1,),
        (),
        8.8e-03,
    ),
    Bug(
        "low-rank-residual-off",
        "gemma3n_text",
        _output(_named("model.layers.1.laurel"), lambda x: x * 1.1),
        (1,),
        ("model.layers.1",),
        7.9e-02,
    ),
)
