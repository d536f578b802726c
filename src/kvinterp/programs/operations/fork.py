"""``fork`` and ``request``: a copy of the cache is fed something else first; the model serves another request in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import Tensor

from kvinterp.programs.program import Operation, Runs
from kvinterp.programs.running import Run


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
