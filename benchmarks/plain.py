"""What kvinterp costs above the plain loops that a user of transformers writes: running, recording, comparing.

    python benchmarks/plain.py [--rounds 7] [--models llama-124m zoo:gqa2-mini real:smollm2-135m] [--out benchmarks/results]

A model is a name, or the folder of a checkpoint; one that is not there is left out, with a sentence.

The plain loops decode greedily with the model's own cache, and by recomputing the whole prefix. Three calls stand beside them:
`run` along both paths; `run` with the residual stream of every layer kept; `compare` with the residual stream and K and V of
every layer, which is held against the two plain loops without any measuring. The logits of all are compared to the bit.
Every round runs each way once, so that a slow moment of the machine falls on all; ratios are taken within a round, of the
processor's time (one thread), and their median is reported. Nothing here is a test.
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

STEPS = {"llama-124m": 12}
"""Steps of a decode: 48, but for the models named here, which are large."""
LARGE = {"run": 1.02, "recorded": 1.05, "compared": 1.10}
BOUNDS = {"llama-124m": LARGE, "real:smollm2-135m": LARGE}
ZOO_BOUND = 1.3
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
    against = {"run": "plain", "recorded": "plain, recorded", "compared": "plain"}
    ratios = {way: [row[way] / row[base] for row in seconds] for way, base in against.items()}
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
    given = parser.parse_args()
    torch.set_num_threads(1)
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
