"""What a policy costs at a step, as a ratio to none, with 64 and with 256 positions held: for every policy found, in one run.

    python benchmarks/policies.py [--rounds 5] [--out benchmarks/results]

In every round each policy's decode runs right after one without a policy, so that a slow moment of the machine falls on both;
the ratio is taken within the round, and the median of rounds is reported. Seconds are the processor's. Nothing here is a test.
The model is a random Llama (4 layers, width 256, 4 query heads over 2 KV heads of 64), which every format fits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from kept import keep
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import kvinterp as kv
from kvinterp.models.provenance import provenance
from kvinterp.paths import Runner
from kvinterp.policies import POLICIES

HELD = (64, 256)
STEPS = 16


def model():
    """A random one, in float16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return kv.wrap(LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512)).half().eval())


def seconds(adapter, path, held):
    """Of a step, with so many positions held before the first that is timed."""
    tokens = (torch.arange(held) * 7 + 3)[None] % adapter.facts.vocabulary
    with Runner(adapter, kv.path_named(path), tokens, STEPS + 1) as runner:
        runner.advance()
        runner.advance(torch.tensor([5]))
        began = time.process_time()
        for _ in range(STEPS):
            runner.advance(torch.tensor([5]))
        return (time.process_time() - began) / STEPS


def ratios(adapter, text, held, rounds):
    """Of a step with the policy to one without, round by round."""
    found = []
    for number in range(rounds + 1):
        paths = ["cached", f"cached+{text}"]
        taken = {path: seconds(adapter, path, held) for path in (paths if number % 2 else paths[::-1])}
        found.append(taken[paths[1]] / taken[paths[0]])
    return found[1:]


def main():
    """Measures, prints and writes."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = given.parse_args()
    torch.set_num_threads(1)
    adapter = model()
    title = f"a random Llama in {adapter.dtype}: a step with a policy / without, median (min to max) of {options.rounds}"
    table = Table("policy", *(f"{held} positions" for held in HELD), title=title)
    rows = []
    for kind in POLICIES.values():
        row = {"policy": str(kind())}
        for held in HELD:
            try:
                found = ratios(adapter, row["policy"], held, options.rounds)
            except kv.KvinterpError as error:
                row[str(held)] = str(error)
                continue
            row[str(held)] = {"min": min(found), "median": statistics.median(found), "max": max(found)}
        shown = [
            f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" if isinstance(one, dict) else "refused"
            for one in (row[str(held)] for held in HELD)
        ]
        table.add_row(row["policy"], *shown)
        rows.append(row)
    Console(width=140).print(table)
    keep(options.out, "policies", {"steps": rows, "provenance": provenance(adapter, rounds=options.rounds, steps=STEPS)})


if __name__ == "__main__":
    main()
