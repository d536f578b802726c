"""How far the programs that were asked for move logits in the model's own dtype, beside two
recomputations in that dtype.

An audit judges programs in float64, where rounding is out of the way. Whoever serves in 16 bits
asks besides how much a batch,
chunks or a crop changes there: that is a figure, and no part of the verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvinterp.auditing.checks import UNCLEAR
from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.outcome import RIGHT
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import LONG, Subject
from kvinterp.auditing.uses import as_it_was
from kvinterp.common.numbers import counted
from kvinterp.errors import reason
from kvinterp.models import Adapter
from kvinterp.models.cache_kinds import CacheKind

ROWS = 3
"""Rows of a forward beside which a row alone is held."""


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a program moves logits in one dtype.

    Attributes:
        program: The program's text.
        dtype: The dtype that the logits were computed in.
        word: ``"right"`` where the program ran to its end, ``"refused"``, or ``"wrong"`` where it
            raised.
        why: Why it did not.
        logits: Largest difference of a logit from one forward without a cache over each row's own
            tokens.
        null: The same between two such forwards, of which one has other rows beside it, or more
            text behind the tokens.
        changed: At how many tokens another logit is the largest.
        tokens: How many tokens were compared.
        name: What the program was asked for as, such as ``batched(8)``; empty where it was written
            out.
    """

    program: str
    dtype: str
    word: str
    why: str = ""
    logits: float = 0.0
    null: float = 0.0
    changed: int = 0
    tokens: int = 0
    name: str = ""

    @property
    def said(self) -> str:
        """The figures in a sentence, which ends with the program where a name was asked for."""
        asked, program = self.name or self.program, f" ({self.program})" if self.name else ""
        if not self.tokens:
            return f"in {self.dtype} nothing was compared in {asked}{program}: {self.why.rstrip('.') or self.word}."
        ended = (
            ""
            if self.word == RIGHT
            else f", as far as it came ({self.word}: {self.why.rstrip('.')})"
        )
        return (
            f"in {self.dtype} {asked} moves logits by at most {self.logits:.2g}, and another token comes first at "
            f"{self.changed} of {counted(self.tokens, 'token')}{ended}; two recomputations, one among more rows or with more "
            f"text behind, differ by at most {self.null:.2g}{program}."
        )


def distances_of(
    adapter: Adapter, given: Sequence[Program], kind: CacheKind | None = None, lossy: bool = False
) -> list[Distance]:
    """How far each program moves logits of a model in its own dtype.

    Args:
        adapter: The model; it is left as it was.
        given: The programs.
        kind: The cache that they run on; None for the model's own.
        lossy: Whether that cache is said to lose something: then it is held against the same cache
            without the program's uses.
    """
    if not given:
        return []
    with as_it_was(adapter), torch.no_grad():
        try:
            subject = ModelSubject(adapter, (), kind, lossy)
        except Exception as error:
            return [
                Distance(
                    str(program),
                    dtype_name(adapter.dtype),
                    UNCLEAR,
                    reason(error),
                    name=program.name,
                )
                for program in given
            ]
        return [distance_of(subject, program) for program in given]


def distance_of(subject: Subject, program: Program) -> Distance:
    """How far a program moves logits of what it runs on, in the dtype that this computes in."""
    pairs, texts = list[tuple[float, int, int]](), dict[tuple[int, ...], None]()

    def hear(got: Tensor, want: Tensor, text: Sequence[int]) -> None:
        pairs.append(
            (_largest(got, want), int((got.argmax(-1) != want.argmax(-1)).sum()), len(got))
        )
        texts[tuple(text)] = None

    run = Run(subject, program, hear)
    word, why = run.run()
    dtype = dtype_name(subject.alone(subject.tokens[:1]).dtype)
    if not pairs:
        return Distance(str(program), dtype, word, why, name=program.name)
    largest, changed, tokens = zip(*pairs, strict=True)
    # A text that another begins with is compared within that one.
    whole = [
        text
        for text in texts
        if not any(len(other) > len(text) and other[: len(text)] == text for other in texts)
    ]
    return Distance(
        str(program),
        dtype,
        word,
        why,
        max(largest),
        _null(run, whole),
        sum(changed),
        sum(tokens),
        program.name,
    )


def _null(run: Run, texts: Sequence[tuple[int, ...]]) -> float:
    """Largest difference of a logit between two forwards without a cache over the texts that a
    program came to.
    """
    subject, found = run.subject, list[float]()
    for text in texts:
        whole, count = subject.alone(text), len(text)
        ends = {end for end in (count // 4, count // 2, 3 * count // 4, count - 1) if end}
        found += [_largest(subject.alone(text[:end]), whole[:end]) for end in ends]
        longer = [*text, *subject.tokens][: max(count, min(LONG, subject.max_columns))]
        found.append(_largest(subject.alone(longer)[:count], whole))
        if subject.rows > 1:
            with subject.running():
                rows = subject.plain(
                    subject.tensor([text] * ROWS), **subject.reads([_beginning(run, text)] * ROWS)
                )
            found += [_largest(row, whole) for row in rows]
    return max(found, default=0.0)


def _beginning(run: Run, text: Sequence[int]) -> tuple[int, ...]:
    """What the model's own rows begin with that this text begins with."""
    return max(
        (begin for begin in run.subject.begins if tuple(text[: len(begin)]) == begin),
        key=len,
        default=(),
    )


def _largest(one: Tensor, other: Tensor) -> float:
    """Largest difference of a logit; what a model masks is infinite on both sides, and no
    difference.
    """
    differs = one != other
    return (
        float((one.double() - other.double())[differs].abs().max()) if bool(differs.any()) else 0.0
    )
