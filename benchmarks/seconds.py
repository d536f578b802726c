"""What a first answer costs, beside a plain script: `kvinterp compare`, `patch` and `attention`, and `assert_cache_consistent`.

    python benchmarks/seconds.py [--rounds 3] [--out benchmarks/results]

The plain scripts import torch and transformers and load the zoo's llama-mini in float16. One generates eight tokens for two prompts, with
and without a cache; one decodes these from a cache, recomputes each step, and lays the recomputed keys and values of the first layer, the
first two, ... into a copy of the cache; one takes the attention of one step along both paths and each head's KL. None writes a table or
a page. Processor seconds of whole processes, imports and all, one thread; every round runs each once. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kept import keep

from kvinterp.common.source import file_of
from kvinterp.models.provenance import machine

LOADED = """
import copy, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
def divergence(a, b):
    a, b = a.float().log_softmax(-1), b.float().log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1))
"""
GENERATED = """
for text in ("1 + 1 =", "12 + 7 ="):
    for use_cache in (True, False):
        model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False, use_cache=use_cache)
"""
PATCHED = """
with torch.no_grad():
    for text in ("1 + 1 =", "12 + 7 ="):
        row = ids = tokenizer(text, return_tensors="pt").input_ids
        cache = DynamicCache(config=model.config)
        for step in range(8):
            before, rebuilt = copy.deepcopy(cache), DynamicCache(config=model.config)
            cached = model(row, past_key_values=cache).logits[:, -1]
            recomputed = model(ids, past_key_values=rebuilt).logits[:, -1]
            for last in range(model.config.num_hidden_layers if step else 0):
                mixed = copy.deepcopy(before)
                for layer in range(last + 1):
                    mine, other, length = mixed.layers[layer], rebuilt.layers[layer], before.get_seq_length()
                    mine.keys, mine.values = other.keys[:, :, :length], other.values[:, :, :length]
                patched = model(row, past_key_values=mixed).logits[:, -1]
                print(step, last, float((patched - recomputed).norm()), divergence(recomputed, patched))
            row = recomputed.argmax(-1, keepdim=True)
            ids = torch.cat([ids, row], 1)
"""
ATTENDED = """
model.set_attn_implementation("eager")
with torch.no_grad():
    row = ids = tokenizer("12 + 7 =", return_tensors="pt").input_ids
    cache = DynamicCache(config=model.config)
    for step in range(5):
        cached = model(row, past_key_values=cache, output_attentions=True)
        row = cached.logits[:, -1].argmax(-1, keepdim=True)
        whole, ids = ids, torch.cat([ids, row], 1)
    recomputed = model(whole, output_attentions=True)
    for layer, (one, other) in enumerate(zip(cached.attentions, recomputed.attentions)):
        for head in range(one.shape[1]):
            a, b = one[0, head, -1].float(), other[0, head, -1].float()
            print(layer, head, float((a * (a / b).log()).nansum()))
"""
ASSERTED = """
import json, time, torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
def built(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99 + seed, max_position_embeddings=128, **sizes))
models = [built(seed) for seed in range(3)]
times = [time.process_time()]
from kvinterp.testing import assert_cache_consistent
times.append(time.process_time())
for model in models:
    assert_cache_consistent(model)
    times.append(time.process_time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""


def processor(*command):
    """Processor seconds of a process and its children, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, made.stdout


def main():
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--out", type=Path)
    given = asked.parse_args()
    folder = file_of("kvinterp.models.zoo").parent / "llama-mini"
    two = ["--prompts", "arithmetic:2", "--max-new-tokens", "8"]
    verbs = {"compare": (GENERATED, two), "patch": (PATCHED, two), "attention": (ATTENDED, ["--prompts", "arithmetic:1"])}
    rounds = []
    for _ in range(given.rounds):
        row = {}
        for verb, (script, options) in verbs.items():
            plain, _ = processor("-c", LOADED + script, str(folder))
            with tempfile.TemporaryDirectory() as out:
                ours, _ = processor("-m", "kvinterp", verb, "zoo:llama-mini", *options, "--out", f"{out}/out")
            row |= {f"{verb}, plain script": plain, verb: ours, f"{verb} over plain": ours / plain}
        _, said = processor("-c", ASSERTED)
        imports, first, *later = json.loads(said)
        rounds.append(row | {"imports of ours": imports, "assert, first model": first, "assert, later models": max(later)})
        print({name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    print("\n| what | processor seconds, median | rounds |\n|---|---|---|")
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        print(f"| {name} | {statistics.median(values):.2f} | {', '.join(f'{value:.2f}' for value in values)} |")
    if given.out:
        keep(given.out, "seconds", {"rounds": rounds, "provenance": {**machine(), "rounds": given.rounds}})


if __name__ == "__main__":
    main()
