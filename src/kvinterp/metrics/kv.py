"""How far apart two keys or values are, relative to their length and in units of the last place their dtype has."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp.common.shapes import HeadVectors, Measure
from kvinterp.metrics.base import Metric, float64_pair

#: The bits of a float64's exponent: with only these left, a normal number is the power of two at or under it.
_EXPONENT_BITS = 0x7FF0_0000_0000_0000


def relative_error(a: HeadVectors, b: HeadVectors) -> Measure:
    """Length of the difference over the length of b, for each head vector.

    Args:
        a: One path's keys or values.
        b: The other path's, the reference.

    Returns:
        The ratio; 0 where both vectors are zero, inf where only b is.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    both = float64_pair(a, b, "keys or values")
    return _relative(both, both[0] - both[1])


def ulp_error(a: HeadVectors, b: HeadVectors) -> dict[str, Measure]:
    """Absolute difference in units in the last place of the coarser dtype, at the larger magnitude of the two.

    Neighbouring floats are 1 apart; across a power of two they are 0.5 apart, because the unit is the larger number's.
    Equal numbers are exactly 0 apart, zeros of different sign too. Where the dtypes differ the unit is the larger of
    their two.

    Args:
        a: One path's keys or values.
        b: The other path's.

    Returns:
        ``mean`` and ``max`` over the last dimension, in ULP.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    both = float64_pair(a, b, "keys or values")
    return _ulp(both, both[0] - both[1], (a.dtype, b.dtype))


def mean_ulp_error(a: HeadVectors, b: HeadVectors) -> Measure:
    """Mean absolute difference over the last dimension, in units in the last place of the coarser dtype."""
    return ulp_error(a, b)["mean"]


def max_ulp_error(a: HeadVectors, b: HeadVectors) -> Measure:
    """Largest absolute difference over the last dimension, in units in the last place of the coarser dtype."""
    return ulp_error(a, b)["max"]


def units_in_last_place(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float64[Tensor, "*shape"]:
    """Distance from ``|x|`` to the next larger float of a dtype, as ``numpy.spacing`` has it, exactly.

    Subnormal numbers and zero have the smallest subnormal as their unit. Above the dtype's largest number the unit goes
    on growing as if the exponent had no end.

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


def _errors(a: HeadVectors, b: HeadVectors) -> dict[str, Measure]:
    """All of them, with one float64 copy and one difference."""
    both = float64_pair(a, b, "keys or values")
    difference = both[0] - both[1]
    relative = _relative(both, difference)
    ulp = _ulp(both, difference, (a.dtype, b.dtype))
    return {"relative_error": relative, "ulp_mean": ulp["mean"], "ulp_max": ulp["max"]}


def _relative(both: Float64[Tensor, "path=2 *shape"], difference: Float64[Tensor, "*shape"]) -> Measure:
    error = torch.linalg.vector_norm(difference, dim=-1)
    return torch.where(error == 0, 0.0, error / torch.linalg.vector_norm(both[1], dim=-1))


def _ulp(
    both: Float64[Tensor, "path=2 *shape"], difference: Float64[Tensor, "*shape"], dtypes: tuple[torch.dtype, torch.dtype]
) -> dict[str, Measure]:
    """Overwrites both its tensors."""
    larger = torch.maximum(*both.abs_())
    unit = units_in_last_place(larger, dtypes[0])
    if dtypes[1] != dtypes[0]:
        unit = torch.maximum(unit, units_in_last_place(larger, dtypes[1]))
    error = difference.abs_().div_(unit)
    return {"mean": error.mean(-1), "max": error.amax(-1)}


METRICS = (
    Metric("relative_error", relative_error, "kv", 0.0, nonnegative=True, together=_errors, over=("mean", "max")),
    Metric("ulp_mean", mean_ulp_error, "kv", 0.0, nonnegative=True, together=_errors),
    Metric("ulp_max", max_ulp_error, "kv", 0.0, nonnegative=True, together=_errors, over=("max",)),
)
