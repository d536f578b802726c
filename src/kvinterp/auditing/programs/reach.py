"""How far programs of a cache went: what a PASS says beside its word, since an audit sees only what
it ran.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Reach:
    """The largest of each number over programs that came out right.

    Attributes:
        positions: Positions of one text.
        context: Positions that the model has; 0 where nobody knows.
        rows: Rows of one batch.
        taken_back: Columns that were taken back at once.
        at_once: Columns of one forward on a cache that held some already.
        turns: How often in one program several new columns came, at its beginning or behind tokens
            that came one by one.
    """

    positions: int = 0
    context: int = 0
    rows: int = 0
    taken_back: int = 0
    at_once: int = 0
    turns: int = 0

    def beside(self, other: Reach) -> Reach:
        """The larger of each number."""
        if self is other:
            return self
        # All fields by their names: astuple copies what is in them.
        return Reach(**{name: max(value, vars(other)[name]) for name, value in vars(self).items()})

    def __str__(self) -> str:
        """As the first line of a verdict has it; what was not tried is left out."""
        known = f" of {self.context:,}" if self.context else ""
        parts = {
            f"to position {self.positions:,}{known}": self.positions,
            f"{self.rows} row{'s' * (self.rows > 1)}": self.rows,
            f"{self.taken_back} column{'s' * (self.taken_back > 1)} taken back": self.taken_back,
            f"{self.at_once} at once": self.at_once,
            f"{self.turns} turn{'s' * (self.turns > 1)}": self.turns,
        }
        return ", ".join(part for part, count in parts.items() if count)
