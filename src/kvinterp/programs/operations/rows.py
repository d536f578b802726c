"""``reorder``, ``select`` and ``repeat``: the cache goes on as others of its rows, as beams and samples do."""

from __future__ import annotations

import abc
import dataclasses
import random
from typing import Any

from kvinterp.programs.operations.crop import has
from kvinterp.programs.program import Operation
from kvinterp.programs.running import Run
from kvinterp.programs.subject import ModelSubject, Subject

MOST = 6
"""The most rows that a cache grows to."""


@dataclasses.dataclass(frozen=True)
class Moved(Operation):
    """The rows of the cache are taken by one of its methods."""

    def offered(self, run: Run) -> bool:
        """Where the cache and its layers have the method."""
        batches = super().offered(run) and isinstance(run.subject, ModelSubject) and run.subject.adapter.plain
        return batches and has(run.cache, self.method) and not any(run.pads) and run.subject.rows > 1

    @property
    @abc.abstractmethod
    def method(self) -> str:
        """The cache's method."""

    @abc.abstractmethod
    def order(self, rows: int) -> list[int]:
        """The rows that there are then, of those before."""

    def asked(self, rows: list[int], run: Run) -> Any:
        """What the method is given."""
        return run.subject.tensor(rows)

    def do(self, run: Run) -> None:
        """Moves them; what is fed next is judged."""
        rows = self.order(len(run.texts))
        asked = self.asked(rows, run)
        run.tries(self.method)
        run.lines.append(f"cache.{self.method}({asked if isinstance(asked, int) else f'torch.tensor({rows})'})")
        getattr(run.cache, self.method)(asked)
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
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Reorder:
        """Any rows."""
        return cls(tuple(draw.randrange(rows) for _ in range(rows)))

    def order(self, rows: int) -> list[int]:
        """As many as there were."""
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
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Select:
        """Up to three."""
        return cls(tuple(draw.randrange(rows) for _ in range(draw.randint(1, 3))))

    def order(self, rows: int) -> list[int]:
        """Those."""
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
        """Each so often, while there are few."""
        times = self.times if rows * self.times <= MOST else 1
        return [row for row in range(rows) for _ in range(times)]

    def asked(self, rows: list[int], run: Run) -> int:
        """How often."""
        return len(rows) // len(run.texts)
