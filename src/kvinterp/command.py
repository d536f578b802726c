"""What every command does: signals and errors become a sentence and an exit code, and ``--json`` prints one object.

A command is a function that returns what it has to say as JSON; :func:`told` makes of it what typer is given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Annotated, Any

import typer

from kvinterp.console import echo
from kvinterp.errors import KvinterpError

__all__ = ["leave", "refused", "told", "wrong_use"]

_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object on standard output, and everything else on standard error."),
    ],
)
"""The option that every command has."""


_WrongUse: Any = typer.BadParameter.__base__
"""What the reader of the command line raises; newer versions of typer have a click of their own."""


@contextlib.contextmanager
def wrong_use(arguments: Sequence[str]) -> Iterator[None]:
    """Within it what is wrong with the options themselves is an error like any other: with ``--json`` an object says it."""
    try:
        yield
    except _WrongUse as error:
        if "--json" in arguments:
            _print_json({"error": error.format_message(), "exit_code": error.exit_code})
        raise


@contextlib.contextmanager
def refused(arguments: Sequence[str]) -> Iterator[None]:
    """Within it an error of kvinterp's is said while the command line is read, as one of a command is."""
    try:
        yield
    except KvinterpError as error:
        echo(f"error: {error}", err=True)
        if "--json" in arguments:
            _print_json({"error": str(error), "exit_code": 2})
        raise typer.Exit(2) from error


def leave(number: int, frame: FrameType | None) -> None:
    """Leaves while the command line is read: there is nothing to leave behind."""
    said = "interrupted: nothing was begun."
    echo(said, err=True)
    if "--json" in sys.argv:
        _print_json({"error": said, "exit_code": 128 + number})
        sys.stdout.flush()
    os._exit(128 + number)


def told(interrupted: str) -> Callable[[Callable[..., Mapping[str, Any]]], Callable[..., None]]:
    """Turns kvinterp's own errors and interruptions into one sentence and an exit code, and gives a command ``--json``.

    The command returns what it prints as JSON, with its ``exit_code`` where that is not 0.

    Args:
        interrupted: What an interruption leaves behind.
    """

    def wrapped(command: Callable[..., Mapping[str, Any]]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*args: Any, as_json: bool = False, **kwargs: Any) -> None:
            with _listened():
                found = _outcome(functools.partial(command, *args, **kwargs), interrupted, as_json)
                if as_json:
                    _print_json(found)
            if found.get("exit_code"):
                raise typer.Exit(found["exit_code"])

        signature = inspect.signature(command, eval_str=True)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), _JSON])  # type: ignore[attr-defined]
        return run

    return wrapped


def _outcome(command: Callable[[], Mapping[str, Any]], interrupted: str, as_json: bool) -> Mapping[str, Any]:
    """What a command gave, or the error that it ended with."""
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            return command()
    except KvinterpError as error:
        echo(f"error: {error}", err=True)
        return {"error": str(error), "exit_code": 2}
    except KeyboardInterrupt as error:
        # What was cut off may know better than its kind.
        said = f"interrupted: {error.args[0] if error.args else interrupted}."
        echo(said, err=True)
        return {"error": said, "exit_code": 130}


def _print_json(found: Mapping[str, Any]) -> None:
    from kvinterp.files import strict_json

    echo(strict_json(found))


@contextlib.contextmanager
def _listened() -> Iterator[None]:
    """Within it a signal interrupts, and streams may lose their reader."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Heard(sys.stdout), _Heard(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, handler in before.items():
            signal.signal(number, handler)


class _Heard:
    """A standard stream whose reader may leave, as in ``kvinterp ... | head -1``: the work goes on, for nobody to read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._without_a_reader():
            return int(self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        with self._without_a_reader():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _without_a_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # What the stream still holds goes there too when it is flushed at the end of the process.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
