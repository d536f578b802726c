"""How an error is put into the cached path of a model, and nowhere else.

Everything is planted in the class of a module (a subclass is made and assigned), so that it goes wherever the model goes:
a copy, another dtype. Whether a call continues a cache is read from the cache itself, at the door of the model and of each block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CACHE_NAMES = ("past_key_values", "layer_past", "cache_params", "state")
Around = Callable[[nn.Module, Callable[..., Any], tuple, dict], Any]


class Now:
    """What the forward that runs now continues: tokens in its cache, and how many are new."""

    past = 0
    rows = 0


def cache_of(keywords: dict[str, Any]) -> Any:
    """The cache among a call's keyword arguments, or None."""
    return next((keywords[name] for name in CACHE_NAMES if keywords.get(name) is not None), None)


def length(cache: Any, layer: int = 0) -> int:
    """Tokens a cache holds for a layer; 1 for a state that has seen any, which does not count them."""
    if cache is None:
        return 0
    if not hasattr(cache, "get_seq_length"):
        return 1
    try:
        return int(cache.get_seq_length(layer))
    except ValueError:
        return int(cache.has_previous_state())


def around(module: nn.Module, wrapper: Around) -> None:
    """Makes `module(...)` call `wrapper(module, forward, args, keywords)`, and so do copies of the module."""
    base = type(module)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return wrapper(self, functools.partial(base.forward, self), args, keywords)

    module.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def blocks(model: nn.Module) -> nn.ModuleList:
    """The model's blocks in order."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def mixer(model: nn.Module, layer: int) -> nn.Module:
    """What mixes positions in a block: attention, or a recurrence."""
    block = blocks(model)[layer]
    names = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba", "conv")
    return next(getattr(block, name) for name in names if getattr(block, name, None) is not None)


def watched(model: nn.Module) -> nn.Module:
    """Lets `Now` say what the running forward continues."""

    def watch(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        ids = args[0] if args else keywords.get("input_ids")
        Now.past = length(cache_of(keywords))
        Now.rows = 0 if ids is None else ids.shape[1]
        try:
            return forward(*args, **keywords)
        finally:
            Now.past = Now.rows = 0

    around(model, watch)
    return model


def in_decode(module: nn.Module, change: Callable[[nn.Module, Any], Any], *, from_token: int = 1) -> None:
    """Changes what a module returns where the forward continues a cache of at least `from_token` tokens; needs `watched`."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        out = forward(*args, **keywords)
        return change(self, out) if Now.past >= from_token else out

    around(module, wrapper)


def set_in_decode(module: nn.Module, name: str, value: Any, *, from_token: int = 1) -> None:
    """Gives an attribute of a module another value while the forward continues a cache; needs `watched`."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past < from_token:
            return forward(*args, **keywords)
        before = getattr(self, name)
        after = value(before) if callable(value) else value
        setattr(self, name, nn.Parameter(after, requires_grad=False) if isinstance(before, nn.Parameter) else after)
        try:
            return forward(*args, **keywords)
        finally:
            setattr(self, name, before)

    around(module, wrapper)


def first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes the tensor, or the first of a tuple."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


class Bent:
    """A cache whose `update` is changed for the one module that is handed it: `store` before, `read` after."""

    def __init__(self, cache: Any, store: Callable | None, read: Callable | None, keywords: dict) -> None:
        self._cache, self._store, self._read, self._keywords = cache, store, read, keywords

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        past = length(self._cache, layer)
        if self._store is not None:
            keys, values = self._store(keys, values, past, self._keywords)
        keys, values = self._cache.update(keys, values, layer, *more, **named)
        return (keys, values) if self._read is None else self._read(keys, values, past, self._cache)


def bend(
    model: nn.Module,
    layer: int,
    *,
    store: Callable[[Tensor, Tensor, int, dict], tuple[Tensor, Tensor]] | None = None,
    read: Callable[[Tensor, Tensor, int, Any], tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Changes K and V on their way into a layer's cache, or out of it.

    Args:
        store: From new keys, new values, tokens held before and the attention's keywords, what is stored.
        read: From all keys, all values, tokens held before and the cache, what attention reads.
    """

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        name = next((name for name in CACHE_NAMES if keywords.get(name) is not None), None)
        if name is None:
            return forward(*args, **keywords)
        return forward(*args, **keywords | {name: Bent(keywords[name], store, read, keywords)})

    around(mixer(model, layer), wrapper)


def state_before(model: nn.Module, layer: int, change: Callable[[Any, int], None]) -> None:
    """Calls `change(the layer's cache, its number)` before a mixer continues from a recurrent or a convolution state."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        cache = cache_of(keywords)
        if cache is not None and hasattr(cache, "layers") and length(cache) > 0:
            change(cache.layers[layer], length(cache))
        return forward(*args, **keywords)

    around(mixer(model, layer), wrapper)


def edited(tensor: Tensor, edit: Callable[[Tensor], None]) -> Tensor:
    """A copy of a tensor, edited."""
    copy = tensor.clone()
    edit(copy)
    return copy


def rotate(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as Llama applies them, of (batch, heads, positions, head_dim) by (batch, positions, head_dim)."""
    half = tensor.shape[-1] // 2
    turned = torch.cat((-tensor[..., half:], tensor[..., :half]), dim=-1)
    return tensor * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
