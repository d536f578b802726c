"""The bank of planted engine faults: what ``audit --against`` says of each, beside the thresholds in use.

    python benchmarks/engines.py [--tokens 64 1000] [--dtypes float32 float16 bfloat16] [--models zoo:llama64-mini] [--only NAME]

Three sets: the faults and clean engines that the rules were chosen beside (tests/engines/planted.py), kinds of faults that they were
not (benchmarks/bugs/engine_faults.py), and recordings of engines that they were not (tests/engines/recorded). A line a run is added to
benchmarks/results/engines.jsonl as it is made; what is there is not made again. The tables are printed at the end, with exact
(Clopper-Pearson) intervals; --tables prints them of what is there.
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
import scipy.stats
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "engines"), str(ROOT / "benchmarks" / "bugs")]

import engine_faults  # noqa: E402
import planted  # noqa: E402

import kvinterp as kv  # noqa: E402
from kvinterp.engines.judge import audit_engine  # noqa: E402
from kvinterp.engines.readers import read_engine  # noqa: E402
from kvinterp.metrics.rollouts import rollout_statistics  # noqa: E402
from kvinterp.recording.engine_path import EnginePath  # noqa: E402

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
    """So many tokens of prose in sequences of one length; where there is too little of it, again from another place on."""
    length = min(LENGTH, tokens + 1)
    count = max(1, -(-tokens // (length - 1)))
    text = [t for prompt in kv.load_prompts(f"natural:{min(48, 8 + count)}") for t in model.encode(prompt.text)[1:]]
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


BEST: list[torch.Tensor] = []
"""Of what an engine computed last the likeliest tokens, for those who compare these alone."""


def watched(chosen: Any) -> Any:
    """``chosen`` of the planted engines, of which the likeliest tokens are kept too."""

    def watching(logits: torch.Tensor, ids: list[int]) -> np.ndarray:
        BEST.append(logits.argmax(-1))
        return chosen(logits, ids)

    return watching


planted.chosen, engine_faults.chosen = watched(planted.chosen), watched(engine_faults.chosen)


def made(model: Any, engine: Any, texts: list[list[int]], dtype: str) -> tuple[list[EnginePath], dict[str, bool]]:
    """What an engine gives, and what others flag beside our own forward of the same dtype."""
    twin, paths, ours, theirs, sequence = model.at(getattr(torch, dtype)).model, [], [], [], []
    others = 0
    for number, ids in enumerate(texts):
        cut = len(ids) // 2
        row = engine(twin, ids, cut)
        best = BEST[-1][: len(ids)]
        own = planted.prefill(twin, ids, cut)
        # An engine without the BOS begins a token later.
        others += int((best != BEST[-1][-len(best) :]).sum())
        paths.append(EnginePath(f"{number}", tuple(ids[:cut]), tuple(ids[cut:]), row))
        ok = np.isfinite(row) & np.isfinite(own)
        ours.append(own[ok])
        theirs.append(row[ok])
        sequence.append(np.full(ok.sum(), number))
        BEST.clear()
    flags = thresholds(*map(np.concatenate, (theirs, ours, sequence)), dtype)
    return paths, {**flags, "top1": others > 0}


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
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and run nothing")
    parser.add_argument("--flags", action="store_true", help="also what others flag, of rows without it")
    given = parser.parse_args()
    OUT.touch()
    rows = [json.loads(line) for line in OUT.read_text().splitlines()]
    if given.tables:
        print(table(rows))
        return
    done = {(r["set"], r["case"], r["model"], r["dtype"], r["tokens"]) for r in rows}
    for name in given.models:
        model = kv.load_model(name, kind="native", dtype="float32")
        for file in sorted((ROOT / "tests" / "engines" / "recorded").glob("*.jsonl")) if "llama64" in name else []:
            engine, _, dtype = file.stem.partition("_")
            about = ("engines held out", file.stem, name, dtype, 0)
            if engine == "llama64-mini" or about in done or given.only not in file.stem:
                continue
            begun, found = time.perf_counter(), audit_engine(model, file, declared=dtype)
            paths = read_engine(file)
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
            paths, flags = made(model, engine, texts_of(model, tokens), dtype)
            rows.append(kept(about, audit_engine(model, paths, dtype), right, flags, begun))
        if given.flags:
            again(model, name, rows)
    print(table(rows))


def again(model: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """What others flag, of the rows that were made before it was kept; nothing is judged."""
    every = {case: engine for _, case, engine, _ in cases()}
    for row in rows:
        if "top1" not in row and row["model"] == name and row["case"] in every:
            row |= made(model, every[row["case"]], texts_of(model, row["tokens"]), row["dtype"])[1]
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kept(
    about: tuple[Any, ...], found: Any, right: tuple[str, ...], flags: dict[str, bool], begun: float
) -> dict[str, Any]:
    """A line of the results."""
    why = found.reading.splitlines()[1].strip()
    row = dict(zip(("set", "case", "model", "dtype", "tokens"), about, strict=True))
    row |= {"verdict": found.verdict, "exit_code": found.exit_code, "why": why, "n": found.given["tokens"]}
    row["begins"] = found.given.get("begins")
    row |= {"named": bool(right) and any(word in why for word in right), "may_name": list(right)}
    row |= {name: bool(value) for name, value in flags.items()}
    row["seconds"] = round(time.perf_counter() - begun, 1)
    with OUT.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{row['set']:<17}{row['case']:<34}{row['dtype']:<9}{row['tokens']:>6}  {row['verdict']:<12}{why[:110]}", flush=True
    )
    return row


BEHIND = ("position off", "repeated", "prefix", "a cached row", "another request", "half pace")
"""Faults that begin behind the prompt, of which a place can be right."""
CAUSES = ("policy", "bug", "kernel", "processed", "misaligned", "wrong-dtype")


def share(part: pd.Series) -> str:
    """How many of how many, with 95% (Clopper-Pearson)."""
    part = part.dropna().astype(bool)
    if not len(part):
        return "-"
    low, high = scipy.stats.binomtest(int(part.sum()), len(part)).proportion_ci(method="exact")
    return f"{part.sum()} of {len(part)} ({low:.0%} to {high:.0%})"


def table(rows: list[dict[str, Any]]) -> str:
    """By set, dtype and tokens: what was not passed, named, placed, and what others flag."""
    every = pd.DataFrame(rows)
    every["asked"] = every["may_name"].map(bool)
    behind = every["case"].map(lambda case: any(word in case for word in BEHIND)) & every.get("begins", np.nan).notna()
    half = (np.minimum(LENGTH, every["tokens"] + 1) // 2).astype(float)
    lines = []
    for about, some in every.groupby(["model", "set", "dtype", "tokens"]):
        fails, judged = some["exit_code"] == 1, some[some["asked"]]
        place = (some["begins"] - half[some.index]).abs()[behind[some.index]] <= 8
        found = {
            "not passed": some["exit_code"] != 0, "failed": fails, "named, where a word is right": judged["named"],
            "named wrongly": some["verdict"].isin(CAUSES) & ~some["named"], "place within 8": place,
            **{name: some.get(name, pd.Series(dtype=object)) for name in ("nemo", "verl", "allclose", "top1")},
        }  # fmt: skip
        lines.append(
            {
                **dict(zip(("model", "set", "dtype", "tokens"), about, strict=True)),
                **{n: share(v) for n, v in found.items()},
            }
        )
    head = lines[0]
    return "\n".join(
        [
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *("| " + " | ".join(map(str, line.values())) + " |" for line in lines),
        ]
    )


if __name__ == "__main__":
    main()
