"""How many threads a model runs with: one policy for every verb, whoever calls it.

The threads that torch starts for one operation wait for each other at its end, and by default they wait spinning. A model
of a few million numbers has operations of microseconds: on two cores that anything else uses as well, a decode then takes
ten times as long with two threads as with one. So on a CPU small models run with one thread for as long as a verb runs.

The bits of a sum may depend on the number of threads that made it. Both paths of a comparison run with the same number, and
every result says it.
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
    given = os.environ.get(VARIABLE, "").strip()
    if given:
        if not given.isascii() or not given.isdecimal() or not 1 <= int(given) <= 1024:
            raise InputError(
                f"{VARIABLE}={given!r} is set: expected a whole number of threads, 1 to 1024, or leave it unset."
            )
        return int(given)
    small = adapter.device.type == "cpu" and sum(p.numel() for p in adapter.model.parameters()) < SMALL
    return 1 if small else torch.get_num_threads()


@contextlib.contextmanager
def own_threads(adapter: Adapter) -> Iterator[None]:
    """Runs what is inside with the threads this model is run with.

    Every verb comes in here, so this is also one call of :meth:`Adapter.one_call`.

    Raises:
        UnsupportedError: A part of the model is compiled.
    """
    wanted = threads_for(adapter)
    before = torch.get_num_threads()
    try:
        if wanted != before:
            torch.set_num_threads(wanted)
        with adapter.one_call():
            yield
    finally:
        if wanted != before:
            torch.set_num_threads(before)
