"""How far a piece of work is, and for about how long it goes on: said in one line, by whoever works to whoever shows it.

Whoever shows it is given what runs now as a text, and the share that is done where that is known: :func:`shown` makes of it a
bar on a terminal, and a line now and then where there is none. Whoever works counts with :func:`counting` or :func:`each`; where
nobody listens, as in a notebook, that is tqdm's bar.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvinterp.common.console import echo, escaped

Tell = Callable[..., None]
"""Told what runs now and, where that is known, which share of the work is done, from 0 to 1."""
Item = TypeVar("Item")

_LISTENER: contextvars.ContextVar[Tell | None] = contextvars.ContextVar("listener", default=None)
_SHARED: contextvars.ContextVar[bool] = contextvars.ContextVar("shared", default=True)
_SECONDS = 5.0
"""Least time between two lines where there is no terminal."""
_GROWTH = 20
"""And no more than so many lines while the time that has passed doubles."""


# How long it goes on ---------------------------------------------------------------------------------------------------


class Pace:
    """How many of some pieces of work are done, and for about how long the rest goes on: from what those of a kind took.

    Args:
        kinds: The kind of each piece, by its key, in the order in which they are done.
        unit: What they are, in the plural.
        tell: Told.
        clock: Gives seconds.
    """

    def __init__(
        self, kinds: Mapping[str, str], unit: str, tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kinds, self._unit, self._tell, self._clock = dict(kinds), unit, tell, clock
        self._total, self._left, self._count = len(kinds), Counter(kinds.values()), Counter[str]()
        self._took: dict[str, float] = dict.fromkeys(self._left, 0.0)
        self._since, self._now = clock(), ""
        self._first: tuple[float, float] | None = None

    def say(self, now: str = "", share: float | None = None) -> None:
        """Says what runs now.

        Args:
            now: What runs now; as before where it is empty.
            share: Which share is done of the piece that is worked at; None where that is not known.
        """
        self._now = now or self._now
        rest, past = self._rest(share), self._clock() - self._since + sum(self._took.values())
        more = "" if rest is None else f"about {_duration(rest)} left"
        if self._total > 1:
            counted = ", ".join(filter(None, [f"{self._count.total()} of {self._total} {self._unit}", more]))
            text = ": ".join(filter(None, [counted, self._now]))
        else:
            text = ", ".join(filter(None, [self._now, more]))
        self._tell(text, None if rest is None else past / (past + rest) if past + rest else 0.0)

    def done(self, key: str) -> None:
        """Says that a piece is done."""
        kind, at = self._kinds.pop(key), self._clock()
        self._left[kind] -= 1
        self._count[kind] += 1
        self._took[kind] += at - self._since
        self._since, self._first = at, None
        self.say()

    def _rest(self, share: float | None) -> float | None:
        """Seconds that remain; None where nothing is known, or nothing remains."""
        at, own = self._clock(), next(iter(self._kinds.values()), "")
        here, alone = at - self._since, self._of_piece(at, share)
        if not self._kinds or (alone is None and not self._count):
            return None
        rest = max(0.0, self._mean(own) - here) if alone is None else alone
        others = self._left - Counter({own: 1})
        # Of the first piece nothing is known but the share of it that is done.
        each = {kind: self._mean(kind) if self._count else here + rest for kind in others}
        return rest + sum(others[kind] * each[kind] for kind in others)

    def _of_piece(self, at: float, share: float | None) -> float | None:
        """Seconds that the piece still takes, by its share; what it took before that was first told, as loading does, is past."""
        if share is None:
            return None
        began, first = self._first = self._first or (at, share)
        return (at - began) * (1 - share) / (share - first) if share > first else None

    def _mean(self, kind: str) -> float:
        if self._count[kind]:
            return self._took[kind] / self._count[kind]
        return sum(self._took.values()) / self._count.total()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


# Who works -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(tell: Tell) -> Iterator[None]:
    """Within it whatever is counted is told."""
    token = _LISTENER.set(tell)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """Within it what is counted is no share of one piece of work: it is told as a text alone."""
    token = _SHARED.set(False)
    try:
        yield
    finally:
        _SHARED.reset(token)


@contextlib.contextmanager
def counting(total: int, what: str, unit: str, progress: str = "told") -> Iterator[Callable[[int], object]]:
    """Counts what is done of some work; what is counted within it is not told.

    Args:
        total: How many there are.
        what: What is done with them, as in ``"patching"``.
        unit: What they are, in the singular.
        progress: ``"bar"``: told to whoever listens, else shown as a bar on a terminal or in a notebook; ``"told"``: told to
            whoever listens; ``"none"``: neither.

    Yields:
        What is called with how many more are done.
    """
    tell = _LISTENER.get()
    if tell is None or progress == "none":
        from tqdm.auto import tqdm

        with tqdm(total=total, desc=what, unit=unit, disable=None if progress == "bar" else True) as bar:
            yield bar.update
        return
    shared, count = _SHARED.get(), 0
    pace = Pace(dict.fromkeys(map(str, range(total)), ""), f"{unit}s", lambda text, _: tell(f"{what} {text}"))

    def advance(more: int = 1) -> None:
        nonlocal count
        for number in range(count, count + more):
            if shared:
                tell(f"{what} {number + 1} of {total} {unit}s", (number + 1) / total)
            else:
                pace.done(str(number))
        count += more

    with listening(_nobody):
        yield advance


def each(items: Sequence[Item], what: str, unit: str, progress: str = "told") -> Iterator[Item]:
    """Some items one after the other, counted as :func:`counting` says."""
    with counting(len(items), what, unit, progress) as done:
        for item in items:
            yield item
            done(1)


def _nobody(text: str, share: float | None = None) -> None:
    """Hears nothing."""


# Who shows it ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shown(elsewhere: str = "lines") -> Iterator[Tell]:
    """Shows on standard error what it is told: as a bar on a terminal, else a line now and then.

    Args:
        elsewhere: Where there is no terminal: ``"lines"`` or ``"nothing"``.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(lambda line: echo(line, err=True)) if elsewhere == "lines" else _nobody
        return
    with contextlib.ExitStack() as held:
        yield _Bar(console, held)


class Lines:
    """Says the newest of what it is told now and then: nothing of short work, a hundred lines of an hour's.

    Args:
        say: Says a line.
        clock: Gives seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._began = self._last = clock()

    def __call__(self, text: str, share: float | None = None) -> None:
        """Says it, unless something was said just now."""
        now = self._clock()
        if now - self._last >= max(_SECONDS, (now - self._began) / _GROWTH):
            self._last = now
            self._say(text)


class _Bar:
    """One line that changes, begun once there is something to say."""

    def __init__(self, console: Any, held: contextlib.ExitStack) -> None:
        self._console, self._held, self._task = console, held, None
        self._bar: Any = None

    def __call__(self, text: str, share: float | None = None) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if self._bar is None:
            columns = (SpinnerColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = self._held.enter_context(Progress(*columns, console=self._console, transient=True))
            self._task = self._bar.add_task("", total=None)
        self._bar.update(
            self._task, description=escaped(text), completed=share or 0.0, total=None if share is None else 1.0
        )
