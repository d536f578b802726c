"""Prints what commands print: lines that are safe on a terminal, with an error where they cannot be written."""

from __future__ import annotations

import os
import sys

from kvinterp.errors import InputError, visible


def echo(text: object = "", err: bool = False) -> None:
    """Prints a line with its control characters escaped; every command prints by this function.

    Where the reader of a pipe has left, as in ``| head -1``, the work goes on and the line is dropped.

    Args:
        text: The line, or several.
        err: Whether it goes to standard error.

    Raises:
        InputError: Standard output cannot be written, for instance because a disk is full.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as error:
        # Python flushes the stream once more at the end of the process, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not (err or isinstance(error, BrokenPipeError)):
            raise InputError(
                f"standard output cannot be written ({error.strerror}), so what was found was not printed: send it to where "
                "there is room; a folder that was asked for is written."
            ) from error
