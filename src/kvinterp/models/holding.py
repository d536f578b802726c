"""One thread at a time: who has a model, so that hooks hear the thread that attached them and no other.

Hooks belong to modules, and modules to every thread. Two runs at once would hear and patch each other's forwards, and take
off hooks that the other still needs. So whatever hooks a model holds it while it does. Work that ends by itself (``run``,
``compare``, a sweep) waits for its turn. What stays open for as long as its user likes (``record``, ``patched``) is not waited
for, since its user may be waiting for this thread: that is an error which says so. A thread that only runs the model needs
no turn: no hook of another thread's hears or changes what it computes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from torch import nn

from kvinterp.errors import InputError

_HOLDS: weakref.WeakKeyDictionary[nn.Module, Hold] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def hold_of(blocks: nn.Module) -> Hold:
    """The hold on a model, by its list of blocks: whatever wraps the same blocks is the same model."""
    with _MAKING:
        return _HOLDS.setdefault(blocks, Hold())


class Hold:
    """Which thread has a model, and what it has open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[object, str] = {}
        self._thread: threading.Thread | None = None

    def mine(self) -> bool:
        """Whether the thread that asks is the one that has the model."""
        return self._thread is threading.current_thread()

    @contextlib.contextmanager
    def taken(self, name: str, context: str = "") -> Iterator[None]:
        """Takes the model for this thread, again and again if it likes.

        Args:
            name: The model's name, for the message.
            context: What its user leaves open, such as ``"kv.record"``; empty for work that ends by itself.

        Raises:
            InputError: Another thread has such a context open.
        """
        token, me = object(), threading.current_thread()
        with self._changed:
            while self._open and self._thread is not None and self._thread is not me:
                theirs = next(filter(None, self._open.values()), None)
                if theirs is not None:
                    raise InputError(
                        f"{name} is in use by the thread {self._thread.name!r}, which has {theirs} open: leave that first, or "
                        "give each thread a model of its own (copy.deepcopy(model))."
                    )
                if not self._thread.is_alive():
                    break
                # Not for ever: a thread may end without saying so.
                self._changed.wait(1.0)
            if self._thread is not me:
                self._open.clear()
            self._thread = me
            self._open[token] = context
        try:
            yield
        finally:
            with self._changed:
                if self._open.pop(token, None) is not None and not self._open:
                    self._thread = None
                self._changed.notify_all()
