"""What `kvinterp audit MODEL --against FILE` takes with many sequences: time, its ratio to a plain loop, and peak memory.

    python benchmarks/rollouts_cost.py [--counts 16 64 256] [--length 512] [--model zoo:llama64-mini] [--dtype float16] [--threads 1]

Two engines made of our own model, one clean and one whose positions behind the prompt are one too high, give each count of
sequences; the second makes the audit try every cause. The plain loop is what a user would write: one forward of each sequence in
the engine's precision, and its log-probs. Each row is a process of its own, with one thread unless `--threads` says more. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kept import keep

ROOT = Path(__file__).parents[1]
ENGINES = ("clean", "position off by one")


def child(given: argparse.Namespace) -> None:
    """Writes the engine's file, judges it, and prints what it took."""
    import torch

    sys.path.append(str(ROOT / "tests" / "engines"))
    import planted
    from writing_given import write_given

    import kvinterp as kv
    from kvinterp.engines.judge import audit_engine
    from kvinterp.recording.engine_path import EnginePath

    torch.set_num_threads(given.threads)
    engine = planted.prefill if given.engine == "clean" else planted.FAULTS[given.engine][0]
    model, length, count = kv.load_model(given.model, kind="native", dtype="float32"), given.length, given.counts[0]
    text = [t for prompt in kv.load_prompts("natural:48") for t in model.encode(prompt.text)[1:]]
    # Each sequence begins elsewhere in the same prose, so that no two are the same.
    texts = [[model.tokenizer.bos_token_id, *(text * 2)[(97 * n) % len(text) :][: length - 1]] for n in range(count)]
    twin = model.at(getattr(torch, given.dtype)).model
    clock, process = time.perf_counter(), time.process_time()
    plain = [planted.prefill(twin, ids, length // 2) for ids in texts]
    loop = {"plain_seconds": time.perf_counter() - clock, "plain_processor_seconds": time.process_time() - process}
    rows = plain if given.engine == "clean" else [engine(twin, ids, length // 2) for ids in texts]
    paths = [
        EnginePath(str(n), tuple(ids[: length // 2]), tuple(ids[length // 2 :]), row)
        for n, (ids, row) in enumerate(zip(texts, rows, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = write_given(paths, Path(folder) / "rollouts.jsonl")
        del paths, rows, plain
        start, clock, process = _peak(), time.perf_counter(), time.process_time()
        found = audit_engine(model, file, declared=given.dtype)
        took = {"seconds": time.perf_counter() - clock, "processor_seconds": time.process_time() - process}
    ratio = took["processor_seconds"] / loop["plain_processor_seconds"]
    said = {"engine": given.engine, "sequences": count, "tokens": found.given["tokens"], "verdict": found.verdict}
    numbers = {**took, **loop, "ratio": ratio, "start_mib": start, "peak_mib": _peak()}
    print(json.dumps({**said, **{name: round(value, 2) for name, value in numbers.items()}}))


def _peak() -> int:
    """Peak of the resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Measures each count and engine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--model", default="zoo:llama64-mini")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        child(given)
        return
    from kvinterp.models.provenance import machine

    rows: list[dict[str, Any]] = []
    for count in given.counts:
        for engine in ENGINES:
            asked = [
                "--counts",
                count,
                "--length",
                given.length,
                "--model",
                given.model,
                "--dtype",
                given.dtype,
                "--threads",
                given.threads,
            ]
            command = [sys.executable, __file__, *map(str, asked), "--engine", engine]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise SystemExit(made.stderr[-3000:])
            rows.append(json.loads(made.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    about = {"model": given.model, "dtype": given.dtype, "length": given.length, "threads": given.threads}
    keep(ROOT / "benchmarks" / "results", "rollouts_cost", {"provenance": machine(), **about, "rows": rows})


if __name__ == "__main__":
    main()
