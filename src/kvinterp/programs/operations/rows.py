"""``reorder``, ``select``, ``repeat``, ``join``: the cache goes on as others of its rows, as beams, samples and batches do."""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvinterp.programs.operations.crop import has
from kvinterp.programs.program import Operation
from kvinterp.programs.running import Run
from kvinterp.programs.subject import ModelSubject, Subject

if TYPE_CHECKING:
    from kvinterp.paths.programmed import Lane

MOST = 6
"""The most rows that a cache grows to."""


@dataclasses.dataclass(frozen=True)
class _Moved(Operation):
    """The rows of the cache are taken by one of its methods."""

    proof = ("rows moved", "no row was moved")

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

    def asked(self, rows: list[int], before: int) -> Any:
        """What the method is given."""
        return torch.tensor(rows)

    def do(self, run: Run) -> None:
        """Moves them; what is fed next is judged."""
        rows = self.order(len(run.texts))
        asked = self.asked(rows, len(run.texts))
        run.tries(self.method)
        run.lines.append(f"cache.{self.method}({asked if isinstance(asked, int) else f'torch.tensor({rows})'})")
        getattr(run.cache, self.method)(asked if isinstance(asked, int) else asked.to(run.subject.device))
        run.goes_on_as(rows)

    def lead(self, lane: Lane) -> Iterable[Tensor]:
        """Moves them."""
        rows = self.order(len(lane.mask))
        lane.select(rows, self.method, self.asked(rows, len(lane.mask)))
        return ()


@dataclasses.dataclass(frozen=True)
class Reorder(_Moved):
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
class Select(_Moved):
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
class Repeat(_Moved):
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

    def asked(self, rows: list[int], before: int) -> int:
        """How often."""
        return len(rows) // before


@dataclasses.dataclass(frozen=True)
class Join(Operation):
    """Another request, which a cache of its own holds, joins the batch, as servers that batch continuously do; not drawn."""

    weight = 0
    proof = ("rows joined", "no row joined")

    def offered(self, run: Run) -> bool:
        """Where every layer holds keys and values and nothing else."""
        layers = getattr(run.cache, "layers", None) or [None]
        plain = super().offered(run) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)
        return plain and not any(run.pads) and run.subject.rows > 1

    def do(self, run: Run) -> None:
        """Feeds it as many columns as there are, and puts its rows under the others."""
        run.tries("rows that join")
        text = run.tokens(run.ids.shape[1])
        ids = run.subject.tensor([text])
        run.lines.append("kept = cache")
        run.write(ids, {}, None)
        other = run.subject.feed(ids, None, None, None)[1]
        joined(run.cache, other)
        run.lines += ["for mine, theirs in zip(kept.layers, cache.layers):"]
        run.lines += [f"    mine.{name} = torch.cat([mine.{name}, theirs.{name}])" for name in ("keys", "values")]
        run.lines.append("cache = kept")
        run.texts.append(text)
        run.pads.append(0)
        run.ids, run.mask = torch.cat([run.ids, ids]), torch.cat([run.mask, torch.ones_like(ids)])

    def lead(self, lane: Lane) -> Iterable[Tensor]:
        """The same."""
        lane.join()
        return ()


def joined(cache: Any, other: Any) -> None:
    """Puts the rows of another cache of as many positions under its own."""
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        mine.keys, mine.values = torch.cat([mine.keys, theirs.keys]), torch.cat([mine.values, theirs.values])
