"""Tries the cache of every causal language model that transformers' auto classes name by programs; ``make wild``.

Each is made of small random weights by lines that anybody can run, and tried in a process of its own, with a limit of time and of
memory. ``out/wild/TYPE.json`` is a finished one: what is there is left out, so a run goes on where it stopped. ``--table`` writes
``docs/wild.md`` and the scripts of all failures from these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "bugs"), str(ROOT / "tools")]

SECONDS, BYTES = 420, 6 * 2**30
"""Of the processor and of memory, that a model may take."""
FAULTS = 12
"""How many of one model are looked for at most."""
MODEL = """import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
config = AutoConfig.for_model({name!r}, {fields})
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
with torch.no_grad():  # What is initialised to a constant is not left at it.
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p) * (p == p.flatten()[0]).all()
"""


def known() -> dict[str, dict[str, Any]]:
    """Every model type with what its config needs beside the bank's sizes."""
    from bank.clean import ARCHITECTURES, KNOWN_TRANSFORMERS_BUGS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from wild.configs import WILD

    bugs = {name: bug.build.keywords for name, bug in KNOWN_TRANSFORMERS_BUGS.items()}
    needed: dict[str, dict[str, Any]] = {**ARCHITECTURES, **bugs, **WILD}
    return {name: needed.get(name, {}) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}


def written(name: str, config: Mapping[str, Any]) -> str:
    """Lines that make a small random model of a type."""
    from bank.small import sizes

    fields = {**sizes(name), **config}
    return MODEL.format(name=name, fields=", ".join(f"{field}={value!r}" for field, value in fields.items()))


def tried(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What programs say of one, as a row."""
    from kvinterp.auditing.uses import uses_of
    from kvinterp.models import wrap

    began = time.process_time()
    row: dict[str, Any] = {"type": name, "class": "", "model": "", "why": "", "uses": []}
    try:
        made: dict[str, Any] = {}
        row["model"] = written(name, config)
        exec(row["model"], made)
        row["class"] = type(made["model"]).__name__
        found = [dataclasses.asdict(check) for check in uses_of(wrap(made["model"].eval()), faults=FAULTS)]
    # Whatever it raises is what there is to say.
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return row
    row |= {"uses": found, "seconds": round(time.process_time() - began, 1)}
    for check in found:
        if check["lines"]:
            check["printed"] = alone(row["model"] + "\n" + check["lines"])
    return row


def alone(script: str) -> str:
    """What a script prints, or the error it ends with, in a process that has never heard of kvinterp."""
    made = subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", script], capture_output=True, text=True)
    said = made.stdout.strip()
    return said if made.returncode == 0 else "\n".join([*said.splitlines(), made.stderr.strip().splitlines()[-1][:300]])


def save(folder: Path, row: Mapping[str, Any]) -> None:
    """A whole file or none."""
    part = folder / f"{row['type']}.part"
    part.write_text(json.dumps(row))
    part.rename(folder / f"{row['type']}.json")


def aside(name: str, config: Mapping[str, Any], folder: Path) -> int:
    """Starts a fork that tries one and saves it; returns its process."""
    if child := os.fork():
        return child
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    save(folder, tried(name, config))
    os._exit(0)


def main() -> None:
    """Tries what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all unless given; those that are there are left out")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "wild")
    parser.add_argument("--workers", type=int, default=1, help="models that are tried side by side")
    parser.add_argument("--table", action="store_true", help="writes docs/wild.md from what is there")
    given = parser.parse_args()
    if given.table:
        from wild.page import write

        write(given.out, ROOT / "docs")
        return
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging

    import kvinterp.auditing.uses  # noqa: F401  A fork does not import it again.

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    configs, running = known(), dict[int, str]()
    for name in given.names or configs:
        if (given.out / f"{name}.json").exists():
            continue
        while len(running) >= given.workers:
            ended(running, given.out)
        running[aside(name, configs[name], given.out)] = name
    while running:
        ended(running, given.out)


def ended(running: dict[int, str], folder: Path) -> None:
    """Waits for one, and says what it came to; one that did not end by itself is saved as that."""
    child, status = os.wait()
    name, code = running.pop(child), os.waitstatus_to_exitcode(status)
    if code:
        why = f"the process ended with {code}, after at most {SECONDS} seconds of the processor and {BYTES // 2**30} GiB"
        save(folder, {"type": name, "class": "", "model": "", "why": why, "uses": []})
    row = json.loads((folder / f"{name}.json").read_text())
    wrong = [check["name"] for check in row["uses"] if check["status"].startswith("wrong")]
    print(name, row["why"] or f"wrong: {', '.join(wrong)}" if row["why"] or wrong else "right", flush=True)


if __name__ == "__main__":
    main()
