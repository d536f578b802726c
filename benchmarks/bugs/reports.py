"""Public reports of caches that are wrong, rebuilt small: each fault as it was reported, since the libraries have mended most.

`python benchmarks/bugs/reports.py` audits each and prints the table of docs/known_bugs.md; `--clean` leaves the faults out, and
prints what is wrong then; `--answers benchmarks/bugs/reported/first_answers.jsonl` prints the table of answers that were kept. The
ladder of precisions is short, and the programs end after 12 s of the processor.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import kvinterp as kv

sys.path.insert(0, str(Path(__file__).parent))
from reported import earlier, kept, own_code, positions
from reported.report import OwnCode, Report

REPORTS: dict[str, Report] = earlier.REPORTS | positions.REPORTS | kept.REPORTS | own_code.REPORTS

FAULTY = ("wrong", "failed", "off without a cache too")
"""What an audit says of a use that a report is about."""


def answered(name: str, fault: bool, seconds: float = 12.0) -> dict[str, Any]:
    """What an audit says of a report: its verdict, the uses that are wrong with their programs, the seconds."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    report = REPORTS[name]
    model = report.build(fault)
    answer: dict[str, Any] = {"name": name, "fault": fault, "shows": report.shows(model)}
    began = time.process_time()
    try:
        if isinstance(model, OwnCode):
            verdict = kv.audit(full=model.full, step=model.step, seconds=seconds)
        else:
            verdict = kv.audit(model, rungs=("float32",), lengths=(9,), steps=2, sweep="no", seconds=seconds)
    except kv.KvinterpError as error:  # what a user would see
        words = {"verdict": "refused", "exit": 2, "first": str(error), "wrong": []}
        return answer | words | {"seconds": time.process_time() - began}
    told = verdict.as_dict()
    wrong = [check for check in told["checks"] if check["status"] in FAULTY]
    return answer | {
        "verdict": told["verdict"],
        "exit": verdict.exit_code,
        "seconds": time.process_time() - began,
        "first": str(verdict).split("\n")[1],
        "wrong": [{key: check[key] for key in ("name", "status", "program", "detail")} for check in wrong],
    }


def found(answer: dict[str, Any]) -> bool:
    """Whether the audit fails a report with its fault, in the use it is about."""
    use = REPORTS[answer["name"]].use
    uses = [check["name"] for check in answer["wrong"]]
    if any("off" in check["status"] for check in answer["wrong"]) and answer["exit"] == 0:
        return True
    return bool(answer["exit"] == 1 and (not use or any(use in name for name in uses)))


def row(answer: dict[str, Any]) -> str:
    """A row of the table."""
    report = REPORTS[answer["name"]]
    wrong = [check for check in answer["wrong"] if check["program"]]
    first = next((check for check in wrong if report.use in check["name"]), None)
    use = f"{first['status']}: {first['name']}" if first else place(answer)
    program = f"`{first['program']}`" if first else ""
    word = ("yes" if found(answer) else "**no**") if answer["fault"] else f"exit code {answer['exit']}"
    who = "" if report.blind else "\\*"
    parts = (linked(report.link) + who, report.date, report.symptom, word, use, program, f"{answer['seconds']:.0f}")
    return "|" + "|".join(parts) + "|"


def place(answer: dict[str, Any]) -> str:
    """What a verdict without a program names, up to what it says of numbers; of a report that was missed the verdict alone."""
    return answer["first"].split(" (", maxsplit=1)[0] if found(answer) else answer["verdict"]


def linked(link: str) -> str:
    """A Markdown link for each repository and number; a number alone is of the repository before it."""
    links, repository = [], ""
    for part in link.split(", "):
        if "#" not in part:
            return link
        before, number = part.split("#")
        repository = before or repository
        links.append(f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})")
    return ", ".join(links)


def asked(names: list[str], clean: bool) -> Iterator[dict[str, Any]]:
    """Audits each in a process of its own: what is planted in a library's module ends with it."""
    for module in ("auditing.audit", "auditing.own_code"):
        importlib.import_module(f"kvinterp.{module}")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            yield pool.apply(answered, (name, not clean))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(REPORTS))
    parser.add_argument("--clean", action="store_true", help="without the faults")
    parser.add_argument("--out", type=Path, help="a file to which the answers are appended, one JSON a line")
    parser.add_argument("--answers", type=Path, help="print the table of such a file and audit nothing")
    given = parser.parse_args()
    kept_ones = map(json.loads, given.answers.read_text().splitlines()) if given.answers else None
    print(
        "|report|date|symptom|found|use that is wrong|smallest program|seconds|\n|---|---|---|---|---|---|---|", flush=True
    )
    answers = []
    for answer in kept_ones or asked(given.names, given.clean):
        answers.append(answer)
        print(row(answer), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(answer) + "\n")
    if given.clean:
        print(f"\nWithout its fault not right: {[answer['name'] for answer in answers if answer['exit'] != 0] or 'none'}")
        return
    blind = [found(answer) for answer in answers if REPORTS[answer["name"]].blind]
    print(f"\nFound: {sum(map(found, answers))} of {len(answers)}; of those of others {sum(blind)} of {len(blind)}.")


if __name__ == "__main__":
    main()
