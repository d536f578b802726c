"""The number of threads that a model runs with: one policy for every verb.

The threads that torch starts for one operation wait for each other at its end, by default in a busy
loop. A model of a few million numbers has operations of microseconds: on two cores that another
process uses too, a decode then takes ten times as long with two threads as with one. So on a CPU
small models run with one thread while a verb runs.

The bits of a sum may depend on the number of threads. Both paths of a comparison run with the same
number, and every result records it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from kvinterp.errors import InputError
from kvinterp.models.adapter import Adapter

SMALL = 5_000_000
"""Parameters of a model too small for more than one thread."""

VARIABLE = "KVINTERP_THREADS"
"""The environment variable that sets the number for every model."""


def threads_for(adapter: Adapter) -> int:
    """The number of threads that the verbs run this model with.

    Raises:
        InputError: The environment variable is set and is no number of threads.
    """
    setting = os.environ.get(VARIABLE, "").strip()
    if setting:
        if not setting.isascii() or not setting.isdecimal() or not 1 <= int(setting) <= 1024:
            raise InputError(
                f"{VARIABLE}={setting!r} is set: expected a whole number of threads, 1 to 1024, or leave it unset."
            )
        return int(setting)
    small = (
        adapter.device.type == "cpu" and sum(p.numel() for p in adapter.model.parameters()) < SMALL
    )
    return 1 if small else torch.get_num_threads()


@contextlib.contextmanager
def own_threads(adapter: Adapter) -> Iterator[None]:
    """Sets the number of threads for this model while the context lasts.

    Every verb enters this context, so it also enters :meth:`Adapter.one_call`.

    Raises:
        UnsupportedError: A part of the model is compiled.
    """
    number, before = threads_for(adapter), torch.get_num_threads()
    try:
        if number != before:
            torch.set_num_threads(number)
        with adapter.one_call():
            yield
    finally:
        if number != before:
            torch.set_num_threads(before)
