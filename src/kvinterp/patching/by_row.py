"""Several lanes' patches in one forward: each changes its own row of a batch and sees no other."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener, Site
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import ExecutionPath, Runner
from kvinterp.paths.batches import batched_alike
from kvinterp.policies import Place
from kvinterp.recording import PathHook


def together(
    adapter: Adapter, path: ExecutionPath, hooks: Sequence[PatchHook], prompt: Sequence[int], steps: int, batch_size: int
) -> Iterator[Sequence[PatchHook]]:
    """Lanes in batches where it was checked that each has the bits that it has alone (docs/laws.md, law 9), else one by one.

    Args:
        adapter: The model.
        path: The path they patch.
        hooks: The patches of each lane.
        prompt: Token ids of all of them.
        steps: Steps each will run.
        batch_size: Most lanes in a batch.
    """
    for start in range(0, len(hooks), batch_size):
        batch = hooks[start : start + batch_size]
        if len(batch) > 1:
            shifted = [[(token + row) % adapter.facts.vocabulary for token in prompt] for row in range(len(batch))]
            if batched_alike(adapter, path, shifted, steps):
                yield batch
                continue
        yield from ([hook] for hook in batch)


class PatchesByRow(PathHook):
    """The patches of several lanes, the first lane's for the first row and so on.

    Args:
        hooks: Those of each lane.
    """

    def __init__(self, hooks: Sequence[PatchHook]) -> None:
        self.hooks = hooks
        self.first_layer = min(hook.first_layer for hook in hooks)
        places: dict[Site, None] = dict.fromkeys(place for hook in hooks for place in hook.listeners)
        self.listeners: dict[Site, Listener] = {
            place: functools.partial(by_row, [hook.listeners.get(place) for hook in hooks]) for place in places
        }

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        for hook in self.hooks:
            hook.begin_step(step)

    def at(self, step: int, end: int) -> None:
        """Says which step runs and how many positions the context then holds."""
        for hook in self.hooks:
            hook.at(step, end)

    def only_output(self, layer: int) -> Listener | None:
        """What the lanes do to a block's output, where that is all that each does to the block; else None."""
        changes = [hook.only_output(layer) for hook in self.hooks]
        return None if None in changes else functools.partial(by_row, changes)

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Replaces each lane's rows of what attention reads by its donor's."""
        rows = zip(self.hooks, keys.split(1), values.split(1), strict=True)
        found = [hook.on_read(place, *row) for hook, *row in rows]
        if all(changed is None for changed in found):
            return None
        both = ([None if changed is None else changed[side] for changed in found] for side in (0, 1))
        return tuple(_put(tensor, new) for tensor, new in zip((keys, values), both, strict=True))  # type: ignore[return-value]


def by_row(changes: Sequence[Listener | None], tensor: Tensor) -> Tensor | None:
    """A tensor of which each row is changed by a listener of its own; None where none changes anything.

    Args:
        changes: For each row what changes it, or None.
        tensor: With a row for each.
    """
    found = [None if change is None else change(row) for change, row in zip(changes, tensor.split(1), strict=True)]
    return None if all(new is None for new in found) else _put(tensor, found)


def _put(tensor: Tensor, rows: Iterable[Tensor | None]) -> Tensor:
    # A clone lies in memory as the tensor does, so that the next kernel meets what it would have met.
    new = tensor.clone(memory_format=torch.preserve_format)
    for number, row in enumerate(rows):
        if row is not None:
            new[number : number + 1] = row
    return new


class OneRow:
    """A lane of the cached path that is a row of one run, in which all are fed the same token.

    Args:
        runner: The run.
        number: Which row it is; the first advances them all.
        shown: What they all show, which they share; as long as they are many.
    """

    def __init__(self, runner: Runner, number: int, shown: list[Tensor]) -> None:
        self.runner, self.number, self.shown = runner, number, shown

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step; the first takes no tokens."""
        if self.number == 0:
            fed = None if tokens is None else tokens.expand(len(self.shown))
            self.shown[:] = self.runner.advance(fed).split(1)
        return self.shown[self.number]
