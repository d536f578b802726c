"""Commands in processes of their own, which begin where this one stands: what takes seconds to import is imported once.

A child is a fork. It sets its folder, variables and streams, calls the command line and leaves as a program does: what is still
unwritten is written at the end, and a full disk is heard of only there. It is watched from outside, and ended when it waits or
works too long or takes too much memory.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import written

LONGEST, LARGEST = 60.0, 3 * 2**30
"""Seconds, of work and of waiting together but not of waiting for a processor; and bytes of memory."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code; minus the number of a signal that ended it.
        out: What it wrote on standard output, as far as that took it.
        err: The same of standard error.
        cut: Why it was ended from outside; empty where it ended by itself.
        seconds: What it took, as :data:`LONGEST` counts.
    """

    code: int
    out: str
    err: str
    cut: str = ""
    seconds: float = 0.0


def warmed() -> None:
    """Imports what commands import."""
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.llama.tokenization_llama  # noqa: F401

    import kvinterp

    torch.set_num_threads(1)
    for found in pkgutil.walk_packages(kvinterp.__path__, "kvinterp."):
        importlib.import_module(found.name)
    # What is here stays shared: a collection in a child would copy it.
    gc.collect()
    gc.freeze()


def forked(arguments: Sequence[str], folder: Path, environment: Mapping[str, str | None], streams: str = "") -> Ended:
    """Runs a command line in a fork of this process.

    Args:
        arguments: What stands behind ``kvinterp``.
        folder: Where it runs.
        environment: Variables; those that are None are not set.
        streams: ``"stdout=full"``, ``"stderr=closed"`` and the like, with commas: see :data:`STREAMS`.
    """
    sys.stdout.flush(), sys.stderr.flush()
    with (folder.parent / "said.out").open("w+b") as out, (folder.parent / "said.err").open("w+b") as err:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _become(arguments, folder, environment, (out.fileno(), err.fileno()), streams)
                code = _called()
            finally:
                os._exit(code)
        cut, seconds = _watched(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(code, _read(out), _read(err), cut, seconds)


def fresh(arguments: Sequence[str], folder: Path, environment: Mapping[str, str | None]) -> Ended:
    """Runs a command line in a new interpreter, which reads all variables for itself."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    command = [sys.executable, "-m", "kvinterp", *written(arguments)]
    with (folder.parent / "said.out").open("w+b") as out, (folder.parent / "said.err").open("w+b") as err:
        child = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        cut, seconds = _watched(child.pid)
        return Ended(child.wait(), _read(out), _read(err), cut, seconds)


def _become(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str | None], said: tuple[int, int], streams: str
) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    how = dict(each.split("=") for each in streams.split(",") if each)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, (name, file) in enumerate(zip(("stdout", "stderr"), said, strict=True), start=1):
        match how.get(name):
            case None:
                os.dup2(file, number)
            case "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), number)
            case "pipe":
                reading, writing = socket.socketpair()
                reading.close()
                os.dup2(writing.fileno(), number)
                writing.close()
            case "closed":
                os.close(number)
                # So an interpreter that finds it closed begins.
                setattr(sys, name, None)
                setattr(sys, f"__{name}__", None)
                continue
        # What the parent's stream knows of its file, as that one can seek in it, is not true of this one.
        stream = os.fdopen(number, "w", errors="strict" if number == 1 else "backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["kvinterp", *written(arguments)]


def _called() -> int:
    """Calls the command line and ends as the interpreter does; that it takes its modules apart costs seconds and is left out."""
    from kvinterp.cli import main

    code: Any = 0
    try:
        main()
    except SystemExit as left:
        code = left.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except Exception as error:
        with contextlib.suppress(Exception):
            print(f"Exception ignored in: <stdout>: {error!r}", file=sys.stderr, flush=True)
        code = 120
    return code & 255


def _watched(child: int) -> tuple[str, float]:
    """Waits for a child, and ends it and its own where it goes beyond the limits; says why, and how long it took."""
    waited, before = 0.0, time.monotonic()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.05)
        state, worked, memory = _state(child)
        now = time.monotonic()
        # Who could run and does not waits for a processor: that is the machine's time.
        waited, before = waited + (now - before) * (state in "SDT"), now
        if worked + waited > LONGEST:
            os.killpg(child, signal.SIGKILL)
            return f"it hung ({worked:.0f} s of work, {waited:.0f} s of waiting)", worked + waited
        if memory > LARGEST:
            os.killpg(child, signal.SIGKILL)
            return f"it took {memory / 2**30:.1f} GiB of memory", worked + waited
    return "", waited + _state(child)[1]


def _state(child: int) -> tuple[str, float, int]:
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE


def _read(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return file.read().decode(errors="backslashreplace")  # type: ignore[attr-defined,no-any-return]
