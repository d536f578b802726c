"""What an audit costs: its seconds and peak memory, as ratios to the forwards it must run.

    python benchmarks/audit.py [--models zoo:gqa2-mini zoo:mha-mini] [--out benchmarks/results]

Every measurement has a fresh process of its own, so that its peak memory is its own. There the model is loaded, the audit is
run once, and every forward of the model (in whatever precision and under whatever kernels) is counted with the number of rows,
new tokens and cached tokens it was given. Then plain forwards of the very same shapes and precisions, with the machine's own
kernels and without a hook, are timed: the median of a few for each shape, times how often the audit ran it. Ratios are of the
audit's seconds to those, and of its peak resident memory to that of a process that only loads the model and runs the longest of
the forwards. Part of the audit's time is not forwards: a fixed order of additions is many times slower than a kernel.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from kept import keep
from rich.console import Console
from rich.table import Table

WAYS = ("none", "default", "thorough")
MODELS = ("zoo:gqa2-mini", "zoo:mistral-mini")
REPEATED = 3


def peak_mib():
    """The process's peak resident memory so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10


def held(cache):
    """How many tokens a cache holds, or 0."""
    try:
        return int(cache.get_seq_length()) if cache is not None else 0
    except (AttributeError, NotImplementedError):
        return 0


def audited(name, checks):
    """One audit: seconds, verdict, and how often a forward of each shape was run."""
    import torch

    import kvinterp as kv

    torch.set_num_threads(1)
    adapter = kv.load_model(name, kind="native", dtype="float16", device="cpu")
    shapes = Counter()

    def count(module, args, kwargs):
        tokens = args[0] if args else kwargs["input_ids"]
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        shapes[(dtype, *tokens.shape, held(kwargs.get("past_key_values")))] += 1

    # A copy in another precision takes the hook along.
    handle = adapter.model.register_forward_pre_hook(count, with_kwargs=True)
    started = time.perf_counter()
    verdict = kv.audit(adapter, checks=checks)
    seconds = time.perf_counter() - started
    handle.remove()
    peak = peak_mib()
    found = {"seconds": seconds, "peak_mib": peak, "forwards": shapes.total(), "verdict": verdict.verdict}
    found["plain_seconds"] = sum(number * timed(adapter, *shape) for shape, number in shapes.items())
    return {**found, "longest": max(rows + past for _, _, rows, past in shapes), "provenance": _about(adapter)}


def timed(adapter, dtype, batch, rows, past):
    """Median seconds of a plain forward of one shape."""
    import torch

    model = _in(adapter, dtype)
    tokens = torch.randint(3, adapter.facts.vocabulary, (batch, past + rows))
    found = []
    with torch.no_grad():
        for _ in range(REPEATED):
            given = {}
            if past:
                given = {"past_key_values": model(input_ids=tokens[:, :past], use_cache=True).past_key_values}
            started = time.perf_counter()
            model(input_ids=tokens[:, past:], use_cache=bool(past), **given)
            found.append(time.perf_counter() - started)
    return statistics.median(found)


_COPIES = {}


def _in(adapter, dtype):
    import torch

    if dtype not in _COPIES:
        _COPIES[dtype] = adapter.cast(getattr(torch, dtype)).model
    return _COPIES[dtype]


def plain(name, longest):
    """Peak memory of loading the model and running one forward."""
    import torch

    import kvinterp as kv

    torch.set_num_threads(1)
    adapter = kv.load_model(name, kind="native", dtype="float16", device="cpu")
    with torch.no_grad():
        adapter.model(input_ids=torch.randint(3, adapter.facts.vocabulary, (1, longest)), use_cache=False)
    return {"peak_mib": peak_mib()}


def _about(adapter):
    from kvinterp.provenance import provenance

    return provenance(adapter)


def child(*arguments):
    """Runs this file again with these arguments, and reads what it prints last."""
    made = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True, check=True)
    return json.loads(made.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, name, argument = given.child
        print(json.dumps(audited(name, argument) if what == "audit" else plain(name, int(argument))))
        return
    rows, about = [], {}
    table = Table("model", "checks", "seconds", "forwards", "plain seconds", "ratio", "peak MiB", "plain MiB", "ratio")
    for name in given.models:
        for way in given.ways:
            found = child("--child", "audit", name, way)
            about = found.pop("provenance")
            base = child("--child", "plain", name, found["longest"])["peak_mib"]
            row = {
                "model": name,
                "checks": way,
                **found,
                "seconds_ratio": found["seconds"] / found["plain_seconds"],
                "plain_peak_mib": base,
                "peak_ratio": found["peak_mib"] / base,
            }
            rows.append(row)
            shown = ("seconds", "forwards", "plain_seconds", "seconds_ratio", "peak_mib", "plain_peak_mib", "peak_ratio")
            table.add_row(name, way, *(f"{row[key]:.3g}" for key in shown))
    Console().print(table)
    keep(given.out, "audit", {"repeated": REPEATED, "rows": rows, "provenance": about})


if __name__ == "__main__":
    main()
