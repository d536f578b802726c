"""How far apart two tensors are, relative to the one that they are compared with: the measures that all of the audit uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["apart", "by_position", "difference", "row_errors"]

TINY = torch.finfo(torch.float32).tiny
"""The least magnitude that a difference is divided by."""


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Difference of each number, in float64; 0 where both are the same infinity, inf where only one is a number."""
    x, y = a.double(), b.double()
    return (x - y).abs().masked_fill(x == y, 0.0).nan_to_num(math.inf, posinf=math.inf)


def magnitude(values: Tensor) -> float:
    """The largest finite magnitude, or 0."""
    finite = values.double()[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def apart(mine: Tensor, theirs: Tensor, size: float | None = None) -> float:
    """Largest difference over the largest finite magnitude of ``theirs``, or over ``size``; inf where one is no number."""
    found = gap(mine, theirs)
    worst = found.max().item() if found.numel() else 0.0
    if not worst:
        return 0.0
    size = magnitude(theirs) if size is None else size
    return worst / size if size else math.inf


def difference(a: Tensor, b: Tensor) -> float:
    """As :func:`apart`, where what ``b`` holds may be all zero."""
    return 0.0 if torch.equal(a, b) else apart(a, b, max(magnitude(b), TINY))


def row_errors(mine: Tensor, theirs: Tensor) -> Tensor:
    """As :func:`difference`, row by row, over the newest rows that both have."""
    count = min(len(mine), len(theirs))
    a, b = (t[len(t) - count :].double().flatten(1) for t in (mine, theirs))
    return (gap(a, b).amax(-1) / b.abs().amax(-1).clamp(min=TINY)).nan_to_num(math.inf, posinf=math.inf)


def by_position(mine: Tensor, theirs: Tensor, first: int) -> dict[int, float]:
    """Relative error of each position of ``[batch, position, vocabulary]``, over all rows; the first is at ``first``."""
    size = magnitude(theirs)
    return {first + n: apart(mine[:, n], theirs[:, n], size) for n in range(mine.shape[1])}
