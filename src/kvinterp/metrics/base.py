"""What every metric is and how every metric takes its two inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.shapes import Flag, Measure

__all__ = ["Kind", "Metric", "float64_pair"]

#: What a metric compares, see :mod:`kvinterp.shapes`.
Kind = Literal["logits", "residual", "pattern", "kv"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """One number about two tensors of the same kind, as the contract tests and the tables find it.

    Attributes:
        name: The key it has in tables.
        function: From the two tensors, both ``[*batch, last]``, to one number each, ``[*batch]``.
        kind: What the two tensors are.
        zero: What it gives, exactly, when the two tensors are bitwise equal.
        nonnegative: Whether it can never be below zero.
    """

    name: str
    function: Callable[[Tensor, Tensor], Measure | Flag]
    kind: Kind
    zero: float | bool
    nonnegative: bool


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
