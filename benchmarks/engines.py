"""The bank of planted engine faults: what ``audit --against`` says of each, beside the thresholds in use.

    python benchmarks/engines.py [--tokens 64 1000] [--dtypes float32 float16 bfloat16] [--models zoo:llama64-mini] [--only NAME]

Three sets: the faults and clean engines that the rules were chosen beside (tests/given/planted.py), kinds of faults that they were
not (benchmarks/bugs/engine_faults.py), and recordings of engines that they were not (tests/given/recorded). A line a run is added to
benchmarks/results/engines.jsonl as it is made; what is there is not made again. The table is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "given"), str(ROOT / "benchmarks" / "bugs")]

import engine_faults  # noqa: E402
import planted  # noqa: E402

import kvinterp as kv  # noqa: E402
from kvinterp.auditing.given import audit_given, judge_given  # noqa: E402
from kvinterp.metrics.rollouts import rollout_statistics  # noqa: E402
from kvinterp.recording.given import GivenPath  # noqa: E402
from kvinterp.recording.readers import read_given  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "engines.jsonl"
LENGTH = 128
RECORDED = {"openvino-default": "bfloat16"}
"""The precision that a recorded engine stands on where it is not the one that it declares."""


RIGHT = {
    "rope 3% slow, in no list": ("RoPE frequencies times 0.97",),
    "eps 1e-6": ("norm eps times 0.1",),
    "temperature 0.9": ("temperature 0.9", "temperature 0.89"),
}
"""What is right to name, where the tests ask for it apart."""


def texts_of(model: Any, tokens: int) -> list[list[int]]:
    """So many tokens of prose in sequences of one length."""
    length = min(LENGTH, tokens + 1)
    count = max(1, -(-tokens // (length - 1)))
    text = [t for prompt in kv.load_prompts(f"natural:{8 + count}") for t in model.encode(prompt.text)[1:]]
    bos = model.tokenizer.bos_token_id
    text = (text * (1 + count * length // len(text)))[: count * (length - 1)]
    return [[bos, *text[n * (length - 1) : (n + 1) * (length - 1)]] for n in range(count)]


def thresholds(engine: np.ndarray, ours: np.ndarray, sequence: np.ndarray, dtype: str) -> dict[str, bool]:
    """What others would flag, the trainer being our own forward in the same dtype."""
    found = rollout_statistics(ours, engine, sequence)
    rtol, atol = {"float32": (1.3e-6, 1e-5), "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}[dtype]
    return {
        "nemo": found["token_mult_prob_error"] > 1.05,
        "verl": abs(found["k1"]) > 0.1 or found["chi2_token"] > 1 or found["rollout_is_eff_sample_size"] < 0.3,
        "allclose": not np.allclose(engine, ours, rtol=rtol, atol=atol),
    }


def made(
    model: Any, engine: Any, texts: list[list[int]], dtype: str
) -> tuple[list[GivenPath], np.ndarray, np.ndarray, np.ndarray]:
    """What an engine gives, and beside it our own forward of the same dtype."""
    twin, paths, ours, theirs, sequence = model.at(getattr(torch, dtype)).model, [], [], [], []
    for number, ids in enumerate(texts):
        cut = len(ids) // 2
        row = engine(twin, ids, cut)
        own = planted.prefill(twin, ids, cut)
        paths.append(GivenPath(f"{number}", tuple(ids[:cut]), tuple(ids[cut:]), row))
        ok = np.isfinite(row) & np.isfinite(own)
        ours.append(own[ok])
        theirs.append(row[ok])
        sequence.append(np.full(ok.sum(), number))
    return paths, np.concatenate(theirs), np.concatenate(ours), np.concatenate(sequence)


def cases() -> list[tuple[str, str, Any, tuple[str, ...]]]:
    """Set, name, engine, and what would be right to name."""
    seen = [("chosen beside", name, engine, RIGHT.get(name, (named,) if named else ()))
            for name, (engine, named) in planted.FAULTS.items()]  # fmt: skip
    new = [("kinds held out", name, *what) for name, what in engine_faults.FAULTS.items()]
    return [*(("clean, ours", name, engine, ()) for name, engine in planted.CLEAN.items()), *seen, *new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 1000])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--models", nargs="+", default=["zoo:llama64-mini"])
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    OUT.touch()
    rows = [json.loads(line) for line in OUT.read_text().splitlines()]
    done = {(r["set"], r["case"], r["model"], r["dtype"], r["tokens"]) for r in rows}
    for name in given.models:
        model = kv.load_model(name, kind="native", dtype="float32")
        for file in sorted((ROOT / "tests" / "given" / "recorded").glob("*.jsonl")) if "llama64" in name else []:
            engine, _, dtype = file.stem.partition("_")
            about = ("engines held out", file.stem, name, dtype, 0)
            if engine == "llama64-mini" or about in done or given.only not in file.stem:
                continue
            begun, found = time.perf_counter(), audit_given(model, file)
            paths = read_given(file)
            ours = np.concatenate(
                [planted.prefill(model.at(getattr(torch, dtype)).model, list(p.ids), 0)[1:] for p in paths]
            )
            theirs = np.concatenate([p.chosen[1:] for p in paths])
            flags = thresholds(theirs, ours, np.repeat(np.arange(len(paths)), [len(p.ids) - 1 for p in paths]), dtype)
            rows.append(kept(about, found, (RECORDED[engine],) if engine in RECORDED else (), flags, begun))
        for (kind, case, engine, right), dtype, tokens in (
            (c, d, n) for n in given.tokens for d in given.dtypes for c in cases()
        ):
            about = (kind, case, name, dtype, tokens)
            if about in done or given.only not in case:
                continue
            begun = time.perf_counter()
            paths, theirs, ours, sequence = made(model, engine, texts_of(model, tokens), dtype)
            found = judge_given(model, paths, dtype)
            rows.append(kept(about, found, right, thresholds(theirs, ours, sequence, dtype), begun))
    print(table(rows).to_string())


def kept(
    about: tuple[Any, ...], found: Any, right: tuple[str, ...], flags: dict[str, bool], begun: float
) -> dict[str, Any]:
    """A line of the results."""
    why = found.reading.splitlines()[1].strip()
    row = dict(zip(("set", "case", "model", "dtype", "tokens"), about, strict=True))
    row |= {"verdict": found.verdict, "exit_code": found.exit_code, "why": why, "n": found.given["tokens"]}
    row |= {"named": bool(right) and any(word in why for word in right), "may_name": list(right)}
    row |= {name: bool(value) for name, value in flags.items()}
    row["seconds"] = round(time.perf_counter() - begun, 1)
    with OUT.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{row['set']:<17}{row['case']:<34}{row['dtype']:<9}{row['tokens']:>6}  {row['verdict']:<12}{why[:110]}", flush=True
    )
    return row


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Of each set, dtype and number of tokens how many did not pass, were named, were named wrongly, and were flagged by others."""
    every = pd.DataFrame(rows)
    causes = every["verdict"].isin(["policy", "bug", "kernel", "processed", "misaligned", "wrong-dtype"])
    every = every.assign(
        not_passed=every["exit_code"] != 0, fails=every["exit_code"] == 1, named_wrongly=causes & ~every["named"],
        may_be_named=every["may_name"].map(bool),
    )  # fmt: skip
    counts = ["not_passed", "fails", "may_be_named", "named", "named_wrongly", "nemo", "verl", "allclose"]
    groups = every.groupby(["model", "set", "dtype", "tokens"])
    return groups[counts].sum().assign(runs=groups.size())[["runs", *counts]]


if __name__ == "__main__":
    main()
