"""How often Python looks for cycles while a command imports its libraries: a sixth of a small
command's time went into that.

Torch and transformers make some hundred thousand objects that live as long as the process, and by
default all of them are looked through again and again. Only the command line does this
(:func:`seldom`), in a process of its own; from the first model on, whose tensors may hang in
cycles, it is as always.
"""

from __future__ import annotations

import gc

OBJECTS = 200_000
"""New objects after which cycles are looked for meanwhile; Python's own 700 otherwise."""

_before: list[tuple[int, int, int]] = []


def seldom() -> None:
    """Looks for cycles seldom from here on, until :func:`as_always`."""
    if not _before:
        _before.append(gc.get_threshold())
        gc.set_threshold(OBJECTS)


def as_always() -> None:
    """Looks for them as often as before :func:`seldom`, among what is made from here on; nothing
    without that.
    """
    if _before:
        # Once, so that nothing that loading left in a cycle is kept; what is left then lasts.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_before.pop())
