"""``feed``: the next columns on the cache, at once or in pieces."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.programs.program import Operation
from kvinterp.programs.running import Run
from kvinterp.programs.subject import Subject

if TYPE_CHECKING:
    from kvinterp.paths.programmed import Lane

PIECES = 8
"""The most forwards of one."""


@dataclasses.dataclass(frozen=True)
class Feed(Operation):
    """The next columns.

    Attributes:
        width: How many.
        cut: How many at a time; 0: all at once.
        inner: Pads that each row begins with here, inside its text, as where turns are unequal; in an audit only where a program
            goes beyond the contract.
        behind: Pads that each row ends with, likewise: on the right of unequal prompts.
    """

    width: int
    cut: int = 0
    inner: tuple[int, ...] = ()
    behind: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    @classmethod
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Feed:
        """Short ones, longer ones, and those at the sizes that the config names."""
        few, some, edge = draw.randint(1, 6), draw.randint(7, 20), draw.choice(draw.choice(subject.sizes))
        inner = tuple(draw.randint(0, 2) for _ in range(rows)) if beyond == "yes" else ()
        return cls(draw.choice([few, few, some, edge]), draw.randint(0, 4), inner)

    def offered(self, run: Run) -> bool:
        """Always, where there is room."""
        return run.ids.shape[1] + 2 <= run.room

    def do(self, run: Run) -> None:
        """Feeds the pieces."""
        ids, mask = run.columns(min(self.width, run.room - 1 - run.ids.shape[1]), self.inner, self.behind)
        width = ids.shape[1]
        cut = max(self.cut, -(-width // PIECES)) if self.cut else width
        ends = [*range(cut, width, cut), width]
        if not run.beyond:
            ends = self._no_lone_pad(ends, mask)
        for begin, end in zip([0, *ends], ends, strict=False):
            part = ids[:, begin:end], mask[:, begin:end]
            run.took(*part, run.forward(*part, run.cache, mask[:, end:].sum(1)))

    def lead(self, lane: Lane) -> Iterable[Tensor]:
        """Feeds them, of the path's own text those that nothing takes back."""
        return lane.feed(self.width, self.cut, self.inner, self.behind)

    def check(self, adapter: Adapter, length: int) -> None:
        """Pads between tokens stand in a window."""
        window = min((each for each in adapter.facts.windows if each is not None), default=None)
        if any((*self.inner, *self.behind)) and window is not None and window < length:
            raise UnsupportedError(
                f"{self} puts pads between tokens, and {adapter.facts.name} has a window of {window} rows, in which they would "
                f"count over {length}: give pads on the left, or fewer tokens."
            )

    @property
    def columns(self) -> int:
        """All."""
        return self.width

    @staticmethod
    def _no_lone_pad(ends: list[int], mask: Tensor) -> list[int]:
        """The same cuts without pieces of a single column that has a pad."""
        kept: list[int] = []
        begin = 0
        for end in ends:
            lone = end - begin == 1 and not bool(mask[:, begin].all())
            last = end == ends[-1]
            if lone and not last:
                continue
            if lone and kept:
                kept.pop()
            kept.append(end)
            begin = end
        return kept
