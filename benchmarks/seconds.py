"""What a first answer costs, beside a plain script: `kvinterp compare`, and `assert_cache_consistent` on a tiny Llama.

    python benchmarks/seconds.py [--rounds 3] [--out benchmarks/results]

The plain script imports torch and transformers, loads the zoo's llama-mini in float16 and generates eight tokens for two prompts, with
and without a cache. Processor seconds of whole processes, imports and all, one thread; every round runs each once. Nothing here is a test.
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

PLAIN = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for text in ("1 + 1 =", "12 + 7 ="):
    for use_cache in (True, False):
        model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False, use_cache=use_cache)
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
    options = ["--prompts", "arithmetic:2", "--max-new-tokens", "8"]
    rounds = []
    for _ in range(given.rounds):
        plain, _ = processor("-c", PLAIN, str(folder))
        with tempfile.TemporaryDirectory() as out:
            compared, _ = processor("-m", "kvinterp", "compare", "zoo:llama-mini", *options, "--out", f"{out}/out")
        _, said = processor("-c", ASSERTED)
        imports, first, *later = json.loads(said)
        rounds.append({"plain script": plain, "compare": compared, "compare over plain": compared / plain, "imports of ours": imports,
                       "assert, first model": first, "assert, later models": max(later)})  # fmt: skip
        print({name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    print("\n| what | processor seconds, median | rounds |\n|---|---|---|")
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        print(f"| {name} | {statistics.median(values):.2f} | {', '.join(f'{value:.2f}' for value in values)} |")
    if given.out:
        keep(given.out, "seconds", {"rounds": rounds, "provenance": {**machine(), "rounds": given.rounds}})


if __name__ == "__main__":
    main()
