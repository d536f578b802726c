"""Runs the command line in processes of their own and cuts them off at a moment.

They are forked from a process that has imported everything, so that a run takes as long as its work.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pandas as pd

MODEL = "zoo:gqa2-mini"
SMALL = ("--prompts", "arithmetic:2", "--device", "cpu")
FEW = ("--ladder-prompts", "1", "--ladder-steps", "1")
TASKS = str(Path(__file__).with_name("papers") / "tasks")
BRIEF = ("--hops", "1", "--seeds", "2", "--temperatures", "0.7", "--max-new-tokens", "3")
DECODES = ("--strategy", "greedy", "--strategy", "top_p(1.0,1.5)", "--seeds", "1", "--max-new-tokens", "3", "--block", "1")
VERBS = {
    "compare": ("compare", MODEL, *SMALL, "--max-new-tokens", "3"),
    "patch": ("patch", MODEL, *SMALL, "--max-new-tokens", "3", "--controls", "quick"),
    "attention": ("attention", MODEL, "--prompts", "arithmetic:1", "--device", "cpu", "--step", "1"),
    "which-run": ("which-run", MODEL, *SMALL, "--max-new-tokens", "3"),
    "decompose": ("decompose", MODEL, *SMALL, "--max-new-tokens", "3"),
    "audit": (
        *("audit", MODEL, "--lengths", "5", "--steps", "1", "--rungs", "float32"),
        *("--checks", "none", "--device", "cpu"),
    ),
    "kernels": ("kernels", MODEL, "--sizes", "1,2", "--device", "cpu"),
    "root-cause": ("root-cause", MODEL, *SMALL, *FEW),
    "flip-law": ("flip-law", MODEL, *SMALL, "--path", "cached", "--max-new-tokens", "3"),
    "layer-drift": ("layer-drift", MODEL, *SMALL, "--max-new-tokens", "3"),
    "localisation": ("localisation", MODEL, *SMALL, "--max-new-tokens", "2", "--part", "paper", "--part", "kv-into-cached"),
    "susceptibility": ("susceptibility", MODEL, *SMALL, "--max-new-tokens", "3", "--sizes", "0.5,2,4", "--seeds", "2"),
    "behaviour": ("behaviour", MODEL, *SMALL, *DECODES, "--controls", "1"),
    "paper": ("paper", MODEL, *SMALL, "--strategy", "greedy", "--max-new-tokens", "4"),
    "mitigate": ("mitigate", MODEL, *SMALL, "--path", "cached[refresh=2]", "--policy", "int4", "--max-new-tokens", "3"),
    "equivalent-noise": ("equivalent-noise", MODEL, *SMALL, "--policy", "uniform(-1,1)", "--max-new-tokens", "2"),
    "kv-error": (
        *("kv-error", MODEL, "--design", "none", "--policy", "uniform(-1,1)", "--repeats", "1", "--max-new-tokens", "4"),
        *("--instructions", "instructions:2", "--problems", "arithmetic:2", "--texts", "restate:1"),
        *("--strings", "instructions:2", "--device", "cpu"),
    ),
    "chain": ("chain", MODEL, "--policy", "int4", "--on", "kv", "--texts", "restate:1", *BRIEF, "--device", "cpu"),
}
"""Every verb that writes, as small as it goes."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        *(
            f"kvinterp.{name}"
            for name in ("cli", "auditing.audit", "papers.studies.root_cause", "models.native", "patching", "report")
        ),
        *("matplotlib.backends.backend_agg", "transformers.models.llama.modeling_llama", "pyarrow.parquet", "rich.console"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Run:
    """How a run ended: its exit code (that of a signal is negative), what it said on both streams, how long it took."""

    code: int
    said: str
    seconds: float


def started(arguments: tuple[str, ...], out: Path) -> BaseProcess:
    """Starts a verb on a folder; ``arguments`` are the verb and its options, without ``--out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    process = _forks.Process(target=_run, args=([*arguments, "--out", str(out)], str(_log(out))))
    process.start()
    return process


def ended(process: BaseProcess, out: Path) -> Run:
    """Waits for a run that was started on a folder."""
    process.join(240)
    assert process.exitcode is not None, "it hangs"
    lines = _log(out).read_text().splitlines() if _log(out).exists() else []
    times = [float(line.removeprefix("seconds: ")) for line in lines if line.startswith("seconds: ")]
    said = "\n".join(line for line in lines if not line.startswith(("seconds: ", "began")))
    _log(out).unlink(missing_ok=True)
    return Run(process.exitcode, said, times[0] if times else 0.0)


def cut_after(arguments: tuple[str, ...], out: Path, number: signal.Signals, seconds: float) -> Run:
    """Runs a verb and sends it a signal so many seconds after it began."""
    process = started(arguments, out)
    until = time.monotonic() + 120
    while not (_log(out).exists() and "began" in _log(out).read_text()):
        assert time.monotonic() < until, "it did not begin"
        time.sleep(0.005)
    time.sleep(seconds)
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)
    return ended(process, out)


def same(one: Path, other: Path) -> None:
    """Fails where two folders do not hold the same files, tables once sorted and all others byte for byte."""
    names = [sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) for folder in (one, other)]
    assert names[0] == names[1], sorted({*names[0]} ^ {*names[1]})
    for name in names[0]:
        left, right = one / name, other / name
        if left.is_dir() or left.name == "seconds.csv":
            continue
        if left.suffix == ".parquet":
            tables = [_sorted(pd.read_parquet(path)) for path in (left, right)]
            pd.testing.assert_frame_equal(*tables, check_exact=True, obj=name)
            assert tables[0].attrs == tables[1].attrs, name
        else:
            assert _untimed(left) == _untimed(right), name


def _untimed(path: Path) -> bytes:
    # An audit says how long each check took.
    content = path.read_bytes()
    if path.name == "report.html":
        before, _, behind = content.partition(b"<summary>What took how long</summary>")
        return before + behind[behind.find(b"</details>") :]
    return re.sub(rb'seconds": [0-9.e-]+', b"", content) if path.name == "verdict.json" else content


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    # Cells may hold lists, which have no order of their own.
    order = table.astype(str).sort_values(list(table.columns), kind="stable").index
    return table.loc[order].reset_index(drop=True)


def _log(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def _run(arguments: list[str], log: str) -> None:
    """In the process of its own."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    from command_line import written
    from kvinterp.cli import app

    os.write(file, b"began\n")
    begun = time.monotonic()
    try:
        app(written(arguments))
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    os.write(file, f"seconds: {time.monotonic() - begun}\n".encode())
    os._exit(code)
