"""How a fault is put into what a model is told, into its cache, and into its blocks, in one way of calling it alone.

All of it is planted in the classes of modules, so that it goes wherever the model goes (``bank.planting``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from bank.planting import around, bend, blocks, length, mixer
from torch import Tensor, nn

Plant = Callable[[nn.Module], nn.Module]


class Now:
    """The forward that runs: its batch, its new tokens, those on the cache, the pads of each row."""

    batch = new = past = 0
    pads: Tensor | None = None
    static = grown = False

    @classmethod
    def padded(cls) -> bool:
        """Whether any row has pads."""
        return cls.pads is not None and bool(cls.pads.any())


def told(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Changes what the model's forward is given; ``change`` returns what is otherwise, and may ask :class:`Now`."""

    def plant(model: nn.Module) -> nn.Module:
        def wrapper(_: nn.Module, forward: Callable[..., Any], args: tuple, given: dict[str, Any]) -> Any:
            ids, mask = given["input_ids"], given.get("attention_mask")
            Now.batch, Now.new = ids.shape
            cache = given.get("past_key_values")
            Now.past = length(cache)
            Now.static = any(hasattr(layer, "max_cache_len") for layer in getattr(cache, "layers", []))
            Now.pads = (mask == 0).sum(-1) if isinstance(mask, Tensor) and mask.dim() == 2 else None
            return forward(*args, **given | change(given))

        around(model, wrapper)
        return model

    return plant


watched = told(lambda _: {})


def then(*plants: Plant) -> Plant:
    """Several of them."""

    def plant(model: nn.Module) -> nn.Module:
        for each in reversed(plants):
            model = each(model)
        return model

    return plant


def cached(**wrong: Callable[..., Any]) -> Plant:
    """Gives the cache other methods: each is called with the cache, its own method, and what that is given."""

    def bent(given: dict[str, Any]) -> dict[str, Any]:
        cache = given.get("past_key_values")
        if cache is not None and not getattr(cache, "bent", False):
            cache.bent = True
            for name, method in wrong.items():
                setattr(cache, name, functools.partial(method, cache, getattr(cache, name)))
        return {}

    return told(bent)


def stored(layer: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Changes new keys and values of a layer on their way into the cache."""

    def plant(model: nn.Module) -> nn.Module:
        bend(model, layer, store=lambda keys, values, *_: change(keys, values))
        return watched(model)

    return plant


def read(layer: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Changes the keys and values that attention of a layer reads."""

    def plant(model: nn.Module) -> nn.Module:
        bend(model, layer, read=lambda keys, values, *_: change(keys, values))
        return watched(model)

    return plant


def attending(layer: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Changes what attention of a layer is given."""

    def plant(model: nn.Module) -> nn.Module:
        around(mixer(model, layer), lambda _, forward, args, given: forward(*args, **given | change(given)))
        return watched(model)

    return plant


def returned(find: Callable[[nn.Module], nn.Module], change: Callable[[Tensor], Tensor]) -> Plant:
    """Changes the first tensor that a module of the model returns."""

    def plant(model: nn.Module) -> nn.Module:
        def wrapper(_: nn.Module, forward: Callable[..., Any], args: tuple, given: dict[str, Any]) -> Any:
            made = forward(*args, **given)
            return (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)

        around(find(model), wrapper)
        return watched(model)

    return plant


def attention(layer: int) -> Callable[[nn.Module], nn.Module]:
    """Finds the attention of a block."""
    return lambda model: mixer(model, layer)


def mlp(layer: int) -> Callable[[nn.Module], nn.Module]:
    """Finds the feed-forward part of a block."""
    return lambda model: blocks(model)[layer].mlp


def head(model: nn.Module) -> nn.Module:
    """Finds the unembedding."""
    return model.get_output_embeddings()


def embedding(model: nn.Module) -> nn.Module:
    """Finds the embedding."""
    return model.get_input_embeddings()


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache that hold something."""
    return [layer for layer in cache.layers if layer.keys is not None]


def when(condition: Callable[[], bool], change: Callable[..., Any]) -> Callable[..., Any]:
    """The change where the condition holds, else what was given."""

    def changed(*given: Any) -> Any:
        if condition():
            return change(*given)
        return given[0] if len(given) == 1 else given

    return changed


def batched() -> bool:
    """Whether there are neighbours."""
    return Now.batch > 1


def many() -> bool:
    """Whether several tokens continue a cache."""
    return Now.past > 0 and Now.new > 1


def decode() -> bool:
    """Whether one token continues a cache."""
    return Now.past > 0 and Now.new == 1


def from_row(row: int, edit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Edits positions ``row`` and later of ``[batch, position, ...]``."""
    return lambda tensor: torch.cat([tensor[:, :row], edit(tensor[:, row:])], 1)
