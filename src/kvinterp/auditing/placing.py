"""Where a failed exercise goes wrong: the first block whose output is off, and the first tensor that attention reads there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvinterp.auditing.bench import FAILED, Bench, Check
from kvinterp.auditing.feeding import Seen
from kvinterp.auditing.first_difference import Feed, Finding, Sight
from kvinterp.auditing.watch import Event

__all__ = ["placed"]

Run = Callable[[Bench], list[Check]]


def placed(bench: Bench, check: Check, run: Run) -> Check:
    """A failed check with its first wrong layer and tensor, as far as running it again tells.

    The same check is made with each block's output in the place of the logits: the first that fails holds the error, or is
    handed it. There what attention reads in the last cached step is compared with what it reads in the recomputation.

    Args:
        bench: What the check ran on.
        check: A failed one.
        run: Makes the check and those that come with it.
    """
    if check.name.startswith("generate()"):
        return check  # What generate() feeds is wrong, not what the blocks make of it.
    blocks = len(bench.runner.blocks)
    low, high = 0, blocks
    while low < high:  # What is wrong in one block stays wrong in those after it.
        middle = (low + high) // 2
        if _fails(bench, check, run, middle):
            high = middle
        else:
            low = middle + 1
    if low == blocks:
        return dataclasses.replace(check, layer=blocks, tensor="logits")
    found = _first_tensor(bench, check, run, low)
    if found is None:
        return dataclasses.replace(check, layer=low)
    return dataclasses.replace(check, layer=low, tensor=found.tensor, module=found.module)


def _fails(bench: Bench, check: Check, run: Run, layer: int) -> bool:
    other = dataclasses.replace(bench, runner=bench.runner.otherwise(), asks="no")
    other.runner.stands_in = layer
    try:
        other.measure_plain()
        return any(one.name == check.name and one.status == FAILED for one in run(other))
    # A block whose output is not one row a position cannot stand for the logits.
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False


def _first_tensor(bench: Bench, check: Check, run: Run, layer: int) -> Finding | None:
    runner = bench.runner.otherwise()
    runner.watched = layer
    run(dataclasses.replace(bench, runner=runner, asks="no"))
    for mine in [seen for seen in runner.seen if seen.cached and seen.new == 1][::-1]:
        same = mine.batch, mine.total
        whole = next((seen for seen in runner.seen if not seen.cached and (seen.batch, seen.total) == same), None)
        if whole is not None:
            return _differing(mine, whole, layer, bench.beyond * (check.null or 0.0))
    return None


def _differing(mine: Seen, theirs: Seen, layer: int, threshold: float) -> Finding | None:
    feed = Feed(mine.total - 1, mine.total, mine.total - 1)
    sight = Sight(feed, layer, [_filled(e, mine.total) for e in mine.watch.events], theirs.watch.events)
    found = next(iter(sight.findings(threshold)), None)
    if found is None or found.tensor != "attention output":
        return found
    given = [any(e.name == "attention mask" for e in side) for side in (sight.mine, sight.theirs)]
    # One side has no mask at all.
    return dataclasses.replace(found, tensor="attention mask") if given[0] != given[1] else found


def _filled(event: Event, total: int) -> Event:
    """Without the slots of a static cache that are still empty."""
    axis = -2 if event.name in ("K", "V") else -1 if event.name in ("attention mask", "attention scores") else None
    tensor: Any = event.tensor
    if axis is None or tensor.shape[axis] <= total:
        return event
    return dataclasses.replace(event, tensor=tensor.narrow(axis, 0, total))
