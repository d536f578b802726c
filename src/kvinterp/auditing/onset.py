"""Where a kernel changes its order: a position from which on a difference is there that was not before."""

from __future__ import annotations

import pandas as pd

from kvinterp.auditing.blocks import BlockModel, referenced
from kvinterp.auditing.ladder import PrecisionRun
from kvinterp.auditing.measure import forced
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant

__all__ = ["jump", "onset"]


def onset(twin: Adapter, run: PrecisionRun) -> tuple[str, int, int] | None:
    """The rung, layer and position at which a difference appears or jumps in every prompt, gone with fixed kernels."""
    swept = run.sweep[(run.sweep["layer"] >= 0) & (run.sweep["part"] == "output")]
    if swept.empty:
        return None
    table = swept.groupby(["prompt", "position"])["error"].max().unstack("prompt")
    starts = {jump(table[prompt]) for prompt in table}
    start = starts.pop() if len(starts) == 1 else None
    found = swept[(swept["position"] == start) & (swept["error"] > 0)]
    if start is None or found.empty or _still(twin, run, start) > 0:
        return None
    return run.name, int(found["layer"].min()), start


def _still(twin: Adapter, run: PrecisionRun, start: int) -> float:
    """The largest error around a position with fixed kernels."""
    try:
        with referenced(BlockModel(twin, BatchInvariant()), run.plan.tokens(0, twin.device)) as hooks:
            return max(row["error"] for row in forced(hooks, start, min(start + 2, run.plan.length)))
    except UnsupportedError:
        return float("inf")


def jump(errors: pd.Series) -> int | None:
    """The position from which errors are there that were not before, or eight times larger than any before; or None."""
    values, positions = errors.to_numpy(), errors.index.to_numpy()
    for index in range(8, len(values) - 2):
        before, after = values[:index], values[index:]
        appears = before.max() == 0 and values[index] > 0 and (after > 0).mean() >= 0.9
        jumps = before.max() > 0 and values[index] > 8 * before.max() and pd.Series(after).median() > 8 * before.max()
        if appears or jumps:
            return int(positions[index])
        if before.max() > 0 and not jumps and values[index] > 0 and (before > 0).mean() > 0.5 and index > len(values) // 2:
            return None
    return None
