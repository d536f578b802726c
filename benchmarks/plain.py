"""What kvinterp costs above the plain loops that a user of transformers writes: running, recording, comparing.

    python benchmarks/plain.py [--rounds 7] [--models llama-124m zoo:gqa2-mini real:smollm2-135m] [--out benchmarks/results]
    python benchmarks/plain.py --long [--rounds 3]

A model is a name, or the folder of a checkpoint; one that is not there is left out, with a sentence.

The plain loops decode greedily with the model's own cache, and by recomputing the whole prefix. Three calls stand beside them:
`run` along both paths; `run` with the residual stream of every layer kept; `compare` with the residual stream and K and V of
every layer, which is held against the two plain loops without any measuring. The logits of all are compared to the bit.
Every round runs each way once, so that a slow moment of the machine falls on all; ratios are taken within a round, of the
processor's time (one thread), and their median is reported. `--long` takes texts of 2,048 and 8,192 tokens, the last 16 of them
generated, each way in a process of its own, and also says how much memory it took. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from kept import keep
from rich.console import Console
from rich.table import Table

import kvinterp as kv
from kvinterp.common.source import file_of
from kvinterp.models.provenance import machine, provenance

STEPS = {"llama-124m": 12}
"""Steps of a decode: 48, but for the models named here, which are large."""
LARGE = {"run": 1.02, "recorded": 1.05, "compared": 1.10}
BOUNDS = {"llama-124m": LARGE, "real:smollm2-135m": LARGE}
ZOO_BOUND = 1.3
LENGTHS, GENERATED = (2048, 8192), 16
"""Tokens of long texts, and how many of them are generated."""
AGAINST = {"run": "plain", "recorded": "plain, recorded", "compared": "plain"}
"""The plain loop that each way is held against."""
RECORD = "resid_post,kv"


def llama_124m():
    """A Llama of GPT-2's size with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, tie_word_embeddings=True, **sizes)).eval()


@torch.no_grad()
def cached(model, tokens, steps):
    """The logits of a decode from the model's own cache."""
    row, past, logits = tokens, None, []
    for _ in range(steps):
        out = model(input_ids=row, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits[:, -1])
        row = logits[-1].argmax(-1, keepdim=True)
    return logits


@torch.no_grad()
def recomputed(model, tokens, steps):
    """The logits of a decode that recomputes the whole prefix at every step."""
    logits = []
    for _ in range(steps):
        logits.append(model(input_ids=tokens, use_cache=False).logits[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
    return logits


def plain(model, tokens, steps):
    """Both plain loops."""
    return cached(model, tokens, steps), recomputed(model, tokens, steps)


def plain_recorded(model, tokens, steps):
    """Both plain loops, with a hook on every block that keeps the newest position of its output."""
    kept = []

    def keep_newest(module, args, output):
        kept.append((output[0] if isinstance(output, tuple) else output)[:, -1].clone())

    handles = [block.register_forward_hook(keep_newest) for block in model.model.layers]
    try:
        return plain(model, tokens, steps)
    finally:
        for handle in handles:
            handle.remove()


def ways(adapter, tokens, steps):
    """What is timed, by name."""
    prompt, given = tokens[0].tolist(), {"max_new_tokens": steps, "stop": "length"}

    def run(record=None, logits="discard"):
        return [kv.run(adapter, prompt, path, record=record, logits=logits, **given) for path in ("cached", "recompute")]

    return {
        "plain": lambda: plain(adapter.model, tokens, steps),
        "run": run,
        "plain, recorded": lambda: plain_recorded(adapter.model, tokens, steps),
        "recorded": lambda: run("resid_post"),
        "compared": lambda: kv.compare(adapter, prompt, protocol="free", record=RECORD, progress="none", **given),
    }


def processor(work):
    """Seconds of the processor."""
    began = time.process_time()
    work()
    return time.process_time() - began


def llama_8k():
    """The zoo's llama64-mini in its shape, with random weights and a context of 8,192."""
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(file_of("kvinterp.models.zoo").parent / "llama64-mini")
    config.max_position_embeddings = LENGTHS[-1]
    return LlamaForCausalLM(config).float().eval()


def one_long(way, length):
    """Goes one way over a text of so many tokens: its processor seconds, and the MiB of memory that it added to the process."""
    adapter = kv.wrap(llama_8k())
    work = ways(adapter, torch.arange(length - GENERATED)[None] * 7 % adapter.facts.vocabulary, GENERATED)[way]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = processor(work)
    return {"seconds": seconds, "MiB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def long_texts(rounds):
    """Every way over long texts: seconds over those of the plain loops in the same round, and memory."""
    table = Table(
        "length", "way", "times the plain loops: median (least to most)", "MiB more than before: plain loops, this way"
    )
    rows = []
    for length in LENGTHS:
        made = []
        for _ in range(rounds):
            round = {}
            for way in ("plain", "run", "plain, recorded", "recorded", "compared"):
                child = [sys.executable, __file__, "--one", way, str(length)]
                round[way] = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
            made.append(round)
        for way, base in AGAINST.items():
            ratios = sorted(round[way]["seconds"] / round[base]["seconds"] for round in made)
            memory = [statistics.median(round[name]["MiB"] for round in made) for name in (base, way)]
            rows.append({"length": length, "way": way, "ratios": ratios, "MiB": memory})
            spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            table.add_row(f"{length:,}", way, spread, f"{memory[0]:.0f}, {memory[1]:.0f}")
    Console(width=180).print(table)
    return rows


def model_named(name, dtype):
    """A model by its name, or of a folder."""
    if name == "llama-124m":
        return kv.wrap(llama_124m().to(getattr(torch, dtype)))
    return kv.load_model(name, kind="native", dtype=dtype, device="cpu")


def cost(name, dtype, rounds):
    """The ratios of one model and dtype."""
    adapter = model_named(name, dtype)
    steps = STEPS.get(name, 48)
    tokens = torch.arange(32)[None] * 7 % adapter.facts.vocabulary
    taken = ways(adapter, tokens, steps)
    for work in taken.values():
        work()
    given = {"max_new_tokens": steps, "stop": "length", "logits": "keep"}
    ours = [kv.run(adapter, tokens[0].tolist(), path, **given).logits for path in ("cached", "recompute")]
    same = all(
        torch.equal(one, torch.cat(other)) for one, other in zip(ours, plain(adapter.model, tokens, steps), strict=True)
    )
    seconds = []
    for number in range(rounds):
        order = list(taken) if number % 2 else list(taken)[::-1]
        seconds.append({way: processor(taken[way]) for way in order})
    ratios = {way: [row[way] / row[base] for row in seconds] for way, base in AGAINST.items()}
    return {
        "model": name, "dtype": dtype, "steps": steps, "prompt_tokens": tokens.shape[1], "rounds": rounds, "same_bits": same,
        "seconds": {way: statistics.median(row[way] for row in seconds) for way in taken},
        "ratios": {way: {"min": min(v), "median": statistics.median(v), "max": max(v)} for way, v in ratios.items()},
    }, adapter  # fmt: skip


def main():
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=["llama-124m", "zoo:gqa2-mini", "real:smollm2-135m"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        print(json.dumps(one_long(given.one[0], int(given.one[1]))))
        return
    if given.long:
        rows = long_texts(given.rounds)
        keep(given.out, "long", {"cost": rows, "provenance": {**machine(), "rounds": given.rounds}})
        return
    results = []
    table = Table(
        "model", "dtype", "run", "recorded", "compared", "same bits", title="times the plain loops: median (least to most)"
    )
    for name in given.models:
        for dtype in given.dtypes:
            try:
                row, adapter = cost(name, dtype, given.rounds)
            except kv.InputError as error:
                print(f"{name} in {dtype} is left out: {error}")
                continue
            results.append(row)
            shown = []
            for way, spread in row["ratios"].items():
                bound = (BOUNDS.get(name) or ({} if name.startswith("zoo:") else LARGE)).get(way, ZOO_BOUND)
                word = "meets" if spread["median"] <= bound else "MISSES"
                shown.append(f"{spread['median']:.3f} ({spread['min']:.3f} to {spread['max']:.3f}) {word} {bound}")
            table.add_row(name, dtype, *shown, "yes" if row["same_bits"] else "NO")
    if not results:
        raise SystemExit("none of these models is there: nothing was measured")
    Console(width=180).print(table)
    keep(given.out, "plain", {"cost": results, "provenance": provenance(adapter, rounds=given.rounds)})


if __name__ == "__main__":
    main()
