"""Prints what commands print: lines that are safe on a terminal, with an error where they cannot be
written.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kvinterp.errors import InputError, visible


class Dropping:
    """A stream that drops what is written once the reader of its pipe has left, as in
    ``| head -1``: the work goes on.

    Args:
        stream: Standard output or standard error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        try:
            return int(self._stream.write(text))
        except BrokenPipeError:
            self.drop()
            return len(text)

    def flush(self) -> None:
        """Writes what is held back, or drops it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self.drop()

    def drop(self) -> None:
        """Drops all that follows: Python flushes the stream once more at the end of the process,
        which must not fail again.
        """
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def echo(text: object = "", err: bool = False) -> None:
    """Prints a line with its control characters escaped; every command prints by this function.

    Args:
        text: The line, or several.
        err: Whether it goes to standard error.

    Raises:
        InputError: Standard output cannot be written, for instance because a disk is full.
    """
    stream = Dropping(sys.stderr if err else sys.stdout)
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as error:
        stream.drop()
        if not err:
            raise InputError(
                f"standard output cannot be written ({error.strerror}), so what was found was not printed: send it to where "
                "there is room; a folder that was asked for is written."
            ) from error
