"""Donors of patches that are no trace: zeros, and a user's own tensors or functions.

For another prompt's rows position by position, use its trace as the donor. A user may give a tensor
(such as the mean of what other prompts recorded), TransformerLens's ``ActivationCache``, or a
function of the activation (steering).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hook_names import hook_name
from kvinterp.models.sites import LAYOUTS

ABLATIONS = {"zero": "zeros"}


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A donor whose rows do not depend on the patched run: zeros.

    Attributes:
        name: A name of ABLATIONS.
    """

    name: str

    def rows(self, like: Tensor) -> Tensor:
        """The rows that replace a tensor of a site, ``like``, of which shape, dtype and device
        matter.
        """
        return torch.zeros_like(like)


ZERO = Ablation("zero")


@dataclasses.dataclass(frozen=True, eq=False)
class HandedRows:
    """A donor that the user made: records, a tensor, or a function.

    Attributes:
        name: The donor's name in errors.
        records: For each site and layer a tensor with the batch first; empty for a tensor or a
            function.
        tensor: The rows for every site and layer, of a shape that torch broadcasts to the
            activation's.
        function: Called with a copy of the whole activation (and with TransformerLens's hook, if it
            takes one). The rows are its result, or the edited copy if it returns None.
    """

    name: str
    records: Mapping[HookPoint, Tensor] = dataclasses.field(default_factory=dict, repr=False)
    tensor: Tensor | None = dataclasses.field(default=None, repr=False)
    function: Callable[..., Any] | None = None

    def rows(self, site: str, layer: int, start: int, like: Tensor, low: int, high: int) -> Tensor:
        """Returns the rows for the positions ``low`` to ``high``, with the batch.

        Args:
            site: The site.
            layer: The layer.
            start: The absolute position of the activation's first row.
            like: The whole activation, with the batch.
            low: The first absolute position that is replaced.
            high: One past the last.

        Raises:
            InputError: The donor's tensor, or the function's result, does not fit.
        """
        axis = LAYOUTS[site].row_axis
        if self.function is not None:
            return self._function_rows(self.function, site, layer, like).narrow(
                axis, low - start, high - low
            )
        tensor = self.records[site, layer] if self.tensor is None else self.tensor
        tensor, patched, stop = tensor.to(like), list(like.shape), start + like.shape[axis]
        patched[axis] = high - low
        if tensor.dim() == like.dim() and tensor.shape[axis] == stop and start:
            # The donor has the whole context, and this forward computes the newest rows only.
            tensor = tensor.narrow(axis, start, stop - start)
        if self.records and (tensor.dim() != like.dim() or tensor.shape[axis] != like.shape[axis]):
            raise InputError(
                f"the {self.name} holds {tensor.shape[axis]} positions at {site!r} and the patched context {stop}, so positions "
                "cannot be matched: give that of a prompt of as many tokens."
            )
        for shape, first in ((list(like.shape), low - start), (patched, 0)):
            # Raises where the shape does not fit.
            with contextlib.suppress(RuntimeError):
                return tensor.expand(shape).narrow(axis, first, high - low)
        raise InputError(
            f"the {self.name} has shape {tuple(tensor.shape)} and cannot be put where {site!r} of layer {layer} has "
            f"{tuple(like.shape)}: give that shape, or of the positions that are patched {tuple(patched)}, with or without the "
            "batch."
        )

    def _function_rows(
        self, function: Callable[..., Any], site: str, layer: int, like: Tensor
    ) -> Tensor:
        hook = SimpleNamespace(name=hook_name(site, layer), layer=lambda: layer, ctx={})
        activation = like.clone()
        result = _call(self.name, function, activation, hook)
        result = activation if result is None else result
        kind = f"a {type(result).__name__}"
        if isinstance(result, Tensor):
            kind = f"shape {tuple(result.shape)}"
            with contextlib.suppress(RuntimeError):
                return result.to(like).expand_as(like)
        raise InputError(
            f"the {self.name} gave {kind} for {site!r} of layer {layer}: expected a tensor of shape {tuple(like.shape)}."
        )


def _call(name: str, function: Callable[..., Any], activation: Tensor, hook: Any) -> Any:
    """Calls a function with the hook as keyword, as TransformerLens does, or without it, or with it
    as second argument.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function(activation)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    calls: list[Any] = [
        ((activation,), {"hook": hook}),
        ((activation,), {}),
        ((activation, hook), {}),
    ]
    # A wrapper that takes any argument does not show whether the wrapped function takes a hook.
    if (
        "hook" not in signature.parameters
        and {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    ):
        del calls[0]
    for args, kwargs in calls:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return function(*args, **kwargs)
    raise InputError(
        f"the {name} takes the arguments {signature}: expected the activation, and TransformerLens's hook if it wants it, as in "
        "def steer(activation, hook)."
    )
