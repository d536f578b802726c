"""Distances of two keys or values, relative to their length and in units in the last place of their
dtype.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp.common.shapes import HeadVectors, Measure
from kvinterp.metrics.base import float64_pair, parted

#: The bits of a float64's exponent: with only these left, a normal number is the power of two at or
#  under it.
_EXPONENT_BITS = 0x7FF0_0000_0000_0000
_APART = (
    "absolute difference over the last dimension, in units in the last place of the coarser dtype."
)


def vector_errors(a: HeadVectors, b: HeadVectors) -> dict[str, Measure]:
    """Computes the distances of two keys or values, relative to their length and in units in the
    last place.

    Neighbouring floats are 1 unit apart; across a power of two they are 0.5 apart, because the unit
    is the larger number's. Equal numbers are exactly 0 apart, zeros of different sign too. Where
    the dtypes differ the unit is the larger of their two.

    Args:
        a: One path's keys or values.
        b: The other path's, the reference of the relative length.

    Returns:
        ``relative_error``, the length of the difference over the length of b (0 where both vectors
        are zero, inf where only b is); ``ulp_mean`` and ``ulp_max`` over the last dimension, the
        absolute difference in units in the last place.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    both = float64_pair(a, b, "keys or values")
    difference = both[0] - both[1]
    error = torch.linalg.vector_norm(difference, dim=-1)
    relative = torch.where(error == 0, 0.0, error / torch.linalg.vector_norm(both[1], dim=-1))
    larger = torch.maximum(*both.abs_())
    unit = units_in_last_place(larger, a.dtype)
    if b.dtype != a.dtype:
        unit = torch.maximum(unit, units_in_last_place(larger, b.dtype))
    ulp = difference.abs_().div_(unit)
    return {"relative_error": relative, "ulp_mean": ulp.mean(-1), "ulp_max": ulp.amax(-1)}


def units_in_last_place(
    x: Float[Tensor, "*shape"], dtype: torch.dtype
) -> Float64[Tensor, "*shape"]:
    """Distance from ``|x|`` to the next larger float of a dtype, as ``numpy.spacing`` has it,
    exactly.

    Subnormal numbers and zero have the smallest subnormal as their unit. Above the dtype's largest
    number the unit goes on growing as if the exponent had no end.

    Args:
        x: Numbers of any float dtype.
        dtype: The float dtype whose unit is asked for.

    Returns:
        The unit at each number; NaN where it is not finite.
    """
    wide = x.detach().double()
    power = (wide.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    info = torch.finfo(dtype)
    return torch.where(wide.isfinite(), power.clamp(min=info.smallest_normal) * info.eps, torch.nan)


METRICS = parted(
    "kv",
    vector_errors,
    (
        "relative_error",
        0.0,
        True,
        "Length of the difference over the length of b, for each head vector.",
    ),
    ("ulp_mean", 0.0, True, f"Mean {_APART}"),
    ("ulp_max", 0.0, True, f"Largest {_APART}"),
    relative_error=("mean", "max"),
    ulp_max=("max",),
)
