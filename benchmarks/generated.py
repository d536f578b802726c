"""What recording the run that writes a text costs: time over the model's own ``generate``, and memory over a long text.

    python benchmarks/generated.py [--model real:smollm2-135m] [--rounds 7] [--long 8192]

Every round runs the ways one after the other, so that a slow moment of the machine falls on all; ratios are taken within a
round and their median is reported. The long text is written by a small model with random weights.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

import kvinterp as kv
from kvinterp.models.inputs import left_padded

BOUNDS = {"resid_post": 1.15, "every site": 1.5}
STREAMS = "resid_pre,resid_mid,resid_post,attn_out,mlp_out"
EVERY = "resid_pre,resid_mid,resid_post,attn_out,mlp_out,q,k,v,z,post,pattern"


def timed(work):
    """Processor seconds, which other processes do not lengthen."""
    began = time.process_time()
    work()
    return time.process_time() - began


@torch.no_grad()
def cost(name, rounds, new, dtype):
    """The ratios of one model."""
    model = kv.load_model(name, dtype=dtype, device="cpu")
    prompt = kv.load_prompts("natural:1")[0]
    ids, mask = left_padded(model, [model.encode(prompt)])
    options = {"max_new_tokens": new, "min_new_tokens": new}
    ways = {
        "plain": lambda: model.model.generate(ids, attention_mask=mask, do_sample=False, **options),
        "resid_post": lambda: kv.generated(model, prompt, "resid_post", **options),
        "every site": lambda: kv.generated(model, prompt, EVERY, **options),
    }
    times = {way: [] for way in ways}
    for work in ways.values():
        work()
    for _ in range(rounds):
        for way, work in ways.items():
            times[way].append(timed(work))
    print(
        f"{name} ({dtype}), {ids.shape[1]} prompt tokens, {new} generated, {rounds} rounds, {torch.get_num_threads()} threads"
    )
    for way, bound in BOUNDS.items():
        ratios = [seconds / plain for seconds, plain in zip(times[way], times["plain"], strict=True)]
        middle = statistics.median(ratios)
        word = "met" if middle <= bound else "NOT met"
        print(f"  {way}: {middle:.3f} of generate ({min(ratios):.3f} to {max(ratios):.3f}); bound {bound}: {word}")


def peak():
    """The largest resident size so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.no_grad()
def long(count):
    """Peak memory of the process by the length of a text: plain, and recorded on disk, in a window and in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, num_key_value_heads=1, head_dim=32, vocab_size=512, max_position_embeddings=count + 64, eos_token_id=None
    )
    torch.manual_seed(0)
    adapter = kv.wrap(LlamaForCausalLM(config).eval())
    prompt = list(range(3, 19))
    one = 4 * 1024 * 2 * len(STREAMS.split(",")) / 2**20
    print(f"{STREAMS} of 2 layers of width 1,024 in float32: {one * count:.0f} MiB over {count} tokens")
    kv.generated(adapter, prompt, STREAMS, max_new_tokens=2)
    print(f"  the process before: {peak():.0f} MiB")
    # A process's peak only grows, so what holds least comes first.
    ways = [(count // 4, "plain"), (count // 4, "last(64)"), (count // 4, "on disk"), (count, "on disk")]
    for length, way in [*ways, (count // 4, "in memory")]:
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            how = {"into": Path(folder) / "parts"} if way == "on disk" else {}
            how |= {"positions": way} if way == "last(64)" else {}
            if way == "plain":
                adapter.model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)
                print(f"  {length} tokens, plain generate: peak {peak():.0f} MiB")
                continue
            (text,) = kv.generated(adapter, prompt, STREAMS, max_new_tokens=length, **how)
            written = peak()
            rows = text["resid_post", 1]
            print(
                f"  {length} tokens, {way}: peak {written:.0f} MiB so far; {len(rows)} rows of a layer read: {peak():.0f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="real:smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--long", type=int, default=8192)
    given = parser.parse_args()
    if given.rounds:
        cost(given.model, given.rounds, given.new, given.dtype)
    if given.long:
        long(given.long)
