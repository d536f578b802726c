"""What a patch puts in that comes from no run of ours: ablations, and what a user hands to it.

Ablations are zeros, the mean of given prompts' rows, or rows drawn from them. Mean and resample share one pool: the rows that
given prompts show at the site, of every position. So they need no prompts of equal length. For another prompt's rows position by
position, its trace is the donor. A user hands over a tensor, TransformerLens's ``ActivationCache``, or a function of the
activation (steering).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvinterp.common.draws import draws
from kvinterp.errors import InputError
from kvinterp.models.attaching import Site
from kvinterp.models.hook_names import hook_name
from kvinterp.models.sites import LAYOUTS

ABLATIONS = {
    "zero": "zeros",
    "mean": "the mean of the rows of given prompts, over all their positions and over the prompts",
    "resample": "for each position a row drawn, with a seed, from those of given prompts, of any of their positions",
}


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What stands in for a run that gives: rows that do not depend on the one that is patched.

    Attributes:
        name: A name of ABLATIONS.
        pool: For each site and layer the rows to take from, without the batch dimension; empty for zeros.
        seed: Seeds the draws.
    """

    name: str
    pool: Mapping[Site, Tensor] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    seed: int = 0

    def rows(self, site: str, layer: int, start: int, like: Tensor) -> Tensor:
        """What replaces a tensor of a site.

        Args:
            site: The site.
            layer: The layer.
            start: The absolute position of the first row.
            like: The tensor, with the batch dimension; only its shape, dtype and device count.
        """
        if self.name == "zero":
            return torch.zeros_like(like)
        pool, axis = self.pool[site, layer], LAYOUTS[site].rows
        if self.name == "mean":
            taken = pool.double().mean(axis - 1, keepdim=True)
        else:
            # Drawn by position alone: the same one in every layer, site and forward.
            places = [self._drawn(start + row, pool.shape[axis - 1]) for row in range(like.shape[axis])]
            taken = pool.index_select(axis - 1, torch.tensor(places, device=pool.device))
        taken = taken[None].to(like)
        fits = [1, *like.shape[1:]]
        fits[axis] = taken.shape[axis]
        if list(taken.shape) != fits:
            raise InputError(
                f"the {self.name} donor's {site} at layer {layer} has shape {tuple(taken.shape[1:])} and cannot be put where "
                f"{tuple(like.shape[1:])} is: make it with the model that is patched."
            )
        return taken.expand_as(like)

    def _drawn(self, position: int, count: int) -> int:
        return int(draws((self.seed, 0), 1, (0, position, 0, 0))[0] * count)


ZERO = Ablation("zero")


@dataclasses.dataclass(frozen=True, eq=False)
class HandedRows:
    """Rows that come from no run of ours.

    Attributes:
        name: What it is, for messages.
        records: For each site and layer a tensor with the batch in front; empty where there is one tensor, or a function.
        tensor: What goes in at every site and layer, of the activation's shape or of one that torch broadcasts to it.
        function: Called with a copy of the whole activation (and, where it takes one, TransformerLens's hook): what it
            returns, or what it made of the copy, goes in.
    """

    name: str
    records: Mapping[Site, Tensor] = dataclasses.field(default_factory=dict, repr=False)
    tensor: Tensor | None = dataclasses.field(default=None, repr=False)
    function: Callable[..., Any] | None = None

    def rows(self, site: str, layer: int, start: int, like: Tensor, low: int, high: int) -> Tensor:
        """The rows for the positions ``low`` to ``high``, with the batch.

        Args:
            site: The site.
            layer: The layer.
            start: The absolute position of the activation's first row.
            like: The whole activation, with the batch.
            low: The first absolute position that is replaced.
            high: The one behind the last.

        Raises:
            InputError: What was given, or what the function returned, does not fit.
        """
        axis = LAYOUTS[site].rows
        if self.function is not None:
            return self._called(self.function, site, layer, like).narrow(axis, low - start, high - low)
        given = self.records[site, layer] if self.tensor is None else self.tensor
        given, whole, fits = given.to(like), list(like.shape), list(like.shape)
        fits[axis] = high - low
        stop = start + like.shape[axis]
        if given.dim() == like.dim() and given.shape[axis] == stop and start:
            # Of a whole context, of which this forward computes the newest rows.
            given = given.narrow(axis, start, stop - start)
        if self.records and (given.dim() != like.dim() or given.shape[axis] != like.shape[axis]):
            raise InputError(
                f"the {self.name} holds {given.shape[axis]} positions at {site!r} and the patched context {stop}, so positions "
                "cannot be matched: give that of a prompt of as many tokens."
            )
        for shape in (whole, fits):
            if _broadcasts(given, shape):
                taken = given.expand(shape)
                return taken.narrow(axis, low - start, high - low) if shape is whole else taken
        raise InputError(
            f"the {self.name} has shape {tuple(given.shape)} and cannot be put where {site!r} of layer {layer} has "
            f"{tuple(whole)}: give that shape, or of the positions that are patched {tuple(fits)}, with or without the batch."
        )

    def _called(self, function: Callable[..., Any], site: str, layer: int, like: Tensor) -> Tensor:
        hook = SimpleNamespace(name=hook_name(site, layer), layer=lambda: layer, ctx={})
        activation = like.clone()
        made = _call(self.name, function, activation, hook)
        made = activation if made is None else made
        if not isinstance(made, Tensor) or not _broadcasts(made, list(like.shape)):
            was = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise InputError(
                f"the {self.name} gave {was} for {site!r} of layer {layer}: expected a tensor of shape {tuple(like.shape)}."
            )
        return made.to(like).expand_as(like)


def _broadcasts(given: Tensor, shape: list[int]) -> bool:
    try:
        return list(torch.broadcast_shapes(given.shape, shape)) == shape
    except RuntimeError:
        return False


def _call(name: str, function: Callable[..., Any], activation: Tensor, hook: Any) -> Any:
    """Calls a function with the hook by its name, as TransformerLens does, or without it, or with it as second argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function(activation)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    # A wrapper that takes anything does not say whether what it wraps takes a hook.
    named = "hook" in signature.parameters or kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} == {
        inspect.Parameter.VAR_KEYWORD
    }
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((activation,), {}), ((activation, hook), {})]
    for args, kwargs in ([((activation,), {"hook": hook})] if named else []) + ways:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return function(*args, **kwargs)
    raise InputError(
        f"the {name} takes the arguments {signature}: expected the activation, and TransformerLens's hook if it wants it, as in "
        "def steer(activation, hook)."
    )
