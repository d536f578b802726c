"""Prompts run together where that was checked to keep the bits of single ones (docs/laws.md, law
9).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.errors import InputError, out_of_memory
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.provenance import autocast
from kvinterp.paths.decode import lockstep
from kvinterp.paths.loops import Runner
from kvinterp.paths.model_cache import CHECKED_NUMBERS, CHECKED_SITES
from kvinterp.paths.path import ExecutionPath
from kvinterp.recording import Recorder

log = logging.getLogger("kvinterp")
Done = TypeVar("Done")


def in_batches(
    adapter: Adapter,
    paths: Sequence[ExecutionPath],
    prompts: Sequence[Sequence[int]],
    steps: int,
    batch_size: int,
    work: Callable[[Sequence[int]], list[Done]],
    done: Callable[[Sequence[int], list[Done]], None] | None = None,
) -> list[Done]:
    """Runs ``work`` over prompts, in batches of equal length where batching was checked to keep the
    bits.

    A batch that runs out of memory is halved, and said. Results come back in the order of the
    prompts.

    Args:
        adapter: The model.
        paths: Every path the work runs.
        prompts: Token ids.
        steps: Steps each will run.
        batch_size: Most prompts in a batch.
        work: Takes the indices of a batch and returns one result for each.
        done: Told of every batch as it finishes.
    """
    batch_size = check_whole("batch_size", batch_size)
    results: dict[int, Done] = {}
    waiting = list(batched(prompts, batch_size))
    while waiting:
        batch = waiting.pop(0)
        try:
            if len(batch) > 1 and not all(
                batched_alike(adapter, path, [prompts[i] for i in batch], steps) for path in paths
            ):
                waiting[:0] = [[index] for index in batch]
                continue
            done_now = work(batch)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if len(batch) == 1:
                raise InputError(
                    f"out of memory with one prompt of {len(prompts[batch[0]])} tokens: shorten it, decode fewer tokens, "
                    "record less, or use a smaller dtype."
                ) from error
            half = len(batch) // 2
            log.warning("out of memory with a batch of %d: halved to %d", len(batch), half)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            waiting[:0] = [batch[:half], batch[half:]]
            continue
        results |= zip(batch, done_now, strict=True)
        if done is not None:
            done(batch, done_now)
    return [results[index] for index in range(len(prompts))]


def batched(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Indices of prompts of equal length, at most ``size`` together: no padding, so no mask that
    would change the bits.
    """
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    for indices in by_length.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def batched_alike(
    adapter: Adapter, path: ExecutionPath, prompts: Sequence[Sequence[int]], steps: int
) -> bool:
    """Whether a batch of this shape gives each prompt the bits it gets alone, at its first and at
    its last lengths.
    """
    if _routes(adapter):
        return False
    tokens = torch.tensor(list(map(list, prompts)), device=adapter.device)

    def check() -> bool:
        turn, numbers = 0, 0
        while numbers < CHECKED_NUMBERS:
            first = (tokens + turn) % adapter.facts.vocabulary
            last = torch.cat([first, first[:, :1].expand(-1, max(steps - 2, 0))], 1)
            compared = [
                _numbers_alike(adapter, path, rows, count)
                for rows, count in ((first, max(steps, 2)), (last, 2))
            ]
            if not all(compared):
                return False
            turn, numbers = turn + 1, numbers + sum(compared)
        return True

    alike = bool(
        adapter.checked_once(
            check, "batch", str(path), autocast(adapter.device), *tokens.shape, steps
        )
    )
    if not alike:
        log.info(
            "path %s on %s in %s: a batch of %d does not give the bits of single prompts; running them one by one",
            path, adapter.device, adapter.dtype, len(prompts),
        )  # fmt: skip
    return alike


def _routes(adapter: Adapter) -> bool:
    """Whether tokens go to experts: how many share one's product, and so its kernel, then hangs on
    what the other rows hold.
    """
    return any(name.endswith(".experts") for name, _ in adapter.model.named_modules())


def _numbers_alike(adapter: Adapter, path: ExecutionPath, tokens: Tensor, steps: int) -> int:
    """Decodes rows together and alone, side by side: how many numbers were the same after step 0,
    or 0 if one was not.

    Stops once enough were compared. The newest logits of a step or two would not do: in 16 bits
    another order of additions moves a number only if its sum was close to a rounding boundary, and
    a small model's step may show none.
    """
    target = adapter.at(dtype_named(path.dtype))
    layers = range(target.facts.layers)
    sites = [
        site for site in CHECKED_SITES if all(target.supports(site, layer) for layer in layers)
    ]
    batches = (tokens, *tokens.split(1))
    recorders = [Recorder(target, sites) for _ in batches]
    numbers = 0
    steps = min(steps, adapter.facts.context - tokens.shape[1] + 1)
    fed = [[rows[:, step % rows.shape[1]] for rows in batches] for step in range(1, steps)]
    with contextlib.ExitStack() as stack:
        runners = [
            stack.enter_context(Runner(adapter, path, rows, steps, [recorder]))
            for rows, recorder in zip(batches, recorders, strict=True)
        ]
        for now in lockstep(runners, steps, given=fed):
            together, *alone = [
                [rows, *recording.popped()]
                for rows, recording in zip(now.logits, recorders, strict=True)
            ]
            if not all(
                torch.equal(row, torch.cat(rows))
                for row, *rows in zip(together, *alone, strict=True)
            ):
                return 0
            numbers += sum(tensor.numel() for tensor in together) if now.number else 0
            if numbers >= CHECKED_NUMBERS:
                break
    return numbers
