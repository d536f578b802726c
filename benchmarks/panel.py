"""How long the notebook's panel takes to answer, beside the plain loop that a user would write.

    python benchmarks/panel.py [--rounds 5] [--models mistral-mini,gqa2-mini] [--out benchmarks/results]

The plain loop decodes the cached path once, keeping the residual stream behind the patched layer at every step, decodes the
recompute path on the same tokens once as it is and once with those rows put in, and ends with both KLs. The panel's first
answer has to do the same; every later one to the same prompt costs its patched run alone. Each round runs all of them one after the other, so that a slow moment of the machine falls on all;
ratios are taken within a round and their median is reported, of the clock and of the processor's time. That both give the
same KL to the bit is checked. The bound, half a second for an answer, is the clock's: run it on a quiet machine.
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
from sweeps import spread, timed

import kvinterp as kv
from kvinterp import metrics
from kvinterp.models.provenance import provenance

STEPS = 12
BOUND = 0.5
LAYER = 1


@torch.no_grad()
def plain_loop(adapter, prompt, layer):
    """KL(cached || recompute) and KL(cached || patched) at every step, with torch's own hooks on the model."""
    model, kept = adapter.model, []

    def stream(output):
        return output[0] if isinstance(output, tuple) else output

    def keeps(_, __, output):
        kept.append(stream(output)[:, -1].clone())

    def puts(row):
        def hook(_, __, output):
            new = stream(output).clone()
            new[:, -1] = row
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def logits(tokens, **more):
        output = model(tokens, **more)
        return getattr(output, "logits", output)[0, -1]

    def cached():
        found, row, more = [], torch.tensor([prompt]), own_cache(adapter)
        for _ in range(STEPS):
            if adapter.kind == "hooked":
                more["attention_mask"] = torch.ones_like(row)
            found.append(logits(row, **more))
            row = found[-1].argmax()[None, None]
        return torch.stack(found)

    handle = adapter.blocks[layer].register_forward_hook(keeps)
    donor = cached()
    handle.remove()
    tokens, base, patched = torch.tensor([prompt]), [], []
    bare = {} if adapter.kind == "hooked" else {"use_cache": False}
    for step in range(STEPS):
        if step:
            base.append(logits(tokens, **bare))
            handle = adapter.blocks[layer].register_forward_hook(puts(kept[step]))
            patched.append(logits(tokens, **bare))
            handle.remove()
        tokens = torch.cat([tokens, donor[step].argmax()[None, None]], 1)
    return [metrics.kl_divergence(donor[1:], torch.stack(rows)).mean() for rows in (base, patched)]


def own_cache(adapter):
    """The cache of the model's own library, as its forward takes it."""
    if adapter.kind == "hooked":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        return {"past_kv_cache": TransformerLensKeyValueCache.init_cache(adapter.model.cfg, "cpu", 1)}
    from transformers import DynamicCache

    return {"past_key_values": DynamicCache(config=adapter.source.config), "use_cache": True}


def cost(name, kind, rounds):
    """Seconds and ratios of one model and kind."""
    adapter = kv.load_model(f"zoo:{name}", kind=kind, dtype="float32", device="cpu")
    prompt = adapter.encode(kv.load_prompts("arithmetic:2")[1].text)
    measured = []
    for _ in range(rounds):
        bench = kv.PatchBench(adapter, STEPS)
        ways = {
            "plain": (plain_loop, adapter, prompt, LAYER),
            "first": (bench.ask, prompt, "resid_post", LAYER),
            "next": (bench.ask, prompt, "resid_post", LAYER + 1),
        }
        measured.append({way: timed(*work) for way, work in ways.items()})
    answer = kv.PatchBench(adapter, STEPS).ask(prompt, "resid_post", LAYER)
    plain = [float(value) for value in plain_loop(adapter, prompt, LAYER)]

    def ratio(clock, way):
        return spread(m["plain"][clock] / m[way][clock] for m in measured)

    return {
        "model": name,
        "kind": kind,
        "steps": len(answer.steps),
        "prompt_tokens": len(prompt),
        "seconds": {way: spread(m[way]["clock"] for m in measured) for way in measured[0]},
        "plain_over_first": {clock: ratio(clock, "first") for clock in ("clock", "processor")},
        "plain_over_next": {clock: ratio(clock, "next") for clock in ("clock", "processor")},
        "same_kl_to_the_bit": plain == [answer.kl_before, answer.kl_after],
    }


def shown(results, rounds):
    """The table of what was measured."""
    table = Table(title=f"the panel's answers, {STEPS} steps, medians of {rounds} rounds")
    for column in ("model", "kind", "first answer s", "next answer s", "plain loop s", "plain / first", "plain / next", "same KL"):  # fmt: skip
        table.add_column(column)
    for row in results:
        seconds = {way: found["median"] for way, found in row["seconds"].items()}
        met = "meets" if max(seconds["first"], seconds["next"]) < BOUND else "MISSES"
        table.add_row(
            row["model"],
            row["kind"],
            f"{seconds['first']:.2f} {met} {BOUND:g}",
            f"{seconds['next']:.2f}",
            f"{seconds['plain']:.2f}",
            *(f"{row[name]['processor']['median']:.2f}" for name in ("plain_over_first", "plain_over_next")),
            "to the bit" if row["same_kl_to_the_bit"] else "DIFFERS",
        )
    return table


def main():
    """Measures, prints and writes."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--models", default="mistral-mini,gqa2-mini")
    given.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = given.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    results = [cost(name, kind, options.rounds) for name in options.models.split(",") for kind in ("hooked", "native")]
    console = Console(width=200)
    console.print(shown(results, options.rounds))
    longest = statistics.median([row["seconds"]["first"]["median"] for row in results])
    console.print(
        f"median over the models of the first answer: {longest:.2f} s; all of it took {time.perf_counter() - began:.0f} s"
    )
    adapter = kv.load_model("zoo:mistral-mini", kind="native", dtype="float32", device="cpu")
    keep(options.out, "panel", {"cost": results, "provenance": provenance(adapter, steps=STEPS, rounds=options.rounds)})


if __name__ == "__main__":
    main()
