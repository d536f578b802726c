"""``feed``: the next columns on the cache, at once or in pieces."""

from __future__ import annotations

import dataclasses
import itertools
import random

from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import Subject

PIECES = 8
"""The most forwards of one feed."""


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
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Feed:
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
        return run.ids.shape[1] + 2 <= run.max_columns

    def do(self, run: Run) -> None:
        """Feeds the pieces; beyond the contract alone may one of a single column have a pad."""
        at_least, left = run.begin_width(), run.max_columns - 1 - run.ids.shape[1]
        ids, mask = run.columns(min(self.width, left), self.inner, self.behind)
        width = ids.shape[1]
        cut = max(self.cut, -(-width // PIECES)) if self.cut else width
        ends = [0]
        for end in [*range(cut, width, cut), width]:
            if end < at_least:
                continue
            if run.beyond or end - ends[-1] > 1 or bool(mask[:, ends[-1]].all()):
                ends.append(end)
            elif end == width:
                ends[max(len(ends) - 1, 1) :] = [width]
        for begin, end in itertools.pairwise(ends):
            piece = ids[:, begin:end], mask[:, begin:end]
            run.took(*piece, run.forward(*piece, run.cache, mask[:, end:].sum(1)))

    @property
    def columns(self) -> int:
        """How many columns it leaves on the cache: all that it feeds."""
        return self.width
