"""What the commands share: errors as one sentence, options that several take, and what is said where.

Heavy things are imported where they are used, so that ``kvinterp --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from kvinterp.errors import InputError, KvinterpError
from kvinterp.listing import VisibleFormatter, echo, escaped

__all__ = [
    "NOTHING",
    "RESUMES",
    "Attention",
    "Device",
    "Dtype",
    "Kind",
    "Model",
    "Out",
    "Overwrite",
    "Prompts",
    "about",
    "claim",
    "free",
    "numbers",
    "say",
    "speak",
    "status",
    "told",
]

RESUMES = "what was finished is on disk; the same command goes on from there"
NOTHING = "nothing was finished; run the same command again"

_running: list[tuple[dict[str, Any], contextlib.ExitStack]] = []
"""What runs: its verb and choices, and what is let go of when it ends."""


def told(interrupted: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns kvinterp's own errors and interruptions into one sentence and an exit code.

    Args:
        interrupted: What an interruption leaves behind.
    """

    def wrapped(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            before, streams = signal.signal(signal.SIGTERM, _interrupt), (sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = _Heard(sys.stdout), _Heard(sys.stderr)  # type: ignore[assignment]
            chosen = {name: value for name, value in kwargs.items() if name not in ("out", "overwrite", "picture")}
            verb = command.__name__.removesuffix("_command").replace("_", "-")
            try:
                with contextlib.ExitStack() as held:
                    _running.append(({"verb": verb, **chosen}, held))
                    held.callback(_running.pop)
                    command(*args, **kwargs)
            except KvinterpError as error:
                echo(f"error: {error}", err=True)
                raise typer.Exit(2) from error
            except KeyboardInterrupt as error:
                echo(f"interrupted: {interrupted}.", err=True)
                raise typer.Exit(130) from error
            finally:
                sys.stdout, sys.stderr = streams
                signal.signal(signal.SIGTERM, before)

        return run

    return wrapped


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


# Options that several commands take --------------------------------------------------------------------------------------

Model = Annotated[str, typer.Argument(help="zoo:NAME, a transformers checkpoint folder, or a hub id.")]
Prompts = Annotated[str, typer.Option(help="A .jsonl file, or arithmetic:N, restate:N, instructions:N.")]
Kind = Annotated[str, typer.Option(help="native, hooked or bridge.")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; CUDA where there is one.")]
Attention = Annotated[str | None, typer.Option(help="For native: sdpa, eager, ...; its own unless given.")]


def folder_named(text: str | Path) -> Path:
    """A folder's name; an empty one, as of a variable that is not set, would be the current folder.

    Raises:
        InputError: It is empty.
    """
    if not str(text).strip():
        raise InputError("--out '' was given: expected the name of a folder; for the current one give --out .")
    return Path(text)


Out = Annotated[
    Path, typer.Option("--out", parser=folder_named, metavar="PATH", help="Folder for the tables, figures and report.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a result that is already in the folder.")]


# What is read and said --------------------------------------------------------------------------------------------------


def numbers(option: str, text: str | None, example: str) -> tuple[int, ...] | None:
    """Whole numbers with commas between them; None where nothing was given.

    Raises:
        InputError: Something else was given.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} cannot be read: expected whole numbers with commas, as in {example}."
        ) from error


def free(out: Path, overwrite: bool, *tables: str) -> str:
    """Speaks up, and says how an existing result is treated; raises before anything slow where something is in the way.

    Args:
        out: The folder that will be written.
        overwrite: Whether a result that is there may be replaced.
        tables: The tables that will be written there.
    """
    from kvinterp.folders import SUMMARY, check_free

    speak()
    existing, names = "overwrite" if overwrite else "error", [*(f"{table}.parquet" for table in tables), SUMMARY]
    claim(out)
    check_free(out, existing, names, about())
    return existing


def claim(out: Path) -> None:
    """Keeps others out of a folder until the command ends."""
    from kvinterp.locks import Lock

    _running[-1][1].callback(Lock(out).release)


def about() -> dict[str, Any]:
    """The verb that runs and what was chosen for it."""
    return _running[-1][0]


def say(lines: Iterable[object], files: Iterable[Path] = ()) -> None:
    """Prints lines, and the names of the files that were written."""
    for line in (*lines, *files):
        echo(line)


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Says on stderr what runs now: in one line that changes, or line by line where there is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda now: echo(f"{what}: {now}", err=True)
        return
    with console.status(escaped(what)) as shown:
        yield lambda now: shown.update(escaped(f"{what}: {now}"))


def speak() -> None:
    """Shows kvinterp's own log lines on stderr."""
    log = logging.getLogger("kvinterp")
    # Made anew for every command: standard error may be another stream by now.
    for handler in [h for h in log.handlers if h.get_name() == "kvinterp.cli"]:
        log.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.set_name("kvinterp.cli")
    handler.setFormatter(VisibleFormatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
