"""Runs the patches of several runs in one forward: each run is one row of the batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint, Listener
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import ExecutionPath, Runner
from kvinterp.paths.batches import batched_alike
from kvinterp.policies import CacheRows
from kvinterp.recording import PathHook


def batches(
    adapter: Adapter,
    path: ExecutionPath,
    hooks: Sequence[PatchHook],
    prompt: Sequence[int],
    steps: int,
    batch_size: int,
) -> Iterator[Sequence[PatchHook]]:
    """Yields runs in batches where a check showed that each keeps the bits it has alone
    (docs/laws.md, law 9), else singly.

    Args:
        adapter: The model.
        path: The path that they patch.
        hooks: The patches of each run.
        prompt: Token ids of all of them.
        steps: Steps each will run.
        batch_size: Most runs in a batch.
    """
    for start in range(0, len(hooks), batch_size):
        batch = hooks[start : start + batch_size]
        if len(batch) > 1:
            shifted = [
                [(token + row) % adapter.facts.vocabulary for token in prompt]
                for row in range(len(batch))
            ]
            if batched_alike(adapter, path, shifted, steps):
                yield batch
                continue
        yield from ([hook] for hook in batch)


class PatchesByRow(PathHook):
    """The patches of several runs, one row of the batch a run.

    Args:
        hooks: The patches of each run, in the order of the rows.
    """

    def __init__(self, hooks: Sequence[PatchHook]) -> None:
        self.hooks = hooks
        self.first_layer = min(hook.first_layer for hook in hooks)
        self.listeners: dict[HookPoint, Listener] = {
            hook_point: functools.partial(
                by_row, [hook.listeners.get(hook_point) for hook in hooks]
            )
            for hook_point in dict.fromkeys(
                hook_point for hook in hooks for hook_point in hook.listeners
            )
        }

    def begin_step(self, step: int) -> None:
        """Begins the step in every run."""
        for hook in self.hooks:
            hook.begin_step(step)

    def at(self, step: int, end: int) -> None:
        """Sets the step and how many positions the context then holds."""
        for hook in self.hooks:
            hook.at(step, end)

    def only_output(self, layer: int) -> Listener | None:
        """The listener of a block's output, if no run patches anything else in the block; else
        None.
        """
        changes = [hook.only_output(layer) for hook in self.hooks]
        return None if None in changes else functools.partial(by_row, changes)

    def on_read(
        self, cache_rows: CacheRows, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Replaces the keys and values of each run's row by its donor's."""
        rows = zip(self.hooks, keys.split(1), values.split(1), strict=True)
        changes = [hook.on_read(cache_rows, *row) for hook, *row in rows]
        if not any(changes):
            return None
        new_keys, new_values = zip(*(change or (None, None) for change in changes), strict=True)
        return _replaced(keys, new_keys), _replaced(values, new_values)


def by_row(changes: Sequence[Listener | None], tensor: Tensor) -> Tensor | None:
    """Calls a listener for each row of a tensor and returns the changed tensor; None if no row
    changes.

    Args:
        changes: The listener of each row, or None.
        tensor: The tensor, with a row for each listener.
    """
    rows = [
        None if change is None else change(row)
        for change, row in zip(changes, tensor.split(1), strict=True)
    ]
    return None if all(row is None for row in rows) else _replaced(tensor, rows)


def _replaced(tensor: Tensor, rows: Iterable[Tensor | None]) -> Tensor:
    # The copy keeps the tensor's strides, so that the next kernel computes the same bits.
    new = tensor.clone(memory_format=torch.preserve_format)
    for number, row in enumerate(rows):
        if row is not None:
            new[number : number + 1] = row
    return new


class OneRow:
    """A run of the cached path that is one row of a run; all rows are fed the same token.

    Args:
        runner: The run.
        number: The number of the row; row 0 advances the run.
        rows: The logits of every row, a list that all rows share.
    """

    def __init__(self, runner: Runner, number: int, rows: list[Tensor]) -> None:
        self.runner, self.number, self.rows = runner, number, rows

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step; the first takes no tokens."""
        if self.number == 0:
            fed = None if tokens is None else tokens.expand(len(self.rows))
            self.rows[:] = self.runner.advance(fed).split(1)
        return self.rows[self.number]
