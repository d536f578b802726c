"""What ``kvinterp compare`` takes with many prompts: processor time and peak memory, each count in a process of its own.

What a prompt gave is kept on disk as it is made and joined at the end, so memory should stay where it was and time grow with the
number of prompts. ``python benchmarks/many_prompts.py`` measures 50, 100, 200 and 500 prompts of 64 steps and writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from kept import keep

HERE = Path(__file__).parent
COUNTS = (50, 100, 200, 500)


def measured(count: int, steps: int, model: str, folder: Path) -> dict[str, float]:
    """Runs the command in a child; the child's own clock and its own peak."""
    command = [
        sys.executable,
        __file__,
        "--child",
        str(count),
        "--steps",
        str(steps),
        "--model",
        model,
        "--out",
        str(folder),
    ]
    made = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(made.stderr[-3000:])
    return {"prompts": count, **json.loads(made.stdout.splitlines()[-1])}


def child(count: int, steps: int, model: str, folder: Path) -> None:
    """Compares, and prints what it took: all of it, and what importing and loading alone do."""
    import torch

    import kvinterp as kv
    from kvinterp.experiments.compare import Compare

    torch.set_num_threads(1)
    kv.load_model(model, kind="native", device="cpu")
    before, base = resource.getrusage(resource.RUSAGE_SELF), _peak()
    asked = Compare(model=model, prompts=f"arithmetic:{count}", max_new_tokens=steps, stop="length", device="cpu")
    outcome = asked.run(folder, progress="none", figures="drawn")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(outcome.tables["steps"]) == count * steps
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"seconds": round(seconds, 2), "start_mib": base, "peak_mib": _peak(), "written_mib": written >> 20}))


def _peak() -> int:
    """Peak of the resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Measures all counts."""
    from kvinterp.provenance import machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--model", default="zoo:gqa2-mini")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.steps, given.model, given.out)
        return
    rows = []
    for count in given.counts:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(count, given.steps, given.model, Path(folder) / "out"))
        print(rows[-1], flush=True)
    keep(
        HERE / "results",
        "many_prompts",
        {"provenance": machine(), "model": given.model, "steps": given.steps, "rows": rows},
    )


if __name__ == "__main__":
    main()
