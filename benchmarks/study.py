"""What a study's decodes cost: pairs a minute, the share outside the model's forwards, and growth with examples and steps.

A pair is one decode of both paths. Run it on a quiet machine: ``python benchmarks/study.py [MODEL] [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from typing import Any

from kept import keep
from rich.console import Console

from kvinterp.cells import loading_once, run_cells
from kvinterp.experiments.behaviour import Behaviour
from kvinterp.provenance import provenance

EXAMPLES, STEPS = (4, 8, 16), (16, 32, 64)


def measured(model: str, examples: int, steps: int) -> dict[str, Any]:
    """The decodes of some examples, with the seconds within forwards counted."""
    asked = Behaviour((model,), f"arithmetic:{examples}", max_new_tokens=steps, stop="length", controls=0, device="cpu")
    (adapter,) = asked.adapters()
    kind, within = type(adapter.model), [0.0]
    forward = kind.forward

    @functools.wraps(forward)
    def timed(self: Any, *given: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        try:
            return forward(self, *given, **more)
        finally:
            within[0] += time.perf_counter() - begun

    cells = asked.cells()
    kind.forward = timed
    try:
        begun = time.perf_counter()
        made = run_cells(cells)
        seconds = time.perf_counter() - begun
    finally:
        kind.forward = forward
    pairs = sum(int((tables["decodes"]["protocol"] == "matched").sum()) for tables, _ in made.values())
    rates = {"pairs_a_minute": 60 * pairs / seconds, "outside_forwards": 1 - within[0] / seconds}
    return {"examples": examples, "steps": steps, "pairs": pairs, "seconds": seconds, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="zoo:mistral-mini")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    given = parser.parse_args()
    rows = []
    with loading_once():
        (adapter,) = Behaviour((given.model,), device="cpu").adapters()
        measured(given.model, 1, 4)  # the first run imports and warms up
        for examples, steps in [*((n, STEPS[0]) for n in EXAMPLES), *((EXAMPLES[0], n) for n in STEPS[1:])]:
            rows.append(measured(given.model, examples, steps))
            Console().print(rows[-1])
        keep(given.out, "study", {"rows": rows, "provenance": provenance(adapter)})


if __name__ == "__main__":
    main()
