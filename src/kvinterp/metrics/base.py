"""The definition of metrics, the tables they fill, and the form of their two inputs."""

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
Kind = Literal["logits", "residual", "pattern", "kv"]


class Fills(NamedTuple):
    """The table for the numbers of one kind of tensor.

    Attributes:
        table: The table of a comparison, see :class:`kvinterp.comparison.Comparison`.
        dimensions: The columns that identify a row, besides the step.
    """

    table: str
    dimensions: tuple[str, ...]


KINDS: dict[Kind, Fills] = {
    "logits": Fills("steps", ("example",)),
    "residual": Fills("layers", ("site", "layer", "example")),
    "pattern": Fills("heads", ("layer", "example", "head")),
    "kv": Fills("kv", ("tensor", "layer", "example", "kv_head", "position")),
}
"""The kinds of tensors that are compared, each with the table of its numbers."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number about two tensors of the same kind; the contract tests, the tables and
    ``kvinterp list`` use its fields.

    Attributes:
        name: Its unique name.
        function: Maps two tensors ``[*batch, last]`` to one number each, ``[*batch]``.
        kind: The kind of the two tensors; :data:`KINDS` has its table.
        zero: Its exact value for bitwise equal tensors; None if it is of one path alone.
        nonnegative: Whether it is never below zero.
        column: Its column in the table; by default its name.
        together: Computes this metric and others of the same kind at once, by column; None if it
            shares no work.
        over: For K and V, how the numbers of several vectors are combined, ``"mean"`` or ``"max"``.
            In the summed tables the first has the metric's own column, others have their name as
            suffix.
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
    name: str = "{}",
    **over: tuple[str, ...],
) -> tuple[Metric, ...]:
    """Makes the metrics of one function that computes them together.

    Args:
        kind: The kind of the two tensors.
        together: Computes all of them, by column.
        columns: For each metric the column, its zero, whether it is never below zero, and its
            description.
        name: The form of a metric's name, with ``{}`` for its column.
        over: As :attr:`Metric.over`, by column.
    """

    def measure_of(column: str, text: str) -> Callable[[Tensor, Tensor], Measure | Flag]:
        def measure(a: Tensor, b: Tensor) -> Measure | Flag:
            return together(a, b)[column]

        measure.__doc__ = text
        return measure

    return tuple(
        Metric(
            name.format(column),
            measure_of(column, text),
            kind,
            zero,
            nonnegative,
            column,
            together,
            over.get(column, ("mean",)),
        )
        for column, zero, nonnegative, text in columns
    )


def float64_pair(
    a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"], what: str
) -> Float64[Tensor, "path=2 *shape"]:
    """Stacks both tensors in one float64 copy, so that each later operation is one kernel and not
    two.

    The caller may overwrite the copy, which carries no gradient. Float64 holds every float16,
    bfloat16 and float32 exactly.

    Args:
        a: One path's tensor.
        b: The other path's, of the same shape; its dtype may differ.
        what: Their name in the plural, for errors.

    Returns:
        Both, stacked along a new first dimension.

    Raises:
        InputError: The shapes differ, or the last dimension is missing or empty.
    """
    if a.shape != b.shape:
        raise InputError(
            f"the {what} of the two paths have shapes {tuple(a.shape)} and {tuple(b.shape)}: "
            "give both at the same steps of the same model."
        )
    if not a.ndim or not a.shape[-1]:
        raise InputError(
            f"the {what} have shape {tuple(a.shape)}: the last dimension must hold at least one value."
        )
    return torch.stack((a.detach(), b.detach())).double()
