"""Bugs of what the cache holds: K, V, recurrent and convolution states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bank.bug import Bug, Plant
from bank.planting import around, bend, cache_of, edited, length, mixer, rotate, state_before

KEY, VALUE = ("K",), ("V",)
STATE, CONVOLUTION = ("recurrent state",), ("convolution state",)


def _keys(layer: int, change: Any, *, past_from: int = 1) -> Plant:
    """Attention of one layer reads changed keys, where at least `past_from` were cached before."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, read=lambda k, v, past, cache: (change(k), v) if past >= past_from else (k, v))

    return plant


def _values(layer: int, change: Any, *, past_from: int = 1) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, read=lambda k, v, past, cache: (k, change(v)) if past >= past_from else (k, v))

    return plant


def _both(layers: tuple[int, ...], change: Any) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        for layer in layers:
            bend(model, layer, read=lambda k, v, past, cache: (change(k), change(v)) if past else (k, v))

    return plant


def _through(dtype: torch.dtype) -> Any:
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def _only(dtype: torch.dtype, factor: float) -> Any:
    return lambda tensor: tensor * factor if tensor.dtype == dtype else tensor


def _new_keys_not_rotated(model: nn.Module, monkeypatch: Any) -> None:
    def store(k: Tensor, v: Tensor, past: int, keywords: dict) -> tuple[Tensor, Tensor]:
        cos, sin = keywords["position_embeddings"]
        return (rotate(k, cos, -sin), v) if past else (k, v)

    bend(model, 1, store=store)


def _rotated_twice(model: nn.Module, monkeypatch: Any) -> None:
    def store(k: Tensor, v: Tensor, past: int, keywords: dict) -> tuple[Tensor, Tensor]:
        cos, sin = keywords["position_embeddings"]
        return (rotate(k, cos, sin), v) if past else (k, v)

    bend(model, 0, store=store)


def _repeat(model: nn.Module, monkeypatch: Any) -> None:
    # Two KV heads for four query heads: 0 1 0 1 (repeat) where it should be 0 0 1 1 (repeat_interleave).
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        groups, continues = self.num_key_value_groups, length(cache_of(keywords), self.layer_idx) > 0
        self.num_key_value_groups = 1 if continues else groups
        try:
            return forward(*args, **keywords)
        finally:
            self.num_key_value_groups = groups

    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        return (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)) if past else (k, v)

    bend(model, 1, read=read)
    around(mixer(model, 1), wrapper)


def _values_are_keys(model: nn.Module, monkeypatch: Any) -> None:
    bend(model, 1, store=lambda k, v, past, keywords: (k, k) if past else (k, v))


def _first_layers_cache(model: nn.Module, monkeypatch: Any) -> None:
    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        return (cache.layers[0].keys, cache.layers[0].values) if past else (k, v)

    bend(model, 1, read=read)


def _ring(model: nn.Module, monkeypatch: Any) -> None:
    # A ring buffer whose write index is one behind: once full, the newest overwrites the second newest slot, the oldest stays.
    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        if past < 16:
            return k, v
        return edited(k, lambda t: t[..., -2, :].copy_(t[..., -1, :])), edited(
            v, lambda t: t[..., -2, :].copy_(t[..., -1, :])
        )

    bend(model, 0, read=read)


def _wrong_prefill(model: nn.Module, monkeypatch: Any) -> None:
    bend(model, 1, store=lambda k, v, past, keywords: (k * 1.05, v) if past == 0 else (k, v))


def _slots(first: int, second: int) -> Any:
    def swap(t: Tensor) -> None:
        if t.shape[-2] <= max(first, second):
            return  # A prompt too short to have both.
        t[..., [first, second], :] = t[..., [second, first], :]

    return lambda tensor: edited(tensor, swap)


def _scaled(factor: float, *at: Any) -> Any:
    return lambda tensor: edited(tensor, lambda t: t[at].mul_(factor))


def _state(layer: int, change: Any, name: str = "recurrent_states", *, every: int = 1) -> Plant:
    """Changes a state before a step continues from it, at every `every`th step; the count is the cache's own, so no luck is in it."""

    def apply(cached: Any, past: int) -> None:
        cached.bank_steps = getattr(cached, "bank_steps", 0) + 1
        if cached.bank_steps % every == 0:
            states = getattr(cached, name)
            states[0].copy_(change(states[0]))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        state_before(model, layer, apply)

    return plant


ALL = slice(None)
CONV = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}

BUGS = (
    Bug("keys-half-percent-float16", "llama", _keys(1, _only(torch.float16, 1.005)), (1,), KEY, 1.1e-03, dtype="float16"),
    Bug("keys-two-percent-float32-only", "llama", _keys(1, _only(torch.float32, 1.02)), (1,), KEY, 5.6e-03),
    Bug("values-1.1-bfloat16", "llama", _values(1, lambda v: v * 1.1), (1,), VALUE, 5.6e-02, dtype="bfloat16"),
    Bug(
        "bfloat16-cache-in-float16-model",
        "llama",
        _both((0, 1), _through(torch.bfloat16)),
        (0,),
        ("K", "V"),
        1.5e-03,
        dtype="float16",
    ),
    Bug(
        "float8-cache-in-float16-model",
        "mistral",
        _both((0, 1), _through(torch.float8_e4m3fn)),
        (0,),
        ("K", "V"),
        3.7e-02,
        dtype="float16",
    ),
    Bug("float8-values", "qwen2", _values(0, _through(torch.float8_e4m3fn)), (0,), VALUE, 2.1e-02),
    Bug("float16-cache-in-float32-model", "qwen3", _both((0, 1), _through(torch.float16)), (0,), ("K", "V"), 2.0e-04),
    Bug("new-keys-not-rotated", "llama", _new_keys_not_rotated, (1,), KEY, 5.6e-02),
    Bug("new-keys-rotated-twice", "qwen2", _rotated_twice, (0,), KEY, 1.0e-01),
    Bug("kv-heads-repeated-not-interleaved", "llama", _repeat, (1,), ("K", "V", "attention"), 1.1e00),
    Bug("values-are-keys", "olmo2", _values_are_keys, (1,), VALUE, 7.5e-02),
    Bug("second-layer-reads-first-layers-cache", "granite", _first_layers_cache, (1,), ("K", "V"), 1.1e00),
    Bug("ring-buffer-overwrites-its-neighbour", "mistral", _ring, (0,), ("K", "V"), 2.7e-01),
    Bug("prefill-stores-wrong-keys", "phi3", _wrong_prefill, (1,), KEY, 8.0e-03),
    Bug(
        "stale-slot", "gemma", _keys(1, lambda k: edited(k, lambda t: t[..., 4, :].copy_(t[..., 3, :]))), (1,), KEY, 8.0e-03
    ),
    Bug("two-slots-of-keys-swapped", "gpt_neox", _keys(0, _slots(2, 5)), (0,), KEY, 2.9e-02),
    Bug("first-key-zero", "gpt2", _keys(1, _scaled(0.0, ..., 0, ALL)), (1,), KEY, 5.2e-03),
    Bug("newest-value-zero", "opt", _values(0, _scaled(0.0, ..., -1, ALL)), (0,), VALUE, 4.2e-02),
    Bug("one-head-of-values", "stablelm", _values(1, _scaled(1.1, ALL, 1)), (1,), VALUE, 5.2e-02),
    Bug("one-position-of-values", "cohere", _values(1, _scaled(1.5, ..., slice(7, 8), ALL)), (1,), VALUE, 1.3e-02),
    Bug("one-element-of-keys", "starcoder2", _keys(1, _scaled(3.0, ..., 3)), (1,), KEY, 1.6e-02),
    Bug("keys-shifted-by-one", "falcon", _keys(1, lambda k: k.roll(1, -2)), (1,), KEY, 7.1e-02),
    Bug("values-shifted-by-one", "gpt_bigcode", _values(1, lambda v: v.roll(1, -2)), (1,), VALUE, 5.7e-02),
    Bug(
        "nan-after-36",
        "smollm3",
        _values(1, lambda v: v * float("nan"), past_from=36),
        (1,),
        (),
        float("inf"),
        lengths=(9, 36),
    ),
    Bug(
        "long-window-full-zeroes-keys",
        "mistral",
        _keys(0, lambda k: k * 0.0, past_from=600),
        (0,),
        KEY,
        2.5e-01,
        config={"sliding_window": 600, "max_position_embeddings": 1024},
        lengths=(9, 601),
    ),
    Bug("rotary-part-of-latent-cache-stale", "deepseek_v3", _values(1, lambda v: v.roll(1, -2)), (1,), (), 1.2e-01),
    Bug("latent-cache-scaled", "deepseek_v2", _keys(1, lambda k: k * 1.1), (1,), (), 4.0e-02),
    Bug(
        "attention-of-a-hybrid-reads-stale-values",
        "qwen3_5_text",
        _values(1, lambda v: v.roll(1, -2)),
        (1,),
        VALUE,
        1.7e-01,
    ),
    Bug("state-decays", "mamba2", _state(1, lambda s: s * 0.5), (1,), STATE, 3.0e-03),
    Bug("state-reset-every-two-steps", "mamba2", _state(0, torch.zeros_like, every=2), (0,), STATE, 2.9e-02),
    Bug(
        "convolution-state-shifted", "mamba2", _state(0, lambda s: s.roll(1, -1), "conv_states"), (0,), CONVOLUTION, 1.2e00
    ),
    Bug("delta-net-state-in-bfloat16", "qwen3_5_text", _state(0, _through(torch.bfloat16)), (0,), STATE, 1.3e-03),
    Bug("delta-net-state-zero", "qwen3_next", _state(0, torch.zeros_like), (0,), STATE, 9.7e-01),
    Bug(
        "short-convolution-state-stale",
        "lfm2",
        _state(0, lambda s: s.roll(1, -1), "conv_states"),
        (0,),
        CONVOLUTION,
        8.2e-01,
        config=CONV,
    ),
    Bug("hybrid-state-transposed-heads", "granitemoehybrid", _state(0, lambda s: s.flip(1)), (0,), STATE, 1.1e-02),
    Bug("parallel-hybrid-state", "olmo_hybrid", _state(0, lambda s: s * 1.05), (0,), STATE, 5.3e-02),
)
