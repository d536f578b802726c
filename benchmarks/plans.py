"""What a named program costs over the plain loop that its users write, at the size of GPT-2 small: ratios of one run.

Random weights, float32, one thread. Each round times a plan and its loop (those of tests/core/paths/test_calls_loops.py) one after the
other, in turns; the ratio is that of each round, and its median is kept. ``python benchmarks/plans.py [ROUNDS]``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "core" / "paths"))

from test_calls_loops import LOOPS, PROMPT, STEPS, TOKENS, Loop  # noqa: E402

import kvinterp as kv  # noqa: E402
from kvinterp.models.provenance import machine  # noqa: E402
from kvinterp.paths import Runner  # noqa: E402

LIMIT = 1.10


def main(rounds: int) -> None:
    """Prints the table and keeps it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    adapter = kv.wrap(GPT2LMHeadModel(GPT2Config()).eval())
    prompt, fed = torch.tensor([PROMPT]), [torch.tensor([token]) for token in TOKENS[: STEPS - 1]]
    trace = SimpleNamespace(prompt=PROMPT, fed=TOKENS[: STEPS - 1])

    def plan(path: kv.ExecutionPath) -> None:
        with Runner(adapter, path, prompt, len(fed)) as runner:
            for token in (None, *fed):
                runner.advance(token)

    @torch.no_grad()
    def loop(name: str) -> None:
        LOOPS[name](Loop(adapter, trace))

    rows = []
    for name in LOOPS:
        path, ratios, seconds = kv.path_named(f"cached[call={name}]"), [], []
        plan(path), loop(name)
        for _ in range(rounds):
            spent = []
            for run in (lambda path=path: plan(path), lambda name=name: loop(name)):
                began = time.process_time()
                run()
                spent.append(time.process_time() - began)
            ratios.append(spent[0] / spent[1])
            seconds.append(spent[0])
        rows.append(
            {"plan": name, "ratio": statistics.median(ratios), "of": [min(ratios), max(ratios)], "seconds": min(seconds)}
        )
        keep(adapter, rounds, rows)
        print(
            f"{name:24} {rows[-1]['ratio']:.3f}  ({min(ratios):.3f} to {max(ratios):.3f})  {min(seconds):.2f} s", flush=True
        )
    print("above the limit:", [row["plan"] for row in rows if row["ratio"] > LIMIT] or "none")


def keep(adapter: Any, rounds: int, rows: list[dict[str, object]]) -> None:
    """Writes what is there so far."""
    about = {
        "model": "GPT-2 small, random",
        "parameters": sum(p.numel() for p in adapter.model.parameters()),
        "rounds": rounds,
    }
    made = {**about, "limit": LIMIT, "machine": machine(adapter.device), "rows": rows}
    place = ROOT / "benchmarks" / "results" / "plans.json"
    place.write_text(json.dumps(made, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
