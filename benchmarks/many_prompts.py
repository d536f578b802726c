"""What ``kvinterp compare`` takes with many prompts: processor time and peak memory, each count in a process of its own.

What a prompt gave is kept on disk as it is made, and all of it is joined in memory at the end: both grow with the number of
prompts. ``python benchmarks/many_prompts.py`` measures 50, 100, 200 and 500 prompts of 64 steps and
writes a JSON file; ``--draw FILE.json FILE.png`` draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kept import keep

HERE = Path(__file__).parent
COUNTS = (50, 100, 200, 500)


def measured(count: int, steps: int, model: str, record: str, folder: Path) -> dict[str, float]:
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
        "--record",
        record,
    ]
    made = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(made.stderr[-3000:])
    return {"prompts": count, **json.loads(made.stdout.splitlines()[-1])}


def child(count: int, steps: int, model: str, record: str, folder: Path) -> None:
    """Compares, and prints what it took: all of it, and what importing and loading alone do."""
    import torch

    import kvinterp as kv
    from kvinterp.commands.compare import Compare

    torch.set_num_threads(1)
    kv.load_model(model, kind="native", device="cpu")
    before, base = resource.getrusage(resource.RUSAGE_SELF), _peak()
    asked = Compare(
        model=model,
        prompts=f"arithmetic:{count}",
        max_new_tokens=steps,
        stop="length",
        device="cpu",
        record="" if record == "logits" else None,
    )
    outcome = asked.run(folder, progress="none", figures="drawn")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(outcome.tables["steps"]) == count * steps
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"seconds": round(seconds, 2), "start_mib": base, "peak_mib": _peak(), "written_mib": written >> 20}))


def draw(kept: Sequence[Path], picture: Path) -> None:
    """Draws what JSON files hold, a line each."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    measures = (("seconds", "processor time (s)"), ("peak_mib", "peak resident memory (MiB)"))
    for path, colour in zip(kept, ("#3b6fb6", "#c1662f"), strict=False):
        content = json.loads(path.read_text())
        rows = content["rows"]
        sites = {"all": "all sites", "logits": "logits alone"}[content.get("record", "all")]
        for panel, (name, _) in zip(panels, measures, strict=True):
            counts = [row["prompts"] for row in rows]
            panel.plot(
                counts, [row[name] for row in rows], "o-", color=colour, label=f"{sites}, {content['provenance']['device']}"
            )
    for panel, (_, label) in zip(panels, measures, strict=True):
        highest = max(line.get_ydata().max() for line in panel.lines)
        panel.set(xlabel="prompts", ylabel=label, ylim=(0, 1.1 * highest), xlim=(0, None))
        panel.grid(alpha=0.3)
    panels[1].axhline(rows[0]["start_mib"], color="#888888", linestyle="--", label="model and libraries loaded")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"kvinterp compare {content['model']}, {content['steps']} steps a prompt, 1 thread", fontsize=10)
    figure.savefig(picture, dpi=110)


def _peak() -> int:
    """Peak of the resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Measures all counts."""
    from kvinterp.models.provenance import machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--model", default="zoo:gqa2-mini")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--record", default="all", choices=("all", "logits"), help="all sites, or the logits alone")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE", help="draws kept JSON files as the PNG that comes last"
    )
    given = parser.parse_args()
    if given.draw:
        draw(given.draw[:-1], given.draw[-1])
        return
    if given.child:
        child(given.child, given.steps, given.model, given.record, given.out)
        return
    rows = []
    for count in given.counts:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(count, given.steps, given.model, given.record, Path(folder) / "out"))
        print(rows[-1], flush=True)
    keep(
        HERE / "results",
        "many_prompts" if given.record == "all" else "many_prompts_logits",
        {"provenance": machine(), "record": given.record, "model": given.model, "steps": given.steps, "rows": rows},
    )


if __name__ == "__main__":
    main()
