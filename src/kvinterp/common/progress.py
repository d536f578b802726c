"""How far a piece of work is: tqdm's bar on a terminal or in a notebook, one at a time."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvinterp.errors import visible

Tell = Callable[..., None]
"""Told what runs now."""
Item = TypeVar("Item")

_SHOWN: contextvars.ContextVar[bool] = contextvars.ContextVar("shown", default=True)


@contextlib.contextmanager
def counting(total: int, what: str, unit: str, progress: str = "bar") -> Iterator[Any]:
    """Shows how much of some work is done; what is counted within it is not shown.

    Args:
        total: How many there are.
        what: What is done with them, as in ``"patching"``.
        unit: What they are, in the singular.
        progress: ``"bar"`` or ``"none"``.

    Yields:
        tqdm's bar, whose ``update`` is called with how many more are done.
    """
    from tqdm.auto import tqdm

    shown = progress == "bar" and _SHOWN.get()
    token = _SHOWN.set(False)
    try:
        with tqdm(total=total, desc=visible(what), unit=unit, disable=None if shown else True) as bar:
            yield bar
    finally:
        _SHOWN.reset(token)


def each(items: Sequence[Item], what: str, unit: str, progress: str = "bar") -> Iterator[Item]:
    """Some items one after the other, counted as :func:`counting` says."""
    with counting(len(items), what, unit, progress) as bar:
        for item in items:
            yield item
            bar.update()
