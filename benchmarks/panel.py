"""How long the notebook's panel takes to answer, with nothing remembered, beside the two decodes that no answer can spare.

The bound is a second on the zoo. Run it on a quiet machine: `python benchmarks/panel.py`. Nothing here is a test.
"""

from __future__ import annotations

import statistics
import time

from rich.console import Console
from rich.table import Table

import kvinterp as kv
from kvinterp.models import zoo
from kvinterp.report.panel import PatchBench

ROUNDS = 5


def main() -> None:
    """Measures and prints."""
    prompt = kv.load_prompts("arithmetic:2")[1]
    table = Table(
        "model", "kind", "site", "direction", "seconds", "of two bare decodes", title=f"medians of {ROUNDS} rounds"
    )
    for name in zoo.names():
        for kind in ("hooked", "native"):
            model = kv.load_model(f"zoo:{name}", kind=kind, dtype="float16", device="cpu")
            for site, direction in (("resid_post", "into-recompute"), ("kv", "into-cached")):
                answers, ratios = [], []
                for _ in range(ROUNDS):
                    bench = PatchBench(model)
                    began = time.perf_counter()
                    for path in ("cached", "recompute"):
                        kv.run(model, prompt, path, max_new_tokens=bench.max_new_tokens)
                    bare = time.perf_counter() - began
                    answers.append(bench.ask(prompt, site, 1, direction=direction).seconds)
                    ratios.append(answers[-1] / bare)
                seconds = statistics.median(answers)
                said = f"{seconds:.2f} {'meets' if seconds < 1 else 'MISSES'} 1 s"
                table.add_row(name, kind, site, direction, said, f"{statistics.median(ratios):.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
