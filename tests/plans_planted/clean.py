"""Clean architectures under every call plan: ``python -m plans_planted.clean FILE [NAME ...]``, which goes on where it stopped.

Of small random weights in float64. A row of JSON each goes to the file: plan by status. ``--table`` counts what is there.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from bank.clean import ARCHITECTURES
from bank.small import small

from kvinterp.auditing import exercises
from kvinterp.auditing.called import plans_of
from kvinterp.models import wrap
from plans_planted.fault import PROMPTS

NAMES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "phi",
    "phi3",
    "olmo2",
    "cohere2",
    "granite",
    "glm4",
    "helium",
    "nemotron",
    "smollm3",
    "stablelm",
    "starcoder2",
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "biogpt",
    "codegen",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "phimoe",
    "gpt_neo",
]
"""Attention of all kinds, windows, learned, rotary and ALiBi positions, experts."""
LONG = ("compiled", "exported")


def statuses(name: str, plans: str) -> dict[str, list[str]]:
    """Status and detail by plan."""
    model = small(name, dtype="float64", **ARCHITECTURES[name])
    with mock.patch.object(exercises, "CHECKS", {}):
        found = exercises.exercise(wrap(model), PROMPTS, calls=plans_of(plans))
    return {one.name.removeprefix("call="): [one.status, "" if one.status == "passed" else one.detail] for one in found}


def main(file: Path, chosen: list[str]) -> None:
    """Runs what is not there yet."""
    there = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    plans = ",".join(plan for plan in plans_of("all") if not plan.startswith(LONG)) + ",padded(left,5)+static"
    for name in chosen or NAMES:
        if name in there:
            continue
        began = time.process_time()
        row = {"name": name, "plans": statuses(name, plans), "seconds": 0.0}
        row["seconds"] = round(time.process_time() - began, 1)
        with file.open("a") as out:
            print(json.dumps(row), file=out)
        print(name, row["seconds"], {plan: said for plan, said in row["plans"].items() if said[0] != "passed"}, flush=True)


def table(file: Path) -> None:
    """Counts."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    print(len(rows), "architectures,", Counter(said[0] for row in rows for said in row["plans"].values()))
    for plan in rows[0]["plans"]:
        print(f"{plan:24}", dict(Counter(row["plans"][plan][0] for row in rows if plan in row["plans"])))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "--table" in sys.argv:
        table(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
