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

from kvinterp.common.console import echo
from kvinterp.errors import KvinterpError, imported_by, out_of_memory


def keyword(name: str, hint: Any, default: Any, info: Any) -> inspect.Parameter:
    """A parameter of a command, as typer reads it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


_JSON = keyword(
    "as_json",
    bool,
    False,
    typer.Option("--json", help="Print one JSON object on standard output, and everything else on standard error."),
)
"""The option that every command has."""


_WrongUse: Any = typer.BadParameter.__base__
"""What the reader of the command line raises; newer versions of typer have a click of their own."""


@contextlib.contextmanager
def wrong_use(arguments: Sequence[str]) -> Iterator[None]:
    """Within it what is wrong with the options themselves is said in one sentence, as any other error is."""
    try:
        yield
    except _WrongUse as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        command = error.ctx.command_path if error.ctx else "kvinterp"
        # As every error's: what was given fills a part of it, and is safe to print.
        said = str(KvinterpError(error.format_message())).replace("Value error, ", "")
        said = said if said.endswith(" .") else said.removesuffix(".")
        ending = said if said.endswith("?") else f"{said};"
        see = "See" if said.endswith("?") else "see"
        _leave_with(KvinterpError(f"{ending[:1].lower()}{ending[1:]} {see} '{command} --help'."), arguments)


@contextlib.contextmanager
def refused(arguments: Sequence[str]) -> Iterator[None]:
    """Within it an error of kvinterp's is said while the command line is read, as one of a command is."""
    try:
        yield
    except KvinterpError as error:
        _leave_with(error, arguments)
    except Exception as error:
        if not (said := _of_others(error, "nothing was begun")):
            raise
        _leave_with(said, arguments)


def _leave_with(error: KvinterpError, arguments: Sequence[str]) -> None:
    found = _refusal(error)
    if "--json" in arguments:
        _print_json(found)
    raise typer.Exit(2) from error


def _of_others(error: Exception, left: str) -> KvinterpError | None:
    """What to say of an error that only a machine or a library can have, and of what is left behind; None of any other."""
    what = f"({type(error).__name__}: {error})"
    if out_of_memory(error):
        return KvinterpError(
            f"there was not enough memory {what}; {left}. Close what else runs, raise the limit (ulimit -v), or ask for less."
        )
    if whose := imported_by(error):
        return KvinterpError(
            f"the library {whose} could not be imported {what}: mend the environment variable that it reads, or install it again."
        )
    return None


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
        return _refusal(error)
    except KeyboardInterrupt as error:
        # What was cut off may know better than its kind.
        said = f"interrupted: {error.args[0] if error.args else interrupted}."
        echo(said, err=True)
        return {"error": said, "exit_code": 130}
    except Exception as error:
        if whose := _of_others(error, interrupted):
            return _refusal(whose)
        raise
    # sys.exit in a model's code, a test's own skip, or a panic in Rust.
    except BaseException as error:
        said = f"code that was run raised {type(error).__name__} ({error}): expected code that returns, or raises an error."
        return _refusal(KvinterpError(said))


def _refusal(error: KvinterpError) -> dict[str, Any]:
    """Says an error, and gives what says it as JSON."""
    echo(f"error: {error}", err=True)
    return {"error": str(error), "exit_code": 2}


def _print_json(found: Mapping[str, Any]) -> None:
    from kvinterp.common.files import strict_json

    echo(strict_json(found))


@contextlib.contextmanager
def _listened() -> Iterator[None]:
    """Within it a signal interrupts."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# What is printed arrives -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def delivered() -> Iterator[None]:
    """Within it standard streams may fail; at its end what was printed has arrived, or the exit code is 2.

    A reader may leave, as in ``kvinterp ... | head -1``: the work goes on for nobody to read, and ends with its own exit code.
    """
    streams = sys.stdout, sys.stderr
    if sys.stderr is None:
        _stand_in()
    if sys.stdout is None:
        echo(
            "error: standard output is closed, where what is found is printed: send it to a file or to /dev/null.", err=True
        )
        raise SystemExit(2)
    out = sys.stdout = _Heard(sys.stdout)  # type: ignore[assignment]
    sys.stderr = _Heard(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    except SystemExit as left:
        out.flush()
        if out.lost and left.code != 130:
            echo(
                f"error: standard output cannot be written ({out.lost}), so what was found was not printed: send it to where "
                "there is room; a folder that was asked for is written.",
                err=True,
            )
            raise SystemExit(2) from None
        raise
    finally:
        sys.stdout, sys.stderr = streams


def _stand_in() -> None:
    """Gives the closed streams' numbers away: a file of a result would have them, and what libraries print in it."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 2:
        pass
    sys.stderr = os.fdopen(number, "w")


class _Heard:
    """A standard stream that may fail, or whose reader may leave.

    Attributes:
        lost: Why something did not arrive that somebody reads.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.lost = stream, ""
        with contextlib.suppress(AttributeError):
            # Of what the stream's encoding lacks an escape is shown.
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with self._going_on():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        # A ValueError where it was closed.
        except (OSError, ValueError) as error:
            if not isinstance(error, BrokenPipeError):
                self.lost = self.lost or getattr(error, "strerror", None) or str(error)
            # What the stream still holds goes there too when it is flushed at the end of the process.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
