"""Distances of two residual streams without their largest dimensions, which in many models hold
massive activations.

A few dimensions of the residual stream are hundreds of times larger than the others at some
positions (arXiv 2402.17762: 1415 and 2533 of LLaMA-2-7B, at the first token and the first full
stop, from an early layer on). An absolute distance over all dimensions then says how those few
differ, and jumps at the layer where they appear, whatever the other thousands do.
"""

from __future__ import annotations

import torch

from kvinterp.common.shapes import Measure, Residual
from kvinterp.metrics.base import float64_pair, parted
from kvinterp.metrics.drift import METRICS as WHOLE
from kvinterp.metrics.drift import residual_drift

COUNT = 3
"""How many dimensions are left out."""
SUFFIX = f"_without_top{COUNT}"
"""The suffix of the columns."""


def residual_drift_without_largest(a: Residual, b: Residual) -> dict[str, Measure]:
    """Computes :func:`kvinterp.metrics.drift.residual_drift` over all dimensions except the three
    where b is largest.

    At each position b alone, the reference (in a comparison of paths: the recompute path), decides
    which dimensions are left out, so that no difference between the two decides it; of equal
    magnitudes the first is left out.

    Args:
        a: One path's residual stream.
        b: The other path's.

    Returns:
        The measures with :data:`SUFFIX` behind their names. NaN where an input is not finite, also
        where that would be left out, and where no dimension is left.

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    size = float64_pair(a, b, "residual streams")[1].abs_()
    left_out = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(min(COUNT, size.shape[-1])):
        # One by one and not topk(3), which may take another of equal magnitudes in another batch.
        left_out.scatter_(-1, size.masked_fill(left_out, -1.0).argmax(-1, keepdim=True), True)
    unknown = ~(a.isfinite().all(-1) & b.isfinite().all(-1) & ~left_out.all(-1))
    drift = residual_drift(a.detach().masked_fill(left_out, 0), b.detach().masked_fill(left_out, 0))
    return {
        f"{name}{SUFFIX}": measure.masked_fill(unknown, torch.nan)
        for name, measure in drift.items()
    }


METRICS = parted(
    "residual",
    residual_drift_without_largest,
    *(
        (
            f"{m.name}{SUFFIX}",
            m.zero,
            m.nonnegative,
            f"{m.name} without the three largest dimensions of ``b``.",
        )
        for m in WHOLE
    ),
)
