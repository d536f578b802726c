"""``fork``, ``request``, ``again``, ``reset``: a copy is fed first; another request comes in between;
the same request comes again; another one leaves the very cache, which is emptied.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

from torch import Tensor

from kvinterp.auditing.programs.outcome import RefusedError
from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.subject import Subject
from kvinterp.common.checks import check_known
from kvinterp.errors import UnsupportedError, named
from kvinterp.models.caches import offers


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
        return super().offered(run) and run.ids.shape[1] + self.width + 2 <= run.max_columns

    def do(self, run: Run) -> None:
        """Feeds the copy, judged."""
        run.tries("fork")
        needs_two_caches(run)
        try:
            copied = copy.deepcopy(run.cache)
        except Exception as error:
            raise UnsupportedError(f"copy.deepcopy of the cache raises {named(error)}") from error
        back = run.aside()
        ids, mask = run.columns(self.width)
        run.lines.append("kept = copy.deepcopy(cache)")
        run.lines.note("before = ids")
        run.forward(ids, mask, copied)
        run.lines.append("cache = kept")
        run.lines.note("ids = before")
        back()


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
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Request:
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
            serve_batch(run, self.width, self.singly)
        else:
            run.tries("another request in between")
            serve(run, another_prompt(run, self.width), kept="no")


@dataclasses.dataclass(frozen=True)
class Again(Operation):
    """The same request comes again, from its first token, and gets a cache of its own.

    What was kept of it outside the model, as a prefix cache that is handed out by reference, is met
    again.
    """

    def do(self, run: Run) -> None:
        """Begins anew; what is fed next is judged."""
        run.tries("the same request again")
        run.begin()
        run.ends, run.singly, run.pending = [], 0, None
        run.makes_cache()


@dataclasses.dataclass(frozen=True)
class Reset(Operation):
    """Another request is served on the very cache, which is then emptied, as a static one is between
    two texts: what it leaves behind is seen by what is fed next.

    Not drawn: only a program's beginning has an empty cache.

    Attributes:
        width: Tokens of the other's prompt.
    """

    width: int
    weight = 0

    def offered(self, run: Run) -> bool:
        """At the beginning, where the subject is a transformers model itself."""
        return run.subject.native and not run.filled

    def do(self, run: Run) -> None:
        """Serves and empties; what is fed next is judged."""
        ids = another_prompt(run, self.width).repeat(len(run.texts), 1)
        model_kwargs = run.subject.reads(run.subject.begins[-1:] * len(run.texts))
        held = "no" if run.cache is None else "yes"
        run.lines.append(run.subject.feed_line(ids, held, **model_kwargs))
        cache = run.subject.feed(ids, run.cache, **model_kwargs)[1]
        if not offers(cache, "reset"):
            raise RefusedError("its cache has no reset()")
        run.tries("a cache that was reset", "cache.reset()")
        cache.reset()
        run.cache = cache


def needs_two_caches(run: Run) -> None:
    """Raises RefusedError where the code holds one cache itself."""
    if run.subject.requests == "one":
        raise RefusedError(
            "it holds its cache itself, for one request at a time, as requests='one' says"
        )


def another_prompt(run: Run, width: int) -> Tensor:
    """Tokens of another request, ``[1, column]``."""
    count, begin = min(width, run.max_columns), run.subject.begins[-1]
    return run.subject.tensor([[*begin, *run.tokens(count - len(begin), run.draw)]])  # type: ignore[no-any-return]


def serve(run: Run, ids: Tensor, kept: str = "yes") -> Any:
    """Serves another request on a cache of its own, which is given back."""
    needs_two_caches(run)
    model_kwargs = run.subject.reads(run.subject.begins[-1:])
    line = run.subject.feed_line(ids, "no", **model_kwargs)
    run.lines += [line] if kept == "yes" else ["kept = cache", line, "cache = kept"]
    return run.subject.feed(ids, None, **model_kwargs)[1]


def serve_batch(run: Run, width: int, singly: int) -> None:
    """Serves another batch of as many rows on a cache of its own, padded otherwise where rows can
    be padded.
    """
    needs_two_caches(run)
    subject, mine = run.subject, run.program.rows.pads
    pads = [(mine[row % len(mine)] + 1 + row) % width for row in range(len(run.texts))]
    pads = pads if "attention_mask" in subject.takes else [0] * len(pads)
    if subject.whole == "yes":
        width = max(
            width,
            1 + max(lead + len(begin) for lead, begin in zip(pads, run.begins, strict=True)),
        )
    columns = min(width + singly, run.max_columns)
    rows = [
        [*run.tokens(count, run.draw), *begin, *run.tokens(columns, run.draw)][:columns]
        for count, begin in zip(pads, run.begins, strict=True)
    ]
    ids, cache = subject.tensor(rows), None
    mask = (subject.tensor([range(columns)] * len(pads)) >= subject.tensor(pads)[:, None]).long()
    run.lines += ["kept = cache"] * run.filled
    for end in range(min(width, columns), columns + 1):
        begin = 0 if cache is None else end - 1
        model_kwargs = run.program.rows.model_kwargs(
            mask[:, :end], end - begin, any(pads), subject.takes, subject.offset
        )
        model_kwargs |= subject.reads(run.begins)
        run.lines.append(
            subject.feed_line(ids[:, begin:end], "no" if cache is None else "yes", **model_kwargs)
        )
        cache = subject.feed(ids[:, begin:end], cache, **model_kwargs)[1]
    run.lines += ["cache = kept"] * run.filled
