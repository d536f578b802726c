"""The rows of a program as they are fed: each row's own tokens, the pads before and between them, and
what draws more.

:class:`~kvinterp.auditing.programs.running.Run` feeds their columns to a cache and judges the logits.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.subject import Subject, row_draw


class FedRows:
    """The rows of one program.

    Args:
        subject: What the program runs on, which draws tokens and makes tensors of them.
        program: What is done.

    Attributes:
        texts: Each row's own tokens.
        draws: What draws them.
        begins: What each row's text begins with.
        pads: Pads that are still to come in front of each row.
        ids, mask: All columns on the cache, ``[row, column]``.
        max_columns: The most columns that may be fed.
        beyond: Whether what no contract of a cache promises may happen too.
        draw: What draws tokens that belong to no row.
    """

    def __init__(self, subject: Subject, program: Program) -> None:
        self.subject: Any = subject
        self.program, self.draw = program, random.Random(program.rows.seed)
        self.beyond = program.rows.beyond == "yes"
        # A program that says so goes further than those that are drawn.
        far = program.columns
        self.max_columns = (
            min(
                subject.context,
                max(subject.max_columns, far + 64 if far > subject.max_columns else 0),
            )
            + 1
        )

    def begin_rows(self) -> None:
        """No column is fed yet: each row has its beginning and its pads before it."""
        rows = len(self.program.rows.pads)
        self.draws = [row_draw(self.program.rows.seed, row) for row in range(rows)]
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        begins = self.subject.begins
        self.begins = [begins[(self.program.rows.seed + row) % len(begins)] for row in range(rows)]
        self.ids = self.mask = self.subject.tensor([[]] * rows)
        # Without a mask nothing tells a model of pads.
        self.pads = (
            list(self.program.rows.pads) if "attention_mask" in self.subject.takes else [0] * rows
        )

    @property
    def filled(self) -> bool:
        """Whether the cache holds anything."""
        return bool(self.ids.shape[1])

    def tokens(self, count: int, draw: random.Random) -> list[int]:
        """So many new tokens."""
        return [self.subject.token(draw) for _ in range(count)]

    def columns(
        self, width: int, inner: tuple[int, ...] = (), behind: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """So many new columns of all rows, pads first where any are still to come, and their mask.

        Args:
            width: How many.
            inner: Pads that each row has here in any case.
            behind: Pads that each row ends with.
        """
        width = min(width, self.max_columns - self.ids.shape[1])
        width = max(width, self.begin_width())
        width = 2 if width == 1 and any(self.pads) and not self.beyond else width
        known = {"model": self.subject.pad, "end": self.subject.end}
        pad = max(
            known.get(
                self.program.rows.pad,
                min(5 if self.subject.pad != 5 else 4, self.subject.vocabulary - 1),
            ),
            0,
        )
        ids, mask = list[list[int]](), list[list[int]]()
        for row, text in enumerate(self.texts):
            lead = min(self.pads[row], width)
            self.pads[row] -= lead
            inside = (
                self.beyond and row < len(inner) and text and lead < width and not self.pads[row]
            )
            more = min(inner[row], width - lead - 1) if inside else 0
            last = (
                min(behind[row], width - lead - more - 1)
                if self.beyond and row < len(behind)
                else 0
            )
            count = width - lead - more - max(last, 0)
            new = [] if text else list(self.begins[row][:count])
            new += self._special(
                row, len(text) + len(new), self.tokens(count - len(new), self.draws[row])
            )
            text += new
            ids.append([pad] * (lead + more) + new + [pad] * last)
            mask.append([0] * (lead + more) + [1] * len(new) + [0] * last)
        return self.subject.tensor(ids), self.subject.tensor(mask)

    def _special(self, row: int, begin: int, new: list[int]) -> list[int]:
        """New tokens of a text from one position on; every second a pad, an end or a beginning
        where the rows say so.
        """
        controls = self.subject.controls
        if self.program.rows.tokens == "plain" or not controls:
            return new
        turn = self.program.rows.seed + row
        return [
            controls[(column // 2 + turn) % len(controls)] if column % 2 else token
            for column, token in enumerate(new, begin)
        ]

    def goes_on_as(self, rows: list[int]) -> None:
        """The cache holds these of its rows now."""
        self.texts = [list(self.texts[row]) for row in rows]
        self.draws, self.begins = (
            [self.draws[row] for row in rows],
            [self.begins[row] for row in rows],
        )
        self.pads, self.ids, self.mask = (
            [self.pads[row] for row in rows],
            self.ids[rows],
            self.mask[rows],
        )

    def begin_width(self) -> int:
        """Columns of a first forward that holds whole beginnings."""
        if self.subject.whole == "no" or self.filled:
            return 0
        return 1 + max(
            pads + len(begin) for pads, begin in zip(self.pads, self.begins, strict=True)
        )

    def aside(self) -> Callable[[], None]:
        """What gives back the rows as they are now, after something was tried."""
        kept = (
            copy.deepcopy(self.texts),
            list(self.draws),
            list(self.begins),
            list(self.pads),
            self.ids,
            self.mask,
        )

        def back() -> None:
            self.texts, self.draws, self.begins, self.pads, self.ids, self.mask = kept

        return back
