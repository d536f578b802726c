"""Shows the progress of work by tqdm's bar, on a terminal or in a notebook, one bar at a time."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvinterp.errors import visible

Tell = Callable[..., None]
"""A function that is called with the name of the work that begins."""
Item = TypeVar("Item")

_FREE: contextvars.ContextVar[bool] = contextvars.ContextVar("free", default=True)
"""Whether no bar is shown at the moment."""


_NO_FORECAST = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


@contextlib.contextmanager
def counting(
    total: int, what: str, unit: str, progress: str = "bar", done: int = 0, forecast: str = "yes"
) -> Iterator[Any]:
    """Shows a bar for some work; inside it no other bar is shown.

    Args:
        total: The number of items.
        what: The work, as in ``"patching"``.
        unit: The name of an item, in the singular.
        progress: ``"bar"`` or ``"none"``.
        done: How many are done already; they take no part in the forecast.
        forecast: ``"no"`` leaves out the time that is left: of items of many kinds it would grow as
            it runs.

    Yields:
        tqdm's bar; call its ``update`` with the number of further items that are done.
    """
    from tqdm.auto import tqdm

    visible_bar = progress == "bar" and _FREE.get()
    token = _FREE.set(False)
    try:
        with tqdm(
            total=total, desc=visible(what), unit=unit, disable=None if visible_bar else True, initial=done,
            bar_format=None if forecast == "yes" else _NO_FORECAST,
        ) as bar:  # fmt: skip
            yield bar
    finally:
        _FREE.reset(token)


def each(items: Sequence[Item], what: str, unit: str, progress: str = "bar") -> Iterator[Item]:
    """Yields items one after the other, with a bar as in :func:`counting`."""
    with counting(len(items), what, unit, progress) as bar:
        for item in items:
            yield item
            bar.update()
