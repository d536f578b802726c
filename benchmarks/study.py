"""What a study's decodes cost: pairs a minute, the share outside the model's forwards, and growth with examples and steps.

    python benchmarks/study.py [--models zoo:mistral-mini llama-124m] [--out benchmarks/results]

A pair is one decode of both paths. Times are the processor's, of one thread, so that neighbours on the machine count little. Cost
is linear in examples where the cost of an example stays the same from run to run; growth with steps beyond that of the forwards,
timed within, is ours. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kept import keep
from rich.console import Console
from rich.table import Table

from kvinterp.commands.cells import loading_once, run_cells
from kvinterp.models.provenance import provenance
from kvinterp.papers.studies.behaviour import Behaviour
from plain import llama_124m

SIZES = {"llama-124m": ((1, 2, 4), (6, 12, 24))}
"""Examples, and steps of a decode: fewer for a large model."""
BOUND = 0.10
"""Of the time, that may be spent outside forwards."""


@contextlib.contextmanager
def folder_of(name: str) -> Iterator[str]:
    """A model by the name that a study takes; the Llama of GPT-2's size is written into a folder, with the zoo's tokenizer."""
    if name != "llama-124m":
        yield name
        return
    from kvinterp.models import load_model

    with tempfile.TemporaryDirectory() as folder:
        llama_124m().to(torch.float32).save_pretrained(folder)
        load_model("zoo:mistral-mini", kind="native", device="cpu").tokenizer.save_pretrained(folder)
        yield folder


def measured(model: str, examples: int, steps: int) -> dict[str, Any]:
    """The decodes of some examples, with the seconds within forwards counted."""
    chosen = {"strategies": ("greedy",), "stop": "length", "controls": 0, "device": "cpu", "dtype": "float32"}
    asked = Behaviour((model,), f"arithmetic:{examples}", max_new_tokens=steps, **chosen)
    (adapter,) = asked.adapters()
    kind, within = type(adapter.model), [0.0]
    forward = kind.forward

    @functools.wraps(forward)
    def timed(self: Any, *given: Any, **more: Any) -> Any:
        begun = time.process_time()
        try:
            return forward(self, *given, **more)
        finally:
            within[0] += time.process_time() - begun

    cells = asked.cells()
    kind.forward = timed
    try:
        begun = time.process_time()
        made = run_cells(cells)
        seconds = time.process_time() - begun
    finally:
        kind.forward = forward
    pairs = sum(int((tables["decodes"]["protocol"] == "matched").sum()) for tables, _ in made.values())
    rates = {"pairs_a_minute": 60 * pairs / seconds, "outside_forwards": 1 - within[0] / seconds}
    cost = {"seconds_an_example": seconds / examples, "forwards_an_example": within[0] / examples}
    return {"examples": examples, "steps": steps, "pairs": pairs, "seconds": seconds, **cost, **rates}


def said(name: str, rows: list[dict[str, Any]]) -> Table:
    """The rows of one model."""
    table = Table(*rows[0], title=f"{name}, float32, one thread, seconds of the processor")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    most = max(row["outside_forwards"] for row in rows)
    table.caption = f"outside forwards at most {most:.1%}: {'meets' if most <= BOUND else 'MISSES'} {BOUND:.0%}"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["zoo:mistral-mini", "llama-124m"])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in given.models:
        examples, steps = SIZES.get(name, ((4, 8, 16), (16, 32, 64)))
        with folder_of(name) as model, loading_once():
            (adapter,) = Behaviour((model,), device="cpu", dtype="float32").adapters()
            measured(model, 1, 4)  # the first run imports and warms up
            sizes = [*((n, steps[0]) for n in examples), *((examples[0], n) for n in steps[1:])]
            found[name] = [measured(model, *size) for size in sizes]
            made_with = provenance(adapter)
        Console(width=180).print(said(name, found[name]))
    keep(given.out, "study", {"models": found, "provenance": made_with})


if __name__ == "__main__":
    main()
