"""What a program comes to: its word, the logits that are furthest off, and the exceptions that end it.

``running.py`` raises and keeps them; ``search.py``, ``uses.py`` and the page read them.
"""

from __future__ import annotations

import dataclasses

from kvinterp.errors import KvinterpError

RIGHT, WRONG, PLAIN, REFUSED = "right", "wrong", "off without a cache too", "refused"

UNCACHED = (
    "without a cache row {row} is off by {error:.3g} of its largest logit, and with one it is right"
)


class WrongError(Exception):
    """The cached path is wrong, and the plain forward over the same columns is right."""


class PlainError(Exception):
    """The plain forward over the same columns is off too, which says nothing about a cache."""


class RefusedError(Exception):
    """Its user said that this is not offered."""


class OwnError(KvinterpError):
    """kvinterp itself raised, not the model: that is our fault, and no verdict."""


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The logits that are furthest off: those of one token of one row.

    Attributes:
        row: The row.
        error: Largest difference over the largest of those that are right.
        got: They, as an expression of the program's lines of Python.
        text: The row's own tokens up to theirs, ``[1, position]``, as such an expression.
        finite: ``"no"`` where not all that are right are finite, as where a model masks words.
        sentence: What is said of it.
        pieces: Where what is right is the same cache without the use: how many of the text's tokens
            each forward fed.
    """

    row: int
    error: float
    got: str
    text: str
    finite: str = "yes"
    sentence: str = "row {row} is off by {error:.3g} of its largest logit"
    pieces: tuple[int, ...] = ()

    def __str__(self) -> str:
        beside = " from the same cache without this use" if self.pieces else ""
        return self.sentence.format(row=self.row, error=self.error) + beside
