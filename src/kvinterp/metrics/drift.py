"""The distance of two residual streams, in length and in direction."""

from __future__ import annotations

import torch

from kvinterp.common.shapes import Measure, Residual
from kvinterp.metrics.base import float64_pair, parted


def residual_drift(a: Residual, b: Residual) -> dict[str, Measure]:
    """Length and direction of the difference of two residual streams, with the shared work done
    once.

    Squares are summed in float64: lengths between 1e-150 and 1e150 neither vanish nor overflow.

    Args:
        a: One path's residual stream.
        b: The other path's, the reference of the relative length.

    Returns:
        ``l2``, the length of ``a - b``; ``relative_l2``, the same over the length of b (0 where
        both vectors are zero, inf where only b is); ``cosine`` in [-1, 1], exactly 1 where the
        vectors are bitwise equal; and ``cosine_distance`` in [0, 2], one minus the cosine with all
        its digits: ``|a/|a| - b/|b||^2 / 2``. Direction is NaN where one vector is zero and the
            other is not.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    both = float64_pair(a, b, "residual streams")
    length = torch.linalg.vector_norm(both, dim=-1)
    l2 = torch.linalg.vector_norm(both[0] - both[1], dim=-1)
    unit = both / length.unsqueeze(-1)
    # The cosine of two streams that are one rounding apart is 1 - 1e-14 in float32: subtracted
    # from 1 it would keep two digits.
    distance = (unit[0] - unit[1]).square_().sum(-1).mul_(0.5).clamp_(max=2)
    distance = torch.where(length.amax(0) == 0, 0.0, distance)
    return {
        "l2": l2,
        "relative_l2": torch.where(l2 == 0, 0.0, l2 / length[1]),
        "cosine": (1 - distance).clamp_(-1, 1),
        "cosine_distance": distance,
    }


METRICS = parted(
    "residual",
    residual_drift,
    ("l2", 0.0, True, "Length of the difference of two residual streams."),
    (
        "relative_l2",
        0.0,
        True,
        "Length of the difference over the length of b; 0 where both are zero, inf where only b is.",
    ),
    (
        "cosine",
        1.0,
        False,
        "Cosine of the angle between two residual streams; NaN where one is zero and the other is not.",
    ),
    (
        "cosine_distance",
        0.0,
        True,
        "One minus the cosine, as half the squared distance of the two unit vectors.",
    ),
)
