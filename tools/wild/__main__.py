"""Audits every causal language model that transformers' auto classes name; ``make wild``, which goes on where it stopped.

Each is made of small random weights by its own config class and audited in a process of its own, with a limit of time and of
memory. A line of JSON a model goes to ``out/wild/PROCESSOR.jsonl``; ``--table`` writes ``docs/wild.md`` from these files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "bugs"), str(ROOT / "tools")]

SECONDS, BYTES = 420, 6 * 2**30
"""Of the clock and of memory, that a model may take."""


def known() -> dict[str, dict[str, Any]]:
    """Every model type with what its config needs beside the bank's sizes."""
    from bank.clean import ARCHITECTURES, KNOWN_TRANSFORMERS_BUGS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from wild.configs import WILD

    bugs = {name: bug.build.keywords for name, bug in KNOWN_TRANSFORMERS_BUGS.items()}
    needed: dict[str, dict[str, Any]] = {**ARCHITECTURES, **bugs, **WILD}
    return {name: needed.get(name, {}) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}


def seen(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What an audit of one says, as a row."""
    from bank.run import LENGTHS, STEPS
    from bank.small import small

    import kvinterp as kv

    began = time.process_time()
    row: dict[str, Any] = {"type": name, "class": "", "word": "not built"}
    try:
        model = small(name, **config)
        row["class"] = type(model).__name__
        found = kv.audit(model, rungs=("float32", "float64"), lengths=LENGTHS, steps=STEPS)
    # Whatever it raises is what there is to say.
    except Exception as error:
        said = " ".join(str(error).split())
        return {
            **row,
            "word": "not audited" if row["class"] else "not built",
            "detail": f"{type(error).__name__}: {said[:300]}",
        }
    checks = {check.name: check.status for check in found.checks}
    return {
        **row,
        "word": found.verdict,
        "exit_code": found.exit_code,
        "layer": found.first_layer,
        "tensor": found.tensor,
        "checks": checks,
        "lines": found.reading.splitlines()[1:3],
        "failed": {check.name: check.detail for check in found.checks if check.status == "failed"},
        "seconds": round(time.process_time() - began, 1),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def aside(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same in a fork, ended where it takes too long or too much."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        with _quiet():
            row = seen(name, config)
        os.write(writing, json.dumps(row).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said:
        return dict(json.loads(said))
    why = f"more than {SECONDS} seconds" if code == -signal.SIGALRM else f"the process ended with {code}"
    return {"type": name, "class": "", "word": "not audited", "detail": why}


def main() -> None:
    """Audits what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all unless given, and those that are there are left out")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "wild")
    parser.add_argument("--table", action="store_true", help="writes docs/wild.md from what is there")
    given = parser.parse_args()
    if given.table:
        from wild.page import write

        write(given.out, ROOT / "docs" / "wild.md")
        return
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging

    from kvinterp.models.provenance import machine

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    about = machine()
    given.out.mkdir(parents=True, exist_ok=True)
    place = given.out / f"{torch.backends.cpu.get_cpu_capability().lower()}.jsonl"
    there = {row["type"] for row in map(json.loads, place.read_text().splitlines())} if place.exists() else set()
    configs = known()
    with place.open("a") as file:
        for name in given.names or [name for name in configs if name not in there]:
            row = aside(name, configs[name])
            print(json.dumps({**row, "device": about["device"]}), file=file, flush=True)
            print(name, row["word"], row.get("layer"), row.get("tensor", ""), row.get("detail", "")[:150], flush=True)


if __name__ == "__main__":
    main()
