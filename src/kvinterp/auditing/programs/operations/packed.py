"""``pack`` and ``tree``: several texts in one forward, told apart by positions, or by a mask of the
user's own.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvinterp.auditing.programs.lines import FED
from kvinterp.auditing.programs.outcome import PlainError, Wrong, WrongError
from kvinterp.auditing.programs.program import MASKS, Operation, mask_4d
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import Subject, apart

MOST = 9
"""Tokens of one of the texts."""


@dataclasses.dataclass(frozen=True)
class _Several(Operation):
    """Texts of so many tokens in one forward.

    Attributes:
        widths: How many tokens each has.
    """

    widths: tuple[int, ...]

    @classmethod
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> _Several:
        """Two or three short ones."""
        return cls(tuple(draw.randint(1, MOST) for _ in range(draw.randint(2, 3))))

    @property
    def numbers(self) -> list[int]:
        """How many tokens each text has, none none."""
        return [max(width, 1) for width in self.widths]


@dataclasses.dataclass(frozen=True)
class Pack(_Several):
    """Several texts one after the other in one row of a forward without a cache, where positions
    alone begin anew.

    transformers makes the mask that keeps them apart from the positions where it is given none, as
    padding-free training and servers' prefills do.
    """

    def offered(self, run: Run) -> bool:
        """Where the model promises it: several do not hand positions to what makes their masks, and
        no cache is asked about.
        """
        # A row reads one source.
        return (
            run.subject.packs
            and sum(self.numbers) < run.max_columns
            and not run.subject.reads(run.begins)
        )

    def do(self, run: Run) -> None:
        """Each text against its own plain forward."""
        subject, ends = run.subject, [0]
        texts = [run.tokens(width, run.draw) for width in self.numbers]
        for text in texts:
            ends.append(ends[-1] + len(text))
        ids = subject.tensor([[token for text in texts for token in text]])
        positions = (
            subject.tensor([[n for text in texts for n in range(len(text))]]) + subject.offset
        )
        run.tries(f"texts packed in one row, {run.program.rows.ways}".removesuffix(", "))
        run.lines.judged(
            FED, "", "", f"logits = {subject.control_line(ids, position_ids=positions)}"
        )
        logits = subject.plain_as_called(ids, position_ids=positions)
        _judge(
            run,
            logits,
            [(0, begin, text, len(text)) for begin, text in zip(ends[:-1], texts, strict=True)],
            None,
        )


@dataclasses.dataclass(frozen=True)
class Tree(_Several):
    """Several ways to go on in one forward on the cache, which a 4D mask and positions keep apart:
    a tree of drafts, or requests that share their prefix. They are fed to a copy of the cache, and
    the program goes on with the original.
    """

    def offered(self, run: Run) -> bool:
        """Where a 4D mask is taken and every layer holds all columns."""
        layers = getattr(run.cache, "layers", None) or [None]
        whole = super().offered(run) and all(
            type(layer).__name__ == "DynamicLayer" for layer in layers
        )
        takes = (
            "bool_mask" in run.subject.choices.get("told", ()) and run.program.rows.kept(1) is None
        )
        fits = run.ids.shape[1] + sum(self.numbers) < run.max_columns and not run.lines.named
        # Its positions count tokens, which a forward given the mask alone does not.
        counts = run.program.rows.told != "mask_alone" or not any(run.program.rows.pads)
        return bool(whole and takes and fits and counts and not any(run.pads))

    def do(self, run: Run) -> None:
        """Each way against the plain forward of its row's text and itself."""
        subject, columns, width = run.subject, run.ids.shape[1], sum(self.numbers)
        ways = [[run.tokens(n, run.draw) for n in self.numbers] for _ in run.texts]
        new = subject.tensor([[token for way in row for token in way] for row in ways])
        # Which way each new column belongs to: it sees the whole prefix and those of its own before
        #     it.
        of = subject.tensor([n for n, count in enumerate(self.numbers) for _ in range(count)])
        beside = mask_4d(torch.ones_like(new), width) & (of[:, None] == of)
        seen = torch.cat([run.mask.bool()[:, None, None].expand(-1, 1, width, -1), beside], 3)
        before = torch.cat(
            [
                mask_4d(run.mask, columns),
                torch.zeros(len(new), 1, columns, width).bool().to(seen.device),
            ],
            3,
        )
        inside = subject.tensor([n for count in self.numbers for n in range(count)])
        positions = run.mask.sum(1, keepdim=True) + inside + subject.offset
        known = (run.mask.cumsum(-1) - 1).clamp(min=0) + subject.offset
        model_kwargs = {"attention_mask": seen, "position_ids": positions}
        whole = {
            "attention_mask": torch.cat([before, seen], 2), "position_ids": torch.cat([known, positions], 1),
        }  # fmt: skip
        other = ", ".join(
            name
            for name in run.program.rows.ways.split(", ")
            if name and name not in MASKS.values()
        )
        run.tries(f"several ways to go on in one forward, {other}".removesuffix(", "))
        every = torch.cat([run.ids, new], 1)
        run.lines.append("kept = copy.deepcopy(cache)")
        control = f"logits = {subject.control_line(every, **whole)}[:, -{width}:]"
        run.lines.judged(FED, "", control, subject.feed_line(new, "yes", **model_kwargs))
        logits, _ = subject.feed(new, copy.deepcopy(run.cache), **model_kwargs)
        parts, begin = [], 0
        for n, count in enumerate(self.numbers):
            parts += [
                (row, begin, [*text, *ways[row][n]], count) for row, text in enumerate(run.texts)
            ]
            begin += count
        _judge(run, logits, parts, lambda: subject.plain_as_called(every, **whole)[:, -width:])
        run.lines.append("cache = kept")


Part = tuple[int, int, list[int], int]
"""A row and a column of logits, a text, and how many of its last tokens these and the next are
of.
"""


def _judge(run: Run, logits: Tensor, parts: Sequence[Part], plain: object) -> None:
    """Holds each part against the plain forward of its text.

    Args:
        run: The program.
        logits: ``[row, column, vocabulary]``.
        parts: What they belong to.
        plain: Gives those of the same columns without a cache; None where these are.

    Raises:
        WrongError: One is off.
        PlainError: So is the plain forward over the same columns.
    """
    subject, worst, columns = run.subject, None, max(begin + count for _, begin, _, count in parts)
    if logits.shape[1] != columns:
        run.shape = tuple(logits.shape[:2])
        raise WrongError(f"logits of {logits.shape[1]} columns for {columns}")
    rights = [
        run.right(logits[r, c : c + count], text, len(text) - count, len(text))
        for r, c, text, count in parts
    ]
    for (row, begin, text, count), right in zip(parts, rights, strict=True):
        if run.hear is not None:
            run.hear(logits[row, begin : begin + count], right, text)
            continue
        each = [
            apart(got, want)
            for got, want in zip(logits[row, begin : begin + count], right, strict=True)
        ]
        at = each.index(max(each))
        run.worst = max(run.worst, each[at])
        if not each[at] <= subject.limit and (worst is None or each[at] > worst.error):
            own = text[: len(text) - count + at + 1]
            finite = "yes" if bool(right[at].isfinite().all()) else "no"
            worst = Wrong(
                row, each[at], run.lines.got(row, begin + at), f"torch.tensor([{own}])", finite
            )
    if worst is None:
        return
    if callable(plain):
        out = plain()
        pairs = zip(parts, rights, strict=True)
        off = max(
            apart(out[row, begin : begin + count], right) for (row, begin, _, count), right in pairs
        )
        if not off <= subject.limit:
            raise PlainError(
                f"without a cache the same columns are off by {off:.2g} of the largest logit"
            )
    run.wrong = worst
    raise WrongError(f"{worst}")
