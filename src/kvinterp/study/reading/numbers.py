"""Medians and their intervals, as a person reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvinterp import metrics
from kvinterp.common.numbers import counted, ends_said, number


def typical_said(values: Any, of: str = "prompt", clusters: Any = None, written: Callable[[Any], str] = number) -> str:
    """The median, its interval, and how many are exactly 0.

    Args:
        values: One number for each; NaN and infinity are left out.
        of: What there is one number for.
        clusters: What each value belongs to, where there are several for each.
        written: How a number is written.
    """
    values = np.asarray(values, dtype=float)
    known = np.isfinite(values)
    found = metrics.typical(values[known], None if clusters is None else np.asarray(clusters)[known])
    if found.zeros == found.n:
        return f"exactly 0 in {counted(found.n, of)}" if found.n else f"no {of} gives a number"
    zeros = f", {found.zeros} of them exactly 0" if found.zeros else ""
    ends = ends_said(*found.interval, ", 95% interval {} over " + counted(found.n, of), written)
    return f"median {written(found.median)}" + (ends or f" of {counted(found.n, of)}, {TOO_FEW}") + zeros


TOO_FEW = "too few for an interval"


def typical_interval(values: Any) -> str:
    """The two ends of the interval of a median, or what stands in a table where there is none."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    return ends_said(*metrics.typical(known).interval, "{}") or ("–" if not len(known) else f"n = {len(known)}")
