"""``fork``, ``request``, ``again``: a copy is fed first; another request comes in between; the same
request comes again.
"""

from __future__ import annotations

import dataclasses
import random

from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import Subject
from kvinterp.common.checks import check_known


@dataclasses.dataclass(frozen=True)
class Fork(Operation):
    """A copy of the cache is fed so many columns, and the program goes on with the original.

    Attributes:
        width: How many.
    """

    width: int
    between = (1, 4)

    def offered(self, run: Run) -> bool:
        """Where there is room."""
        return super().offered(run) and run.ids.shape[1] + self.width + 2 <= run.room

    def do(self, run: Run) -> None:
        """Feeds the copy, judged."""
        run.tries("fork")
        run.fork(self.width)


@dataclasses.dataclass(frozen=True)
class Request(Operation):
    """The model serves another request before or in between: what that leaves on a module is seen
    by what follows.

    Attributes:
        width: Tokens of the other's prompt.
        singly: Tokens that follow it, one by one.
        rows: ``"one"`` without pads; or ``"same"``: as many as the program has, padded otherwise:
            where a mask or a position was kept by its shape, the next of that shape gets another's.
    """

    width: int
    singly: int = 0
    rows: str = dataclasses.field(default="one", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("rows of request", self.rows, ("one", "same"))

    @classmethod
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Request:
        """One row more often."""
        width, same = draw.randint(1, 9), draw.random() < 0.3
        return cls(width, draw.randint(1, 3), rows="same") if same else cls(width)

    def offered(self, run: Run) -> bool:
        """In between, or of as many rows before."""
        return super().offered(run) or (self.rows == "same" and not run.filled)

    def do(self, run: Run) -> None:
        """Forwards on a cache of their own."""
        if self.rows == "same":
            run.tries("another batch, padded otherwise")
            run.serve_batch(self.width, self.singly)
        else:
            run.tries("another request in between")
            run.serve(run.other(self.width), kept="no")


@dataclasses.dataclass(frozen=True)
class Again(Operation):
    """The same request comes again, from its first token, and gets a cache of its own.

    What was kept of it outside the model, as a prefix cache that is handed out by reference, is met
    again.
    """

    def do(self, run: Run) -> None:
        """Begins anew; what is fed next is judged."""
        run.tries("the same request again")
        run.again()

    def smaller(self) -> list[Operation]:
        """How many columns it leaves on the cache: the copy is fed, the cache itself is not."""
        return []

    @classmethod
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Again:
        """It has no number."""
        return cls()
