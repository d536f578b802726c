"""What recording costs: against the bare loops, and against run_with_cache at every step; and what appending to the cache costs.

    python benchmarks/recording.py [--rounds 9] [--out benchmarks/results]

Every round runs the three ways one after the other, so that a slow moment of the machine falls on all; ratios are taken
within a round and their median is reported. Nothing here is a test: the script prints whether each bound is met.
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

import kvinterp as kv
from kvinterp.models.provenance import provenance
from kvinterp.paths import Runner
from kvinterp.paths.store import Growing, Store
from kvinterp.recording import Recorder

STEPS = 48
SITES = "resid_post,pattern,kv"
BOUNDS = {"recorded / bare": 1.15, "run_with_cache / recorded": 1.6, "recorded bytes / run_with_cache bytes": 1 / 50}


def loops(adapter, tokens, fed, hooks=(None, None)):
    """Both paths on the same tokens."""
    for form, hook in zip(("cached", "recompute"), hooks, strict=True):
        with Runner(adapter, kv.path_named(form), tokens, STEPS, [] if hook is None else [hook]) as runner:
            for step in range(STEPS):
                runner.advance(None if step == 0 else fed[step - 1])


def recorded(adapter, tokens, fed):
    """Both paths with residual, pattern, K and V of the newest position; returns the bytes kept."""
    recorders = [Recorder(adapter, SITES) for _ in range(2)]
    loops(adapter, tokens, fed, recorders)
    for recorder in recorders:
        recorder.end_step()
    return sum(recorder.kept_bytes for recorder in recorders)


@torch.no_grad()
def run_with_cache(adapter, tokens, fed):
    """The same two loops as a user of TransformerLens writes them; returns the bytes kept."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model, kept = adapter.model, []
    past = TransformerLensKeyValueCache.init_cache(model.cfg, adapter.device, 1)
    whole = tokens
    for step in range(STEPS):
        row = tokens if step == 0 else fed[step - 1][:, None]
        whole = whole if step == 0 else torch.cat([whole, row], 1)
        kept.append(model.run_with_cache(row, past_kv_cache=past, attention_mask=torch.ones_like(row))[1])
        kept.append(model.run_with_cache(whole, attention_mask=torch.ones_like(whole))[1])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for cache in kept for t in cache.values()}
    return sum(storages.values())


def timed(work, *args):
    """Seconds and result."""
    began = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began, result


def cost(name, dtype, rounds):
    """The ratios of one model and dtype."""
    adapter = kv.load_model(f"zoo:{name}", kind="hooked", dtype=dtype, device="cpu")
    prompt = kv.load_prompts("arithmetic:8")[1]
    trace = kv.run(adapter, prompt, max_new_tokens=STEPS, stop="length")
    tokens, fed = torch.tensor([trace.prompt]), [torch.tensor([t]) for t in trace.tokens]
    for work in (loops, recorded, run_with_cache):
        work(adapter, tokens, fed)
    rows = []
    for number in range(rounds):
        ways = {"bare": loops, "recorded": recorded, "run_with_cache": run_with_cache}
        order = list(ways) if number % 2 else list(reversed(ways))
        rows.append({way: timed(ways[way], adapter, tokens, fed) for way in order})
    kept = rows[-1]["recorded"][1], rows[-1]["run_with_cache"][1]
    ratios = {
        "recorded / bare": [r["recorded"][0] / r["bare"][0] for r in rows],
        "run_with_cache / recorded": [r["run_with_cache"][0] / r["recorded"][0] for r in rows],
        "recorded bytes / run_with_cache bytes": [kept[0] / kept[1]],
    }
    seconds = {way: statistics.median(r[way][0] for r in rows) for way in rows[0]}
    spread = {k: {"min": min(v), "median": statistics.median(v), "max": max(v)} for k, v in ratios.items()}
    return {"model": name, "dtype": dtype, "seconds": seconds, "kept_bytes": kept, **spread}, adapter


@torch.no_grad()
def appending(adapter, repeats=15):
    """Microseconds of one append at 64 and 512 positions: the store in place beside torch.cat; and a whole decode's steps."""
    from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry

    facts, device = adapter.facts, torch.device("cpu")
    new = torch.randn(1, 1, facts.kv_heads, facts.head_dim, dtype=adapter.dtype)
    rows = {"in place": {}, "torch.cat": {}}
    for _ in range(repeats):
        store = Store(facts, kv.policy_named("identity"), 1, adapter.dtype, device, [], Growing(520, position_major=True))
        entry = TransformerLensKeyValueCacheEntry.init_cache_entry(adapter.model.cfg, device, 1)
        for step in range(513):
            taken = {
                "in place": timed(store.update, 0, new.transpose(1, 2), new.transpose(1, 2))[0],
                "torch.cat": timed(entry.append, new, new)[0],
            }
            for way, seconds in taken.items():
                rows[way].setdefault(step, []).append(seconds * 1e6)

    def around(way, step):
        near = [statistics.median(rows[way][s]) for s in range(step - 16, min(step + 17, 513))]
        return statistics.median(near)

    result = {way: {f"microseconds at {s}": around(way, s) for s in (64, 256, 496)} for way in rows}
    result["own cache / preallocated, a whole decode"] = own_against_preallocated(adapter)
    tokens = torch.tensor([[5]])
    parts: dict[str, list[list[float]]] = {"step": [], "append": []}
    for _ in range(3):
        per_step, spent = [], [0.0]
        update = Store.update

        def timed_update(self, *args, spent=spent, update=update):
            seconds, read = timed(update, self, *args)
            spent[0] += seconds
            return read

        Store.update = timed_update
        try:
            with Runner(adapter, kv.path_named("cached[cache=preallocated]"), tokens, 513) as runner:
                runner.advance()
                appends = []
                for _step in range(512):
                    spent[0] = 0.0
                    per_step.append(timed(runner.advance, torch.tensor([5]))[0] * 1e6)
                    appends.append(spent[0] * 1e6)
        finally:
            Store.update = update
        parts["step"].append(per_step)
        parts["append"].append(appends)

    def decode(what, step):
        return statistics.median(x for run in parts[what] for x in run[step - 16 : step + 16])

    result["in a decode of 512 steps"] = {
        f"microseconds of {what} at {s}": decode(what, s) for what in ("step", "append") for s in (64, 256, 496)
    }
    return result


def own_against_preallocated(adapter, lengths=(64, 512), rounds=5):
    """How much longer a decode takes on the model's own cache than on the preallocated one: medians of ratios in a round."""
    ratios = {}
    for length in lengths:
        found = []
        for number in range(rounds):
            paths = ["cached", "cached[cache=preallocated]"]
            seconds = {}
            for text in paths if number % 2 else paths[::-1]:
                with Runner(adapter, kv.path_named(text), torch.tensor([[5]]), length) as runner:
                    runner.advance()
                    seconds[text] = timed(lambda: [runner.advance(torch.tensor([5])) for _ in range(length - 1)])[0]  # noqa: B023
            found.append(seconds[paths[0]] / seconds[paths[1]])
        ratios[f"{length} steps"] = statistics.median(found)
    return ratios


def main():
    """Measures, prints and writes."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rounds", type=int, default=9)
    given.add_argument("--models", default="mistral-mini,gemma2-mini")
    given.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = given.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "dtype", *BOUNDS, title=f"recording {SITES}, {STEPS} steps, medians (min to max)")
    results = []
    for name in options.models.split(","):
        for dtype in ("float32", "float16"):
            row, adapter = cost(name, dtype, options.rounds)
            results.append(row)
            shown = []
            for bound, limit in BOUNDS.items():
                value = row[bound]["median"]
                applies = bound != "run_with_cache / recorded" or dtype == "float32"
                met = (value >= limit if bound == "run_with_cache / recorded" else value <= limit) or not applies
                text = f"{value:.3f} ({row[bound]['min']:.3f} to {row[bound]['max']:.3f})"
                shown.append(text + ("" if not applies else f" {'meets' if met else 'MISSES'} {limit:.3g}"))
            table.add_row(name, dtype, *shown)
    appends = appending(adapter)
    console = Console(width=180)
    console.print(table)
    for way, numbers in appends.items():
        console.print(way, {k: round(v, 1) for k, v in numbers.items()})
    about = provenance(adapter, steps=STEPS, sites=SITES, rounds=options.rounds)
    keep(options.out, "recording", {"cost": results, "append": appends, "provenance": about})


if __name__ == "__main__":
    main()
