"""The positions of a text that are kept: all, the generated ones, the last ones, every n-th, those
around given tokens, or given ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from kvinterp.common.checks import whole_number
from kvinterp.errors import unexpected
from kvinterp.models.inputs import token_ids

_FORM = re.compile(r"(last|every)\(\s*(\d+)\s*\)")
_AROUND = re.compile(r"around\(\s*(\d+)\s*((?:,\s*\d+\s*)+)\)")
EXPECTED = (
    "'newest', 'all', 'generated', 'last(64)', 'every(16)', 'around(4, 13)' (at most 4 positions from a token with the id "
    "13), or a list of positions in the text, such as range(10, 20)"
)


@dataclasses.dataclass(frozen=True)
class Window:
    """Positions of a text, counted from its first token, pads left out.

    Attributes:
        kind: ``"all"``, ``"generated"``, ``"last"``, ``"every"``, ``"around"`` or ``"given"``.
        count: Of ``"last"`` how many, of ``"every"`` and ``"around"`` the distance.
        given: The positions of ``"given"``, the token ids of ``"around"``.
    """

    kind: str = "all"
    count: int = 0
    given: frozenset[int] = frozenset()

    @property
    def decided_later(self) -> bool:
        """Whether it depends on the next ``count`` positions what is kept of a position."""
        return self.kind in ("last", "around")

    def near(self, position: int, tokens: Sequence[int]) -> bool:
        """Whether one of the given tokens stands around a position of a text."""
        around = tokens[max(position - self.count, 0) : position + self.count + 1]
        return not self.given.isdisjoint(around)

    def holds(self, position: int, prompt_length: int) -> bool:
        """Whether a position may be kept; which are the last, and which stand around a token that
        is yet to come, is known later.
        """
        if self.kind == "generated":
            return position >= prompt_length
        if self.kind == "every":
            return position % self.count == 0
        return self.kind != "given" or position in self.given

    def columns(
        self, first: int, stop: int, prompt_length: int, pads: Sequence[int]
    ) -> tuple[int, ...] | None:
        """The columns of a batch that some row keeps.

        Args:
            first: The first column.
            stop: The end.
            prompt_length: The columns of the prompts.
            pads: The pads in front of each row.

        Returns:
            None for all of them.
        """
        if self.kind == "all":
            return None
        first = max(first, stop - self.count) if self.kind == "last" else first
        different = sorted(set(pads))
        return tuple(
            at
            for at in range(first, stop)
            if any(self.holds(at - pad, prompt_length - pad) for pad in different)
        )


def window_of(positions: Any) -> Window | None:
    """Parses what a user gives for positions; None for ``"newest"`` or -1.

    Raises:
        InputError: It is none of these.
    """
    if whole_number(positions) == -1 or (isinstance(positions, str) and positions == "newest"):
        return None
    if isinstance(positions, Window):
        return positions
    if isinstance(positions, str):
        if positions in ("all", "generated"):
            return Window(positions)
        match = _FORM.fullmatch(positions.strip())
        if match is not None and int(match[2]):
            return Window(match[1], int(match[2]))
        match = _AROUND.fullmatch(positions.strip())
        if match is not None:
            tokens = frozenset(int(token) for token in match[2].split(",")[1:])
            return Window("around", int(match[1]), tokens)
        raise unexpected("positions", positions, EXPECTED)
    numbers = None if whole_number(positions) is not None else token_ids(positions)
    if not numbers or min(numbers) < 0:
        raise unexpected("positions", positions, EXPECTED)
    return Window("given", given=frozenset(numbers))
