"""Runs a program: each operation's logits are held against one forward without a cache over each
row's own tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.programs.crashes import CRASHES, LIBRARIES, OURS, REFUSES, whose
from kvinterp.auditing.programs.fed_rows import FedRows
from kvinterp.auditing.programs.lines import FED, Lines
from kvinterp.auditing.programs.outcome import (
    PLAIN,
    REFUSED,
    RIGHT,
    UNCACHED,
    WRONG,
    OwnError,
    PlainError,
    RefusedError,
    Wrong,
    WrongError,
)
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.reach import Reach
from kvinterp.auditing.programs.subject import ALONE, Subject, apart
from kvinterp.common import spec
from kvinterp.errors import InputError, UnsupportedError, named

COMMON = frozenset({"prompt", "decode step", "batch"})
"""Uses that nearly every program has."""
PADDED = ", left padding"
ENDLESS = 2**31
"""The context of a model that has no positions."""


class Run(FedRows):
    """One program on a model.

    Args:
        subject: The model.
        program: What is done.
        hear: Told of the logits of each row, of those that are right (``[token, vocabulary]``) and
            of its tokens so far; none is judged then.

    Attributes:
        model: The subject's model; None where it is functions.
        lines: What was done, in lines of Python.
        held: What lasts until its end.
        cache: The cache.
        since: Columns fed since the last crop.
        uses: The uses of a cache that were tried.
        worst: The largest error of a row.
        wrong: Where the logits are wrong.
        off: Where the plain forward over its columns is furthest off.
        shape: Rows and columns of logits that are others than were fed.
        raised: The error that a crash raised, and what it said.
        word, why: What it came to.
        reach: How far it went.
        turns_next: Whether the last token came alone, so that several begin a turn.
        ran: How many programs had run, this one included.
        origin: The program's text before it was shrunk.
    """

    def __init__(
        self,
        subject: Subject,
        program: Program,
        hear: Callable[[Tensor, Tensor, list[int]], None] | None = None,
    ) -> None:
        super().__init__(subject, program)
        self.hear = hear
        self.model: Any = getattr(subject, "model", None)
        subject.capacity = self.max_columns
        self.ends: list[int] = []
        self.singly = 0
        self.uses: list[str] = []
        self.reach = Reach(
            context=0 if self.model is None or subject.context >= ENDLESS else subject.context
        )
        self.turns_next = True
        self.worst, self.ran = 0.0, 0
        self.raised = self.word = self.why = self.origin = ""
        self.wrong: Wrong | None = None
        self.off: Wrong | None = None
        self.shape: tuple[int, ...] = ()
        self.lines, self.held = Lines(), contextlib.ExitStack()
        self.pending: tuple[Tensor, Tensor] | None = None
        self.without: Callable[[], float] | None = None
        self.begin()

    def begin(self) -> None:
        """No column is fed yet, and nothing is on the cache."""
        self.begin_rows()
        self.cache: Any = None
        self.since, self.lines.named = 0, False

    def run(self) -> tuple[str, str]:
        """The word that it comes to, and why."""
        rows = self.program.rows
        if not self.subject.offers(rows):
            return REFUSED, f"this model does not offer {spec.text_of(rows)}"
        with self.subject.running(), self.subject.called_as(rows), self.held:
            self.lines += self._setting()
            self.makes_cache()
            for step in self.program.steps:
                if self.cache is None and self.filled:
                    break  # generate() gave none back.
                try:
                    if step.offered(self):
                        step.do(self)
                except WrongError as error:
                    return WRONG, f"{error}"
                except PlainError as error:
                    return PLAIN, f"{error}"
                except RefusedError as error:
                    return REFUSED, f"{error}"
                except Exception as error:
                    return self._raised(error)
                self.without = None
            return (
                self._beside()
                if self.hear is None and bool((self.mask == 0).any())
                else (RIGHT, "")
            )

    def _setting(self) -> list[str]:
        """The line that sets the attention implementation."""
        kind = self.program.rows.attention
        eager = ['torch.compiler.set_stance("force_eager")'] if kind == "flex_attention" else []
        return [*eager, *[f"model.set_attn_implementation({kind!r})"] * (kind != "own")]

    def _beside(self) -> tuple[str, str]:
        """Whether the forward without a cache over the same padded columns is right too."""
        self.without = None
        try:
            self._excuse(self.ids[:, :0], self.mask[:, :0])
        except PlainError:
            model_kwargs = self.model_kwargs(self.mask, self.mask.shape[1])
            plain = self.subject.plain_line(
                self.lines.columns(self.ids, self.ids[:, :0]), **model_kwargs
            )
            self.lines.append(f"logits = {plain}")
            self.lines.control, self.wrong = "", self.off
            return WRONG, f"{self.wrong}"
        return RIGHT, ""

    def makes_cache(self) -> None:
        """Makes the cache that the rows say, where it is not the model's own."""
        kind, columns = (
            self.program.rows.cache,
            min(self.subject.context, max(self.program.columns + 16, 64)),
        )
        if kind == "own" or self.model is None:
            return
        self.cache = self.subject.cache(kind, columns)
        self.max_columns = columns if kind == "static" else self.max_columns
        names = {
            "bare": "DynamicCache()",
            "recording": "cache that records its past",
            "static": "StaticCache",
        }
        names |= {"offloaded": "OffloadedCache"}
        self.tries(names[kind], self.subject.cache_line(kind, columns))
        self.lines += ["cache.activate_past_recording()"] * (kind == "recording")

    def _raised(self, error: Exception) -> tuple[str, str]:
        """Whose an error is: a library's own ``raise`` is a refusal, what breaks deeper is a
        crash.
        """
        who, line_of_code = whose(error, self.model, self.cache)
        if who == OURS and self.model is None and isinstance(error, InputError):
            raise error
        self.raised = named(error)
        said = f"{self.raised} ({line_of_code})"
        # An UnsupportedError says that the model's own code does not offer it.
        if isinstance(error, UnsupportedError) or (who == REFUSES and self.subject.decodes):
            return REFUSED, said
        kind = self.program.rows.attention
        if who == CRASHES and kind != "own" and line_of_code.partition("/")[0] not in LIBRARIES:
            # The library's class offers this attention, and a part that its user put in does not.
            return (
                REFUSED,
                f"under {kind}, which it is not set to, code of the user's own raises {said}",
            )
        if "compiled" in self.uses and getattr(self.subject, "lifted", None):
            # What lifts casts is traced with the model, and nobody runs it so.
            return REFUSED, f"compiled in float64 it raises {said}"
        if who == OURS and self.model is not None and self.subject.kind is None:
            raise OwnError(
                f"{self.program}: kvinterp itself raised {said}: please report it."
            ) from error
        try:
            if self.pending is not None:
                self._excuse(*self.pending)
        except Exception as same:
            return PLAIN, f"it raises {said}; without a cache: {same}"
        return WRONG, f"it raises {said}"

    def tries(self, use: str, *lines: str) -> None:
        """Notes a use of the cache, and lines of Python."""
        self.uses += [use] if use not in self.uses else []
        self.lines += lines

    def reaches(self, **far: int) -> None:
        """Notes how far it goes."""
        self.reach = self.reach.beside(Reach(**far))

    def turn(self) -> None:
        """Notes that several new columns come, at the beginning or behind single ones."""
        if self.turns_next:
            self.reach = dataclasses.replace(self.reach, turns=self.reach.turns + 1)
        self.turns_next = False

    @property
    def use(self) -> str:
        """What the program is about: its last use that not every program has, and how columns are
        fed only where nothing else was done to the cache.
        """
        about = [use for use in self.uses if use not in COMMON] or self.uses[-1:]
        others = [use for use in about if "several chunks" not in use]
        return (others or about or [""])[-1]

    # What is fed ----------------------------------------------------------------------------------

    def model_kwargs(self, mask: Tensor, width: int) -> dict[str, Tensor]:
        """The mask and positions that the forward of the newest columns is given."""
        subject = self.subject
        model_kwargs = self.program.rows.model_kwargs(
            mask, width, bool((mask == 0).any()), subject.takes, subject.offset
        )
        return {**model_kwargs, **subject.reads(self.begins)}

    def forward(self, ids: Tensor, mask: Tensor, cache: Any, later: Tensor | None = None) -> Any:
        """New columns on a cache, judged; returns the cache behind them.

        Args:
            ids, mask: The columns.
            cache: What they are fed on.
            later: How many tokens each row's text has beyond them.
        """
        width, full = ids.shape[1], torch.cat([self.mask, mask], 1)
        inside = bool((full.diff(dim=1) < 0).any())
        padding = "" if bool(full.all()) else "pads within a text" if inside else "left padding"
        self.tries(self._use(width, bool((mask == 0).any()), padding))
        if width > 1:
            self.turn()
        self.turns_next = width == 1
        self.pending = ids, mask
        model_kwargs = self.model_kwargs(full, width)
        self.lines.note(f"ids = {self.lines.columns(self.ids, ids)}")
        columns = self.lines.columns(torch.cat([self.ids, ids], 1), ids[:, :0])
        plain = self.subject.control_line(columns, **self.model_kwargs(full, full.shape[1]))
        line = self.subject.feed_line(ids, "no" if cache is None else "yes", **model_kwargs)
        kept = self.program.rows.kept(width)
        some = "" if kept is None else f"[:, {kept}]"
        self.lines.judged(FED, columns, f"logits = {plain}[:, -{width}:]{some}", line)
        logits, cache = self.subject.feed(ids, cache, **model_kwargs)
        self.judge(logits, ids, mask, later, kept=kept)
        self.reaches(at_once=width if self.filled and width > 1 else 0)
        return cache

    def _use(self, width: int, padded: bool, padding: str) -> str:
        """What a forward is called in the list of uses; ``padding``: what pads it ever had,
        ``padded``: whether it has some.
        """
        given, alone = self.program.rows.told, "mask alone"
        if ways := self.program.rows.ways:
            return f"{ways}{' on a filled cache' * self.filled}{PADDED * bool(padding)}"
        name = "prompt" if not self.filled else "decode step" if width == 1 else "several chunks"
        if padding:
            parts = [
                padding,
                *["in a later part"] * (self.filled and padded),
                *[alone] * (given == "mask_alone"),
            ]
            return ", ".join(parts)
        if len(self.texts) > 1:
            return "batch" if name != "several chunks" else "batch, several chunks"
        if given == "needed" or name == "several chunks" or not self.subject.takes:
            return name
        return {"positions": "positions given", "all": "mask and positions given"}.get(given, alone)

    def judge(
        self,
        logits: Tensor,
        ids: Tensor,
        mask: Tensor,
        later: Tensor | None = None,
        last: bool = False,
        kept: list[int] | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        """Holds each row's new tokens against the plain forward of its text.

        Args:
            logits: ``[row, column, vocabulary]``.
            ids, mask: The new columns.
            later: How many tokens each row's text has beyond them.
            last: Whether the logits are those of as many of the last tokens as there are.
            kept: The columns whose logits they are, unless all.
            ends: How many of the last tokens each row has, where rows end before others.

        Raises:
            WrongError: One is off.
            PlainError: So is the plain forward over the same columns.
        """
        newest = not last and self.subject.newest == "yes" and logits.shape[1] == 1
        last = last or newest
        count = ids.shape[1] if kept is None else len(kept)
        if logits.shape[0] != len(self.texts) or (not last and logits.shape[1] != count):
            self.shape = tuple(logits.shape[:2])
            if kept is not None:
                self._excuse(ids, mask)
            raise WrongError(
                f"logits of {' x '.join(map(str, self.shape))} rows and columns for {len(self.texts)} x {count}"
            )
        if self.hear is None and self.subject.among(self.texts) >= ALONE:
            raise PlainError(
                f"in a batch of {len(self.texts)} rows the forward without a cache differs from each row alone"
            )
        worst: Wrong | None = None
        padded = not bool(self.mask.all() & mask.all())
        limit = self.subject.limit_of(len(self.texts), padded)
        self.singly = logits.shape[1] - 1 if last else 0
        for row, text in enumerate(self.texts):
            columns = (
                [-1]
                if newest
                else [*range(logits.shape[1])]
                if last
                else mask[row].nonzero().flatten().tolist()
            )
            columns = columns if ends is None else columns[: ends[row]]
            end = len(text) - (0 if later is None else int(later[row]))
            begin = end - len(columns)
            asked = [n for n, column in enumerate(columns) if kept is None or column in kept]
            if not asked:
                continue
            positions = [columns[n] if kept is None else kept.index(columns[n]) for n in asked]
            got = logits[row][positions]
            pieces = (
                self._pieces(row, mask, len(columns) - 1 if last else 0)
                if self.subject.lossy
                else ()
            )
            itself = self._on_cache(text[:end], pieces)[begin:][asked] if pieces else None
            want = self.right(got, text, begin, end, asked) if itself is None else itself
            if self.subject.varies and not pieces and not apart(got, want) <= limit:
                want = self.subject.alone(text[:end])[begin:]
                if last:
                    want = torch.stack(
                        [self.subject.alone(text[: n + 1])[-1] for n in range(begin, end)]
                    )
                want = want[asked]
            if self.hear is not None:
                self.hear(got, want, text[:end])
                continue
            error = apart(got, want)
            self.worst = max(self.worst, error)
            self.reaches(positions=end, rows=len(self.texts))
            if not error <= limit:
                each = [apart(a, b) for a, b in zip(got, want, strict=True)]
                at = each.index(max(each))
                if worst is None or each[at] > worst.error:
                    # Before the new tokens, or up to the one whose logits these are.
                    before = ids.shape[1] - logits.shape[1] + 1 if last else columns[asked[at]] + 1
                    real = (
                        torch.cat([self.mask, mask[:, :before]], 1)[row]
                        .nonzero()
                        .flatten()
                        .tolist()
                    )
                    generated = (at, logits.shape[1]) if last else (0, 0)
                    known = self.lines.text(row, torch.cat([self.ids, ids], 1), real, generated)
                    finite = "yes" if bool(want[at].isfinite().all()) else "no"
                    starts, upto = itertools.accumulate(pieces, initial=0), begin + asked[at] + 1
                    pieces = tuple(
                        min(piece, upto - n)
                        for piece, n in zip(pieces, starts, strict=False)
                        if n < upto
                    )
                    worst = Wrong(
                        row,
                        each[at],
                        self.lines.got(row, positions[at]),
                        known,
                        finite,
                        pieces=pieces,
                    )
        if worst is not None:
            self._excuse(ids, mask)
            self.wrong = worst
            raise WrongError(f"{worst}")

    def _on_cache(self, text: list[int], pieces: tuple[int, ...]) -> Tensor:
        """What the same cache gives without the use.

        Raises:
            UnsupportedError: It raises: a quantiser may not take one row of this length.
        """
        try:
            return self.subject.on_cache(text, pieces)  # type: ignore[no-any-return]
        except Exception as error:
            raise UnsupportedError(
                f"the same cache without this use raises {named(error)}"
            ) from error

    def _pieces(self, row: int, mask: Tensor, singly: int) -> tuple[int, ...]:
        """How many of a row's own tokens each forward fed that is on the cache, and this one, whose
        last came singly.
        """
        whole, end = torch.cat([self.mask[row], mask[row]]), self.mask.shape[1] + mask.shape[1]
        ends = [0, *self.ends, end - singly, *range(end - singly + 1, end + 1)]
        counts = [int(whole[begin:stop].sum()) for begin, stop in itertools.pairwise(ends)]
        return tuple(count for count in counts if count)

    def right(
        self, got: Tensor, text: list[int], begin: int, end: int, asked: Sequence[int] | None = None
    ) -> Tensor:
        """What these logits should be: as a longer text has them where they agree with that, or as
        this one has them.

        Args:
            got: The logits.
            text: A row's own tokens.
            begin, end: Which of them they belong to.
            asked: Which of those; None: all.
        """
        positions = [*range(begin, end)] if asked is None else [begin + n for n in asked]
        want = self.subject.alone(text, longer="yes")[positions]
        return (
            want if apart(got, want) <= self.subject.limit else self.subject.alone(text)[positions]
        )

    def _excuse(self, ids: Tensor, mask: Tensor) -> None:
        """Raises PlainError where the plain forward over the same columns, mask and positions is
        off too.
        """
        full, fed = torch.cat([self.mask, mask], 1), torch.cat([self.ids, ids], 1)
        model_kwargs = self.model_kwargs(full, full.shape[1])
        out = self.subject.plain_as_called(fed, **model_kwargs)
        off = 0.0
        for row, text in enumerate(self.texts):
            real = full[row].nonzero().flatten().tolist()
            got = out[row][real]
            if not real or (error := apart(got, want := self.right(got, text, 0, len(got)))) <= off:
                continue
            off, each = error, [apart(a, b) for a, b in zip(got, want, strict=True)]
            at = each.index(max(each))
            known = self.lines.text(row, fed, real[: at + 1], (0, 0))
            self.off = Wrong(
                row, each[at], FED[0].format(row=row, column=real[at]), known, sentence=UNCACHED
            )
        if not off <= self.subject.limit:
            raise PlainError(
                f"without a cache the same columns are off by {off:.2g} of the largest logit"
            )
        if self.without is not None and not (off := self.without()) <= self.subject.limit:
            option = "use_cache" if self.subject.native else "use_past_kv_cache"
            raise PlainError(f"generate({option}=False) is off by {off:.2g} of the largest logit")

    def took(self, ids: Tensor, mask: Tensor, cache: Any) -> None:
        """The cache holds these columns now."""
        end = self.ids.shape[1] + ids.shape[1]
        self.ends += range(end - self.singly, end + 1)
        self.pending = None
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        self.cache, self.since = cache, self.since + ids.shape[1]
