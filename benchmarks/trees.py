"""Two trees of kvinterp against each other: what comparing and sweeping cost, interleaved, by the processor's time.

    python benchmarks/trees.py OLD NEW [--rounds 5] [--model zoo:gqa2-mini] [--out benchmarks/results]

Each tree (a folder with ``src``) runs in a process of its own, loaded once; the two take turns within every round, way by way,
so that a slow moment of the machine falls on both. Ratios are taken within a round. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import kvinterp as kv
import plain
from kvinterp.patching import PRESETS
adapter = kv.load_model(sys.argv[2], kind="native", dtype="float32", device="cpu")
tokens = torch.arange(32)[None] * 7 % adapter.facts.vocabulary
ways = plain.ways(adapter, tokens, 48)
paper = {**PRESETS["paper"], "examples": None, "max_new_tokens": 16, "stop": "length", "progress": "none"}
for controls in ("none", "quick", "all"):
    ways["sweep, controls " + controls] = lambda c=controls: kv.sweep(adapter, tokens[0].tolist(), **paper, controls=c)
for work in ways.values():
    work()
print("|".join(ways), flush=True)
for line in sys.stdin:
    began = time.process_time()
    ways[line.strip()]()
    print(time.process_time() - began, flush=True)
"""


def started(tree: Path, model: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A process that runs the ways of one tree on demand, and their names."""
    here = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(Path(__file__).parent), model]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=here)
    return worker, asked(worker, None).split("|")


def asked(worker: subprocess.Popen[str], way: str | None) -> str:
    """What a worker answers."""
    if worker.stdin is None or worker.stdout is None:
        raise RuntimeError("the worker has no pipes")
    if way is not None:
        worker.stdin.write(way + "\n")
        worker.stdin.flush()
    return worker.stdout.readline().strip()


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="zoo:gqa2-mini")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    workers = {name: started(tree.resolve(), given.model) for name, tree in (("old", given.old), ("new", given.new))}
    ways = workers["old"][1]
    rows = [
        {way: {name: float(asked(worker, way)) for name, (worker, _) in workers.items()} for way in ways}
        for _ in range(given.rounds)
    ]
    for worker, _ in workers.values():
        worker.terminate()

    def spread(values: list[float]) -> dict[str, float]:
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    base = {"recorded": "plain, recorded", "sweep, controls quick": "sweep, controls none", "sweep, controls all": "sweep, controls none"}  # fmt: skip
    found = {
        way: {
            "new / old": spread([row[way]["new"] / row[way]["old"] for row in rows]),
            **{
                f"{name} / {base.get(way, 'plain')}": spread([row[way][name] / row[base.get(way, "plain")][name] for row in rows])
                for name in workers
            },
        }
        for way in ways
    }  # fmt: skip
    for way, ratios in found.items():
        print(way, {name: f"{s['median']:.3f} ({s['min']:.3f} to {s['max']:.3f})" for name, s in ratios.items()})
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    about = {"model": given.model, "rounds": given.rounds, "device": cpu, "time": "of the processor, one thread"}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"trees-{'-'.join(cpu.lower().replace('(r)', '').split())}.json").write_text(
        json.dumps({**about, "ratios": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
