"""Two runs compared: how far apart two tensors are; of one block each tensor's error, its place, and what one side sees alone."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.values import on_grid
from kvinterp.auditing.watch import Event, Watch

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


# Two runs of one block --------------------------------------------------------------------------------------------------

NARROWER = (torch.bfloat16, torch.float16, torch.float32)


def paired(events: Iterable[Event], *others: Iterable[Event]) -> Iterator[tuple[Any, ...]]:
    """Each event with the others' of the same name, module and turn; None where they have none."""
    waiting: list[dict[tuple[str, str], list[Event]]] = []
    for side in others:
        waiting.append(collections.defaultdict(list))
        for event in side:
            waiting[-1][event.name, event.module].append(event)
    for event in events:
        queues = [queue[event.name, event.module] for queue in waiting]
        yield event, *(queue.pop(0) if queue else None for queue in queues)


def grid(mine: Tensor, theirs: Tensor) -> str:
    """The narrowest dtype whose grid one side lies on and the other does not."""
    if not (mine.is_floating_point() and theirs.is_floating_point()):
        return ""
    for dtype in NARROWER:
        if on_grid(mine, dtype) != on_grid(theirs, dtype):
            return dtype_name(dtype)
    return ""


def swapped_nearly_equal(mine: Event, other: Event) -> bool:
    """Whether two choices differ only in experts whose scores the difference of the scores can bring past each other.

    Where each side took its highest scores and no score differs by more than d, what was swapped lies within 2 d.
    """
    if mine.tensor.shape != other.tensor.shape or mine.tensor.dim() != 1 or mine.best != other.best:
        return False
    most = (mine.tensor.double() - other.tensor.double()).abs().max().item()
    swapped = sorted(mine.chosen ^ other.chosen)
    scores = other.tensor.double()[swapped]
    return len(mine.chosen) == len(other.chosen) and (scores.max() - scores.min()).item() <= 2 * most


def compared(mine: Event, other: Event, position: int, newest: int) -> tuple[int, float, Tensor, Tensor]:
    """Absolute position of the first difference, its relative error, and both tensors there.

    Args:
        mine: What the cached run computed.
        other: What the recomputation did.
        position: The row that is looked at.
        newest: The position of the last key.
    """
    a, b = mine.tensor, other.tensor
    if mine.name in ("K", "V"):
        keys = min(a.shape[-2], b.shape[-2])
        a, b = a[..., a.shape[-2] - keys :, :].flatten(0, -3), b[..., b.shape[-2] - keys :, :].flatten(0, -3)
        # torch may be given each KV head once, or once for every query head that shares it.
        if a.shape[0] != b.shape[0] and max(a.shape[0], b.shape[0]) % min(a.shape[0], b.shape[0]) == 0:
            heads = max(a.shape[0], b.shape[0])
            a, b = (t.repeat_interleave(heads // t.shape[0], 0) for t in (a, b))
        if a.shape != b.shape:
            return position, math.inf, mine.tensor, other.tensor
        scale = b.double().abs().amax((0, 2))
        errors = (a.double() - b.double()).abs().amax((0, 2)) / scale.clamp(min=TINY)
        errors = errors.nan_to_num(math.inf)
        if not bool(errors.max() > 0):
            return position, 0.0, a, b
        # The first position that is as wrong as any, to within a factor of ten: not one that differs by rounding only.
        index = int((errors >= errors.max() / 10).int().argmax())
        return newest + 1 - keys + index, float(errors.max()), a[:, index], b[:, index]
    if mine.name in ("attention mask", "attention scores"):
        return _compare_visible(a, b, position, newest)
    if a.shape != b.shape:
        return position, 0.0, a, b
    return position, difference(a, b), a, b


def _compare_visible(a: Tensor, b: Tensor, position: int, newest: int) -> tuple[int, float, Tensor, Tensor]:
    keys = min(a.shape[-1], b.shape[-1])
    extra = a[..., : a.shape[-1] - keys], b[..., : b.shape[-1] - keys]
    for longer in extra:
        if longer.numel() and bool(_visible(longer).any()):
            return max(newest + 1 - max(a.shape[-1], b.shape[-1]), 0), math.inf, a, b
    a, b = a[..., a.shape[-1] - keys :].flatten(0, -2), b[..., b.shape[-1] - keys :].flatten(0, -2)
    if a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        return position, 0.0, a, b
    seen_a, seen_b = (_visible(t).any(0) for t in (a, b))
    if not torch.equal(seen_a, seen_b):
        return newest + 1 - keys + int((seen_a != seen_b).int().argmax()), math.inf, a, b
    if torch.bool in (a.dtype, b.dtype) or a.shape != b.shape:
        return position, 0.0, a, b
    both = seen_a & seen_b
    return position, difference(a[:, both], b[:, both]) if bool(both.any()) else 0.0, a, b


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 4


def seen_differently(first: Watch, second: Watch, module: str, newest: int) -> int | None:
    """The first key that only one side lets the newest query see, where one side is given no mask: its position."""
    masks, seen = [], []
    for watch in (first, second):
        mask, keys = watch.first(module, "attention mask"), watch.first(module, "K")
        if keys is None or watch.first(module, "attention scores") is not None:
            return None
        count = keys.shape[-2]
        masks.append(mask)
        seen.append(torch.ones(count, dtype=torch.bool) if mask is None else _seen(mask).cpu()[-count:])
    if all(mask is not None for mask in masks):
        return None
    keys_seen = max(map(len, seen))
    # Aligned at the newest key; a key that is not there is not seen.
    mine, theirs = (torch.nn.functional.pad(each, (keys_seen - len(each), 0)) for each in seen)
    return None if torch.equal(mine, theirs) else newest + 1 - keys_seen + int((mine != theirs).int().argmax())


def _seen(mask: Tensor) -> Tensor:
    return _visible(mask).flatten(0, -2).any(0)


def lost_key(mine: Event, other: Event, second: Watch, newest: int) -> int | None:
    """The first position whose key a cached step no longer has though the recomputation looks at it."""
    missing = other.tensor.shape[-2] - mine.tensor.shape[-2]
    if missing <= 0:
        return None
    mask = second.first(mine.module, "attention mask", "attention scores")
    oldest = newest + 1 - other.tensor.shape[-2]
    dropped = _dropped(mine.tensor, other.tensor, missing)
    if mask is None:
        return oldest + dropped
    seen = _seen(mask)[:missing]
    return oldest + max(dropped, int(seen.int().argmax())) if bool(seen.any()) else None


def _dropped(mine: Tensor, other: Tensor, missing: int) -> int:
    """The first index whose key is not there: up to it keys are what the recomputation has at the same place."""
    a, b = (t.flatten(0, -3).double() for t in (mine, other))
    if a.shape[0] != b.shape[0] or a.shape[-1] != b.shape[-1]:
        return 0
    count = a.shape[-2]
    kept, moved = ((a - part).abs().amax((0, 2)) for part in (b[:, :count], b[:, missing : missing + count]))
    off = kept > moved
    return int(off.int().argmax()) if bool(off.any()) else 0
