"""``reorder``, ``select``, ``repeat``, ``join``: the cache goes on as others of its rows, as beams,
samples and batches do.
"""

from __future__ import annotations

import abc
import dataclasses
import random
from typing import Any, ClassVar

import torch
from transformers import Cache, DynamicCache

from kvinterp.auditing.programs.operations.fork import another_prompt, serve
from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import Subject
from kvinterp.models.caches import offers

MOST = 18
"""The most rows that a cache grows to."""


@dataclasses.dataclass(frozen=True)
class Moved(Operation):
    """The rows of the cache are taken by one of its methods."""

    method: ClassVar[str]
    """The cache's."""

    def offered(self, run: Run) -> bool:
        """Where the cache and its layers have the method."""
        moves = (
            run.subject.native
            and run.subject.moves == "yes"
            and offers(run.cache, self.method)
            and run.subject.rows > 1
        )
        return super().offered(run) and moves and not any(run.pads)

    @abc.abstractmethod
    def order(self, rows: int) -> list[int]:
        """The rows that there are then, of those before."""

    def asked(self, rows: list[int], before: int) -> Any:
        """What the method is given."""
        return torch.tensor(rows)

    def do(self, run: Run) -> None:
        """Moves them; what is fed next is judged."""
        rows = self.order(before := len(run.mask))
        asked = self.asked(rows, before)
        run.tries(
            self.method,
            f"cache.{self.method}({asked if isinstance(asked, int) else f'torch.tensor({rows})'})",
        )
        getattr(run.cache, self.method)(
            asked if isinstance(asked, int) else asked.to(run.subject.device)
        )
        run.lines.note(f"ids = ids[{rows}]")
        run.goes_on_as(rows)


@dataclasses.dataclass(frozen=True)
class Reorder(Moved):
    """``reorder_cache``, as beam search does.

    Attributes:
        taken: Which row stands in each place.
    """

    taken: tuple[int, ...]
    method = "reorder_cache"

    @classmethod
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Reorder:
        """Draws which rows go on, in which order."""
        return cls(tuple(draw.randrange(rows) for _ in range(rows)))

    def order(self, rows: int) -> list[int]:
        """As many rows as there were, which of them stands in each place."""
        return ([row % rows for row in self.taken] * rows)[:rows]


@dataclasses.dataclass(frozen=True)
class Select(Moved):
    """``batch_select_indices``, as contrastive search does.

    Attributes:
        taken: Which rows are kept.
    """

    taken: tuple[int, ...]
    method = "batch_select_indices"

    @classmethod
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Select:
        """Draws which rows are kept, one to three of them."""
        return cls(tuple(draw.randrange(rows) for _ in range(draw.randint(1, 3))))

    def order(self, rows: int) -> list[int]:
        """The rows that are kept, in their order."""
        return [row % rows for row in self.taken]


@dataclasses.dataclass(frozen=True)
class Repeat(Moved):
    """``batch_repeat_interleave``, as several samples of one prompt do.

    Attributes:
        times: How often each row stands there then.
    """

    times: int
    between = (2, 3)
    method = "batch_repeat_interleave"

    def order(self, rows: int) -> list[int]:
        """Each row so often, as long as they stay few."""
        times = self.times if rows * self.times <= MOST else 1
        return [row for row in range(rows) for _ in range(times)]

    def asked(self, rows: list[int], before: int) -> int:
        """What the library is asked: how often each row is repeated."""
        return len(rows) // before


@dataclasses.dataclass(frozen=True)
class Join(Operation):
    """Another request, which a cache of its own holds, joins the batch, as servers that batch
    continuously do; not drawn.
    """

    weight = 0

    def offered(self, run: Run) -> bool:
        """Where every layer holds keys and values and nothing else."""
        layers = getattr(run.cache, "layers", None) or [None]
        plain = (
            super().offered(run)
            and run.subject.kind is None
            # A class of a model's own may hold states beside its layers.
            and isinstance(run.cache, Cache)
            and vars(run.cache).keys() <= vars(DynamicCache()).keys()
            and all(type(layer).__name__ == "DynamicLayer" for layer in layers)
            # A model that writes nothing into its cache leaves layers without tensors.
            and all(isinstance(layer.keys, torch.Tensor) for layer in layers)
        )
        return plain and not any(run.pads) and run.subject.rows > 1

    def do(self, run: Run) -> None:
        """Feeds it as many columns as there are, and puts its rows under the others."""
        run.tries("rows that join", "kept = cache")
        ids = another_prompt(run, run.ids.shape[1])
        cache = serve(run, ids)
        for mine, theirs in zip(run.cache.layers, cache.layers, strict=True):
            mine.keys, mine.values = (
                torch.cat([mine.keys, theirs.keys]),
                torch.cat([mine.values, theirs.values]),
            )
        run.lines.note(f"ids = torch.cat([ids, torch.tensor({ids.tolist()})])")
        run.texts.append(ids[0].tolist())
        run.draws.append(run.draw)
        run.begins.append(run.subject.begins[-1])
        run.pads.append(0)
        run.ids, run.mask = (
            torch.cat([run.ids, ids]),
            torch.cat([run.mask, torch.ones_like(run.mask[:1])]),
        )
        run.lines.append("for mine, theirs in zip(kept.layers, cache.layers):")
        run.lines += [
            f"    mine.{name} = torch.cat([mine.{name}, theirs.{name}])"
            for name in ("keys", "values")
        ]
        run.lines.append("cache = kept")
