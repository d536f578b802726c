"""``fork``, ``request``, ``again``: a copy is fed first; another request comes in between; the same request comes again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.programs.program import Operation, Runs
from kvinterp.programs.running import Run
from kvinterp.programs.subject import Subject


@dataclasses.dataclass(frozen=True)
class Fork(Operation):
    """A copy of the cache is fed so many columns, and the program goes on with the original.

    Attributes:
        width: How many.
    """

    width: int
    between = (1, 4)
    proof = ("copies fed", "no copy was fed")

    def offered(self, run: Run) -> bool:
        """Where there is room."""
        return super().offered(run) and run.ids.shape[1] + self.width + 2 <= run.room

    def do(self, run: Runs) -> Iterable[Tensor]:
        """Feeds the copy, judged."""
        run.tries("fork")
        run.fork(self.width)
        return ()


@dataclasses.dataclass(frozen=True)
class Request(Operation):
    """The model serves another request in between: what that leaves on a module is seen by what follows.

    Attributes:
        width: Tokens of the other's prompt.
    """

    width: int
    between = (1, 9)
    proof = ("other requests", "no other request was served")

    def do(self, run: Runs) -> Iterable[Tensor]:
        """A forward on a cache of its own."""
        run.tries("another request in between")
        run.serve(run.other(self.width), kept="no")
        run.count("other requests")
        return ()


@dataclasses.dataclass(frozen=True)
class Again(Operation):
    """The same request comes again, from its first token, and gets a cache of its own.

    What was kept of it outside the model, as a prefix cache that is handed out by reference, is met again.
    """

    def do(self, run: Runs) -> Iterable[Tensor]:
        """Begins anew; what is fed next is judged."""
        run.tries("the same request again")
        run.again()
        return ()

    def smaller(self) -> list[Operation]:
        """None."""
        return []

    @classmethod
    def drawn(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Again:
        """It has no number."""
        return cls()

    def check(self, adapter: Adapter, length: int) -> None:
        """Refuses every path: its text is decoded once."""
        raise UnsupportedError(f"{self} begins a request anew, and a path decodes its text once: leave it out.")
