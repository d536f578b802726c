"""What an audit costs: its seconds and peak memory, as ratios to the forwards it must run.

    python benchmarks/audit.py [--models zoo:gqa2-mini zoo:mqa-mini] [--ways none default thorough] [--out benchmarks/results]

Every audit has a fresh process of its own, so that its peak memory is its own. There the model is loaded, the audit is run once,
and every forward of the model (in whatever precision and under whatever kernels) is counted with the number of rows, new tokens
and cached tokens it was given. One more process a model times plain forwards of the very same shapes and precisions, with the
machine's own kernels and without a hook, once for all of the model's audits: the median of a few for each shape, of longer ones a
single one, times how often the audit ran it. Tokens that come one by one are timed along a cache that grows, as in a plain
decoding loop. Ratios are of the audit's seconds to those, and of its peak resident memory to that of a process that only loads the
model and runs the longest of the forwards. Seconds are the processor's, in one thread: what a clock shows where nothing else runs,
and what it does not show on a busy machine; the clock's stand in the file as wall_seconds. Part of the audit's time is not forwards: a fixed order of additions is many times
slower than a kernel.

Two models with the default checks take three to four minutes on two idle cores; what runs is said as it runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from kept import keep
from rich.console import Console
from rich.table import Table

WAYS = ("none", "default", "thorough")
MODELS = ("zoo:gqa2-mini", "zoo:mistral-mini")
REPEATED = 3

LONG = 256
"""Forwards of more new tokens than these are timed once: they take so long that one says enough."""

GAP = 32
"""Between cached lengths further apart than these a prompt is fed anew in place of single tokens."""


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
    started, working = time.perf_counter(), time.process_time()
    verdict = kv.audit(
        adapter, checks=checks, progress=lambda what: said(f"audit of {name}, checks={checks}: {what}", started)
    )
    spent = {"seconds": time.process_time() - working, "wall_seconds": time.perf_counter() - started}
    handle.remove()
    found = {**spent, "peak_mib": peak_mib(), "forwards": shapes.total(), "verdict": verdict.verdict}
    return {**found, "shapes": [[*shape, number] for shape, number in shapes.items()], "provenance": _about(adapter)}


def said(what, started):
    """Says on the terminal what runs, and for how long this process has."""
    print(f"{time.perf_counter() - started:6.0f} s  {what}", file=sys.stderr, flush=True)


def timed(name, shapes):
    """Median seconds of a plain forward of each shape, in the order of the shapes."""
    import torch

    import kvinterp as kv

    torch.set_num_threads(1)
    adapter = kv.load_model(name, kind="native", dtype="float16", device="cpu")
    started, found = time.perf_counter(), defaultdict(list)
    with torch.no_grad():
        for dtype, batch in sorted({(dtype, batch) for dtype, batch, *_ in shapes}):
            here = [(new, past) for d, b, new, past in shapes if (d, b) == (dtype, batch)]
            said(f"plain forwards of {name}, {dtype}, {batch} at once: {len(here)} shapes", started)
            lasting = max(new + past for new, past in here)
            timer = Timer(_in(adapter, dtype), torch.randint(3, adapter.facts.vocabulary, (batch, lasting)))
            singly = [past for new, past in here if new == 1 and past]
            for new, past in [shape for shape in here if shape[0] > 1 or not shape[1]]:
                found[dtype, batch, new, past] = [timer.at_once(new, past) for _ in range(1 if new > LONG else REPEATED)]
            for past, seconds in [pair for _ in range(REPEATED) for pair in timer.one_by_one(singly)]:
                found[dtype, batch, 1, past].append(seconds)
    return [statistics.median(found[tuple(shape)]) for shape in shapes]


class Timer:
    """Plain forwards of one model, on the same tokens."""

    def __init__(self, model, tokens):
        self.model, self.tokens = model, tokens
        self.fed(0, 1, None)  # The first forward of all sets up what the others find ready.

    def fed(self, start, stop, cache):
        """Feeds some of the tokens on a cache, and returns the cache."""
        return self.model(input_ids=self.tokens[:, start:stop], use_cache=True, past_key_values=cache).past_key_values

    def at_once(self, new, past):
        """Seconds of so many new tokens on a cache of so many."""
        given = {"past_key_values": self.fed(0, past, None)} if past else {}
        started = time.process_time()
        self.model(input_ids=self.tokens[:, past : past + new], use_cache=bool(past), **given)
        return time.process_time() - started

    def one_by_one(self, lengths):
        """Seconds of a single token on a cache of each of these lengths, along one that grows."""
        cache, at = None, 0
        for past in sorted(lengths):
            if cache is None or past - at > GAP:
                cache, at = self.fed(0, past, None), past
            while at <= past:
                started = time.process_time()
                cache = self.fed(at, at + 1, cache)
                seconds, at = time.process_time() - started, at + 1
            yield past, seconds


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
    from kvinterp.models.provenance import provenance

    return provenance(adapter)


def child(what, given):
    """Runs this file again for one measurement, and reads what it prints last; what it says of its progress is shown."""
    command = [sys.executable, __file__, "--child", what]
    made = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(made.stdout.splitlines()[-1])


CHILDREN = {"audit": audited, "timed": timed, "plain": plain}


def measured(name, ways):
    """A row for each way of auditing one model."""
    rows = []
    audits = {way: child("audit", [name, way]) for way in ways}
    shapes = sorted({tuple(shape[:-1]) for found in audits.values() for shape in found["shapes"]})
    seconds = dict(zip(shapes, child("timed", [name, shapes]), strict=True))
    for way, found in audits.items():
        counted = {tuple(shape): number for *shape, number in found.pop("shapes")}
        took = sum(number * seconds[shape] for shape, number in counted.items())
        longest = max(new + past for _, _, new, past in counted)
        base = child("plain", [name, longest])["peak_mib"]
        row = {"model": name, "checks": way, **found, "plain_seconds": took, "longest": longest, "plain_peak_mib": base}
        rows.append({**row, "seconds_ratio": found["seconds"] / took, "peak_ratio": found["peak_mib"] / base})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=["default"], choices=WAYS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(CHILDREN[given.child](*json.load(sys.stdin))))
        return
    rows = []
    table = Table("model", "checks", "seconds", "forwards", "plain seconds", "ratio", "peak MiB", "plain MiB", "ratio")
    shown = ("seconds", "forwards", "plain_seconds", "seconds_ratio", "peak_mib", "plain_peak_mib", "peak_ratio")
    for name in given.models:
        measurements = measured(name, given.ways)
        rows += measurements
        for row in measurements:
            table.add_row(name, row["checks"], *(f"{row[key]:.3g}" for key in shown))
    Console().print(table)
    keep(given.out, "audit", {"repeated": REPEATED, "rows": rows, "provenance": rows[-1]["provenance"]})


if __name__ == "__main__":
    main()
