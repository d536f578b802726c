"""What a GPU would wait for, counted: operations that are dispatched a step and reads by the host a step, ours over plain loops.

    python benchmarks/dispatch.py [--models llama-12 zoo:gqa2-mini] [--out benchmarks/results]

No GPU is needed: the model is on the device of ``tests/pretended.py``, which counts what it is asked for. On a GPU a decode step of
a small batch takes as long as it takes to start its kernels, and every read makes the host wait for all of them. Each way runs for
two numbers of steps, and what the longer one has more of is divided by the steps it has more: what is done once a call falls out, and
stands in a column of its own (``once``). The plain loops are those of ``plain.py``. Views start no kernel: they are counted beside.
These are counts and no times, the same on every machine with the same versions of torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from kept import keep
from rich.console import Console
from rich.table import Table

import kvinterp as kv
from kvinterp.models.provenance import provenance
from plain import RECORD, cached, recomputed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pretended import Counts, pretended

STEPS = (6, 12)
PROMPT = [token * 7 % 90 + 4 for token in range(16)]
BOUNDS = {
    "run, cached": (1.05, 1),
    "run, recompute": (1.05, 1),
    "compare, logits": (1.15, 2),
    "compare, all sites": (2.0, 4),
    "a lane of a sweep": (1.1, 2),
}
"""Most operations over those of the plain loop, and most reads a step."""
WAYS = {
    "run, cached": "cached",
    "run, recompute": "recompute",
    "compare, logits": "both",
    "compare, all sites": "both",
    "a lane of a sweep": "cached",
}
"""Which plain loop each is held against."""


def llama_12():
    """A narrow Llama of twelve layers with random weights: what counts is how many operations, not how large they are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def ways(adapter, steps):
    """What is counted, by name, for so many steps."""
    tokens = torch.tensor([PROMPT], device=adapter.device)
    # Its text must not end before, and whether it does is read at every step all the same.
    given = {"max_new_tokens": steps}

    def compare(record):
        return lambda: kv.compare(adapter, PROMPT, record=record, progress="none", **given)

    def sweep(layers):
        settings = {"direction": "into-cached", "controls": "none", "progress": "none", "layers": layers}
        return lambda: kv.sweep(adapter, PROMPT, "resid_post", over="single", **settings, **given)

    return {
        "plain, cached": lambda: cached(adapter.model, tokens, steps),
        "plain, recompute": lambda: recomputed(adapter.model, tokens, steps),
        "run, cached": lambda: kv.run(adapter, PROMPT, "cached", **given),
        "run, recompute": lambda: kv.run(adapter, PROMPT, "recompute", **given),
        "compare, logits": compare(""),
        "compare, all sites": compare(RECORD),
        "compare, and patterns": compare(None),
        "sweep of one layer": sweep([0]),
        "sweep of three layers": sweep([0, 1, 2]),
    }


def counted(device, adapter):
    """For each way the counts of the shorter and of the longer decode."""
    found: dict[str, list[Counts]] = {}
    for steps in STEPS:
        for name, work in ways(adapter, steps).items():
            # What is found out once about a model of these shapes is found out here.
            work()
            with device.counting() as counts:
                work()
            found.setdefault(name, []).append(counts)
    return found


def by_step(few, many):
    """What a step has, and what a call has besides."""
    row = {}
    for name in ("operations", "views", "reads", "writes", "read_bytes"):
        step = (getattr(many, name) - getattr(few, name)) / (STEPS[1] - STEPS[0])
        row[name] = {"step": step, "once": getattr(few, name) - step * STEPS[0]}
    row["lines"] = {line: (many.lines[line] - few.lines[line]) / (STEPS[1] - STEPS[0]) for line in many.lines if many.lines[line] > few.lines[line]}  # fmt: skip
    return row


def cost(name):
    """The counts of one model."""
    with pretended() as device:
        adapter = (
            kv.wrap(llama_12().to("pretend:0"), name=name)
            if name == "llama-12"
            else kv.load_model(name, kind="native", dtype="float32", device="pretend:0")
        )
        rows = {way: by_step(*both) for way, both in counted(device, adapter).items()}
        about = provenance(adapter)
    one, three = rows.pop("sweep of one layer"), rows.pop("sweep of three layers")
    rows["a lane of a sweep"] = {
        what: {when: (three[what][when] - one[what][when]) / 2 for when in ("step", "once")}
        for what in ("operations", "views", "reads", "writes", "read_bytes")
    }
    plain = {form: rows[f"plain, {form}"] for form in ("cached", "recompute")}
    for way, row in rows.items():
        form = WAYS.get(way, way.rpartition(" ")[2] if way.startswith("plain") else "both")
        bases = [plain[form]] if form in plain else [*plain.values()]
        row["ratio"] = {what: row[what]["step"] / sum(b[what]["step"] for b in bases) for what in ("operations", "views")}
    return rows, about


def main():
    """Counts, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama-12", "zoo:gqa2-mini"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    table = Table(
        "model", "way", "operations a step", "over plain", "views over plain", "reads a step", "once a call: reads, writes"
    )
    for name in given.models:
        results[name], about = cost(name)
        for way, row in results[name].items():
            bound = BOUNDS.get(way)
            ratio, reads = row["ratio"]["operations"], row["reads"]["step"]
            words = ["", ""] if bound is None else [f" {'meets' if x <= y else 'MISSES'} {y}" for x, y in zip((ratio, reads), bound, strict=True)]  # fmt: skip
            once = f"{row['reads']['once']:.0f}, {row['writes']['once']:.0f}"
            table.add_row(name, way, f"{row['operations']['step']:.1f}", f"{ratio:.3f}{words[0]}", f"{row['ratio']['views']:.3f}", f"{reads:.2f}{words[1]}", once)  # fmt: skip
    Console(width=160).print(table)
    keep(given.out, "dispatch", {"counts": results, "provenance": about | {"steps": STEPS, "prompt_tokens": len(PROMPT)}})


if __name__ == "__main__":
    main()
