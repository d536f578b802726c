"""How far apart two residual streams are, in length and in direction."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from kvinterp.common.shapes import Measure, Residual
from kvinterp.metrics.base import Metric, float64_pair


def residual_drift(a: Residual, b: Residual) -> dict[str, Measure]:
    """Length and direction of the difference of two residual streams, with the shared work done once.

    Squares are summed in float64: lengths between 1e-150 and 1e150 neither vanish nor overflow.

    Args:
        a: One path's residual stream.
        b: The other path's, the reference of the relative length.

    Returns:
        ``l2``, the length of ``a - b``; ``relative_l2``, the same over the length of b (0 where both vectors are zero,
        inf where only b is); ``cosine`` in [-1, 1], exactly 1 where the vectors are bitwise equal; and
        ``cosine_distance``, one minus the cosine with all its digits. Direction is NaN where one vector is zero and the
        other is not.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    both = float64_pair(a, b, "residual streams")
    length = torch.linalg.vector_norm(both, dim=-1)
    l2 = torch.linalg.vector_norm(both[0] - both[1], dim=-1)
    distance = _cosine_distance(both, length)
    return {
        "l2": l2,
        "relative_l2": torch.where(l2 == 0, 0.0, l2 / length[1]),
        "cosine": (1 - distance).clamp_(-1, 1),
        "cosine_distance": distance,
    }


def l2_distance(a: Residual, b: Residual) -> Measure:
    """Length of the difference of two residual streams."""
    return residual_drift(a, b)["l2"]


def relative_l2(a: Residual, b: Residual) -> Measure:
    """Length of the difference over the length of b; 0 where both are zero, inf where only b is."""
    return residual_drift(a, b)["relative_l2"]


def cosine_similarity(a: Residual, b: Residual) -> Measure:
    """Cosine of the angle between two residual streams; NaN where one is zero and the other is not."""
    return residual_drift(a, b)["cosine"]


def cosine_distance(a: Residual, b: Residual) -> Measure:
    """One minus the cosine, as half the squared distance of the two unit vectors.

    The cosine of two streams one rounding apart is 1 - 1e-14 in float32: subtracted from 1 it would keep two digits.
    The identity ``1 - cos = |a/|a| - b/|b||^2 / 2`` keeps them all.

    Returns:
        The distance in [0, 2]; see :func:`residual_drift` for zero vectors.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    both = float64_pair(a, b, "residual streams")
    return _cosine_distance(both, torch.linalg.vector_norm(both, dim=-1))


def _cosine_distance(both: Float64[Tensor, "path=2 *batch width"], length: Float64[Tensor, "path=2 *batch"]) -> Measure:
    unit = both / length.unsqueeze(-1)
    distance = (unit[0] - unit[1]).square_().sum(-1).mul_(0.5).clamp_(max=2)
    return torch.where(length.amax(0) == 0, 0.0, distance)


METRICS = tuple(
    Metric(name, function, "residual", zero, nonnegative, together=residual_drift)
    for name, function, zero, nonnegative in (
        ("l2", l2_distance, 0.0, True),
        ("relative_l2", relative_l2, 0.0, True),
        ("cosine", cosine_similarity, 1.0, False),
        ("cosine_distance", cosine_distance, 0.0, True),
    )
)
