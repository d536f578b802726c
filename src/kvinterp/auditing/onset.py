"""Where a kernel changes its order: a position from which on a difference is there that was not before."""

from __future__ import annotations

from kvinterp.auditing.blocks import BlockModel, referenced
from kvinterp.auditing.ladder import PrecisionRun
from kvinterp.auditing.measure import forced, jumps
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant


def onset(twin: Adapter, run: PrecisionRun) -> tuple[str, int, int] | None:
    """The rung, layer and position at which a difference appears or jumps in every prompt, gone with fixed kernels."""
    swept = run.sweep[(run.sweep["layer"] >= 0) & (run.sweep["part"] == "output")]
    starts = set(jumps(swept).values())
    start = starts.pop() if len(starts) == 1 else None
    found = swept[(swept["position"] == start) & (swept["error"] > 0)]
    if start is None or found.empty or _still(twin, run, start, set(found["layer"])):
        return None
    return run.name, int(found["layer"].min()), start


def _still(twin: Adapter, run: PrecisionRun, start: int, layers: set[int]) -> bool:
    """Whether these blocks still differ around a position with fixed kernels; what differs there in none other is not asked."""
    stop = min(start + 2, run.plan.length)
    try:
        with referenced(
            BlockModel(twin, BatchInvariant(), only=layers), run.plan.tokens(0, twin.device)[:, :stop]
        ) as hooks:
            return any(row["error"] > 0 for row in forced(hooks, start, stop) if row["layer"] in layers)
    except UnsupportedError:
        return True
