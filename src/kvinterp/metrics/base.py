"""What every metric is, which table it fills, and how every metric takes its two inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp.common.shapes import Flag, Measure
from kvinterp.errors import InputError

#: What a metric compares, see :mod:`kvinterp.common.shapes`.
Kind = Literal["logits", "residual", "pattern", "kv", "routing"]


class Fills(NamedTuple):
    """Where the numbers about two tensors of a kind go.

    Attributes:
        table: The table of a comparison, see :class:`kvinterp.comparison.Comparison`.
        dimensions: What a row of it is told apart by, besides the step.
        summed: The tables that hold the same, brought together over their last dimension or over the steps.
    """

    table: str
    dimensions: tuple[str, ...]
    summed: tuple[str, ...] = ()


KINDS: dict[Kind, Fills] = {
    "logits": Fills("steps", ("example",)),
    "residual": Fills("layers", ("site", "layer", "example")),
    "pattern": Fills("heads", ("layer", "example", "head")),
    "routing": Fills("routing", ("layer", "example")),
    "kv": Fills("kv", ("tensor", "layer", "example", "kv_head", "position"), ("kv_steps", "kv_positions")),
}
"""The kinds of tensors that are compared, each with the table that holds how far apart two of them are."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One number about two tensors of the same kind, as the contract tests, the tables and ``kvinterp list`` find it.

    Attributes:
        name: Its name, which no other metric has.
        function: From the two tensors, both ``[*batch, last]``, to one number each, ``[*batch]``.
        kind: What the two tensors are; :data:`KINDS` says which table it fills.
        zero: What it gives, exactly, when the two tensors are bitwise equal; None where it is of one path alone.
        nonnegative: Whether it can never be below zero.
        column: Its column there; default: its name.
        together: Gives this metric and others of the same kind at once, by column; None where it shares no work.
        over: Of K and V alone, how the numbers of several vectors come together, ``"mean"`` or ``"max"``. The first has the
            metric's own column in the summed tables, others one with their name behind it.
    """

    name: str
    function: Callable[[Tensor, Tensor], Measure | Flag]
    kind: Kind
    zero: float | bool | None
    nonnegative: bool
    column: str = ""
    together: Callable[[Tensor, Tensor], dict[str, Measure | Flag]] | None = None
    over: tuple[str, ...] = ("mean",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", self.column or self.name)


def parted(
    kind: Kind,
    together: Callable[[Tensor, Tensor], dict[str, Measure | Flag]],
    *columns: tuple[str, float | bool | None, bool, str],
    named: str = "{}",
    **over: tuple[str, ...],
) -> tuple[Metric, ...]:
    """The metrics that one function gives at once, with the work they share done once.

    Args:
        kind: What the two tensors are.
        together: Gives all of them by column.
        columns: Of each the column, its zero, whether it can never be below that, and what it is.
        named: Its name, given its column.
        over: As :attr:`Metric.over`, by column.
    """

    def one(column: str, what: str) -> Callable[[Tensor, Tensor], Measure | Flag]:
        def measure(a: Tensor, b: Tensor) -> Measure | Flag:
            return together(a, b)[column]

        measure.__doc__ = what
        return measure

    return tuple(
        Metric(
            named.format(column), one(column, what), kind, zero, nonnegative, column, together, over.get(column, ("mean",))
        )
        for column, zero, nonnegative, what in columns
    )


def float64_pair(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"], what: str) -> Float64[Tensor, "path=2 *shape"]:
    """Both tensors in one float64 copy, so that each later operation is one kernel and not two.

    The copy is the caller's to overwrite, and carries no gradient. Float64 holds every float16, bfloat16 and float32
    exactly.

    Args:
        a: One path's tensor.
        b: The other path's, of the same shape; its dtype may differ.
        what: What they are, in the plural, for the message.

    Returns:
        Both, stacked in front.

    Raises:
        InputError: The shapes differ, or the last dimension is missing or empty.
    """
    if a.shape != b.shape:
        raise InputError(
            f"the {what} of the two paths have shapes {tuple(a.shape)} and {tuple(b.shape)}: "
            "give both at the same steps of the same model."
        )
    if not a.ndim or not a.shape[-1]:
        raise InputError(f"the {what} have shape {tuple(a.shape)}: the last dimension must hold at least one value.")
    return torch.stack((a.detach(), b.detach())).double()
