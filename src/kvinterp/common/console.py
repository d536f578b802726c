"""What commands print: lines that are safe on a terminal, and that arrive."""

from __future__ import annotations

import os
import sys

from kvinterp.errors import InputError, visible


def echo(text: object = "", err: bool = False) -> None:
    """Prints a line with its control characters shown: what every command prints goes through here.

    Where its reader has left, as in ``| head -1``, the work goes on for nobody to read.

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
        # What the stream still holds is flushed once more at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not (err or isinstance(error, BrokenPipeError)):
            raise InputError(
                f"standard output cannot be written ({error.strerror}), so what was found was not printed: send it to where "
                "there is room; a folder that was asked for is written."
            ) from error
