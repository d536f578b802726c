"""``feed``: the next columns on the cache, at once or in pieces."""

from __future__ import annotations

import dataclasses
import random

from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import Subject


@dataclasses.dataclass(frozen=True)
class Feed(Operation):
    """The next columns.

    Attributes:
        width: How many.
        cut: How many at a time; 0: all at once.
        inner: Pads that each row begins with here, inside its text, as where turns are unequal;
            only where a program goes beyond the contract.
        behind: Pads that each row ends with, likewise: on the right of unequal prompts.
    """

    width: int
    cut: int = 0
    inner: tuple[int, ...] = ()
    behind: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    @classmethod
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Feed:
        """Short ones, longer ones, and those at the sizes that the config names."""
        few, some, edge = (
            draw.randint(1, 6),
            draw.randint(7, 20),
            draw.choice(draw.choice(subject.sizes)),
        )
        inner = tuple(draw.randint(0, 2) for _ in range(rows)) if beyond == "yes" else ()
        return cls(draw.choice([few, few, some, edge]), draw.randint(0, 4), inner)

    def offered(self, run: Run) -> bool:
        """Always, where there is room; a cache that loses is not fed pads alone, which would move
        what it keeps whole.
        """
        if run.subject.lossy and max(run.pads, default=0) >= (self.cut or self.width):
            return False
        return run.ids.shape[1] + 2 <= run.room

    def do(self, run: Run) -> None:
        """Feeds the pieces."""
        run.feed(self.width, self.cut, self.inner, self.behind)

    @property
    def columns(self) -> int:
        """How many columns it leaves on the cache: all that it feeds."""
        return self.width
