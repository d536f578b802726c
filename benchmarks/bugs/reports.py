"""Public reports of caches that are wrong, rebuilt small: each fault as it was reported, since the libraries have mended most.

`python benchmarks/bugs/reports.py` audits each and prints the table of docs/known_bugs.md; `--clean` leaves the faults out, and
prints what is wrong then. The ladder of precisions is kept short, the programs are those of a default audit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import kvinterp as kv

sys.path.insert(0, str(Path(__file__).parent))
from reported import earlier, kept, own_code, positions
from reported.report import OwnCode, Report

REPORTS: dict[str, Report] = earlier.REPORTS | positions.REPORTS | kept.REPORTS | own_code.REPORTS

NO_FAULT = ("right", "refused", "not run", "passed")


def answered(name: str, fault: bool, **options: Any) -> dict[str, Any]:
    """What an audit says of a report: its verdict, the uses that are wrong with their programs and places, the seconds."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    report = REPORTS[name]
    model = report.build(fault)
    answer: dict[str, Any] = {"name": name, "fault": fault, "shows": report.shows(model) if report.shows else None}
    began = time.process_time()
    try:
        if isinstance(model, OwnCode):
            verdict = kv.audit(full=model.full, step=model.step, **options)
        else:
            verdict = kv.audit(model, rungs=("float32",), lengths=(9,), steps=2, sweep="no", **options)
    except Exception as error:  # what a user would see
        seconds = time.process_time() - began
        return answer | {
            "verdict": "raised",
            "first": f"{type(error).__name__}: {error}"[:400],
            "wrong": [],
            "seconds": seconds,
        }
    told = verdict.told()
    wrong = [check for check in told["checks"] if check["status"] not in NO_FAULT]
    return answer | {
        "verdict": told["verdict"],
        "exit": verdict.exit_code,
        "seconds": time.process_time() - began,
        "first": str(verdict).split("\n")[1] if "\n" in str(verdict) else str(verdict),
        "wrong": [{key: check[key] for key in ("name", "status", "program", "detail", "tried")} for check in wrong],
    }


def row(answer: dict[str, Any]) -> str:
    """A row of the table."""
    report = REPORTS[answer["name"]]
    wrong = answer["wrong"]
    first = next((check for check in wrong if check["program"]), None)
    use = f"{first['status']}: {first['name']}" if first else ""
    program = f"`{first['program']}`" if first else ""
    return f"|{linked(report.link)}|{report.date}|{report.symptom}|{answer['verdict']}|{use}|{program}|{answer['seconds']:.0f}|"


def linked(link: str) -> str:
    """A Markdown link for repository and number; the further numbers as they are."""
    first, *more = link.split(", ")
    if "#" not in first or "/" not in first:
        return link
    repository, number = first.split("#")
    return ", ".join([f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})", *more])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(REPORTS))
    parser.add_argument("--clean", action="store_true", help="without the faults")
    parser.add_argument("--out", type=Path, help="a file to which the answers are appended, one JSON a line")
    given = parser.parse_args()
    for module in ("auditing.audit", "auditing.own_code", "programs.search"):
        importlib.import_module(f"kvinterp.{module}")
    print("|report|date|symptom|verdict|use|program|seconds|\n|---|---|---|---|---|---|---|", flush=True)
    options = {"seconds": 10.0} if given.clean else {}
    # What is planted in a library's module ends with the process.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in given.names:
            answer = pool.apply(answered, (name, not given.clean), options)
            print(row(answer), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
