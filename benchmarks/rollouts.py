"""The bank of mismatch files: 40 planted faults, 20 sound engines, and what `kvinterp audit MODEL --against FILE` says of each.

    python benchmarks/rollouts.py [--only NAME] [--model zoo:llama64-mini] [--size large] [--tables]

Each file has six sampled rollouts of one model, written by an engine that is made of it by hand (below, in
tests/engines/planted.py and, by a writer who had not read the judge's causes, in benchmarks/bugs/rollout_faults.py), each fault in
two sizes: large, and near the null of its precision.
Asked is whether line 1 says the right tokens and line 2 the cause, that no sound file fails, and what it takes. A line a file is
added to benchmarks/results/rollouts.jsonl as it is judged; what is there is not judged again. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "engines"), str(ROOT / "benchmarks" / "bugs")]

import planted  # noqa: E402
import rollout_faults  # noqa: E402
from writing_given import write_given  # noqa: E402

import kvinterp as kv  # noqa: E402
from kvinterp.engines.judge import audit_engine  # noqa: E402
from kvinterp.recording.engine_path import EnginePath  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "rollouts.jsonl"
LLAMA, GEMMA = "zoo:llama64-mini", "zoo:gemma2-mini"
COUNT, PROMPT, REPLY = 6, 48, 80

Rows = Callable[[Any, list[list[int]], int], list[np.ndarray]]
"""Of a transformers model, texts and the length of their prompts: for each ``[position]``, log-probs."""


@dataclasses.dataclass(frozen=True)
class File:
    """One file of the bank.

    Attributes:
        name: What is planted, and its size.
        rows: What the engine gives.
        dtype: What it computes in.
        said: A pattern of the cause in the sentence; empty for a sound engine.
        place: A pattern of the tokens in line 1.
        model: Of which model.
    """

    name: str
    rows: Rows
    dtype: str
    said: str = ""
    place: str = ""
    model: str = LLAMA


# Engines ---------------------------------------------------------------------------------------------------------------


def each(engine: planted.Engine) -> Rows:
    """An engine that computes each text alone."""
    return lambda model, texts, cut: [engine(model, ids, cut) for ids in texts]


def among(numbers: set[int], fault: planted.Engine, sound: planted.Engine = planted.prefill) -> Rows:
    """An engine that is wrong in some sequences alone."""
    return lambda model, texts, cut: [(fault if n in numbers else sound)(model, ids, cut) for n, ids in enumerate(texts)]


def held(made: Callable[[Tensor], Tensor]) -> planted.Engine:
    """An engine whose cache holds keys and values otherwise, from the first token on."""

    class Cache(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
            return super().update(made(keys), made(values), *args, **more)

    @torch.no_grad()
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        cache = Cache()
        parts = [model(torch.tensor([piece]), past_key_values=cache).logits[0] for piece in (ids[:cut], ids[cut:])]
        return planted.chosen(torch.cat(parts), ids)

    return engine


def fp8(dtype: torch.dtype) -> planted.Engine:
    most = torch.finfo(dtype).max
    return held(lambda x: x.clamp(-most, most).to(dtype).to(x.dtype))


def int8(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((x.float() / scale).round() * scale).to(x.dtype)


def windowed(size: int | None) -> planted.Engine:
    """Another window than the model's in its sliding layers, or one where it has none."""

    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(model)
        base = wrong.model
        if not getattr(wrong.config, "sliding_window", None):
            at = torch.arange(len(ids))
            hidden = (at[None] > at[:, None]) | (at[:, None] - at[None] >= (size or len(ids)))
            mask = torch.zeros(len(ids), len(ids), dtype=base.embed_tokens.weight.dtype).masked_fill(hidden, -torch.inf)
            with torch.no_grad():
                return planted.chosen(wrong(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0], ids)
        wrong.config.sliding_window = size or 4096
        return planted.prefill(wrong, ids, cut)

    return engine


def base(size: float) -> planted.Engine:
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(model)
        own = wrong.model.rotary_emb.inv_freq
        own.mul_(size ** -(torch.arange(len(own)) / len(own)).to(own))
        return planted.prefill(wrong, ids, cut)

    return engine


def penalised(repetition: float = 1.0, presence: float = 0.0) -> planted.Engine:
    @torch.no_grad()
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        logits = model(torch.tensor([ids])).logits[0].double()
        for at in range(len(ids) - 1):
            row, seen = logits[at], sorted(set(ids[: at + 1]))
            row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
            row[sorted(set(ids[cut : at + 1]))] -= presence
        found = planted.chosen(logits, ids)
        found[:cut] = np.nan
        return found

    return engine


def top_p(share: float) -> planted.Engine:
    @torch.no_grad()
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        logits = model(torch.tensor([ids])).logits[0].double()
        order = logits.softmax(-1).sort(-1, descending=True)
        keep = order.values.cumsum(-1) - order.values < share
        logits = logits.masked_fill(~torch.zeros_like(keep).scatter(1, order.indices, keep), -torch.inf)
        found = planted.chosen(logits, ids)
        return np.where(np.isfinite(found), found, np.nan)

    return engine


def head_missing(share: float) -> Rows:
    """The prompt's log-probs lack what an adapter adds to the head; the reply has no such fault."""

    def rows(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
        other = copy.deepcopy(model)
        other.lm_head.weight = torch.nn.Parameter(_noisy(model.lm_head.weight, share))
        right, wrong = (each(planted.prefill)(m, texts, cut) for m in (model, other))
        return [np.concatenate([b[:cut], a[cut:]]) for a, b in zip(right, wrong, strict=True)]

    return rows


def _noisy(weight: Tensor, share: float) -> Tensor:
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return (weight.float() + share * weight.float().std() * noise).to(weight.dtype)


def neighbours(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
    """Two texts a row without a mask: the second of each sees the first."""
    found = []
    for number, ids in enumerate(texts):
        before = texts[number - 1] if number % 2 else []
        found.append(np.r_[np.nan, planted.prefill(model, [*before, *ids], cut)[len(before) + 1 :]])
    return found


@torch.no_grad()
def beside(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
    """All texts in one batch."""
    logits = model(torch.tensor(texts)).logits
    return [planted.chosen(row, ids) for row, ids in zip(logits, texts, strict=True)]


def merged(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
    """An adapter that is merged and taken out again: its rounding alone is left."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, torch.nn.Linear) and module is not getattr(other, "lm_head", None):
            delta = 0.01 * _noisy(torch.zeros_like(module.weight) + 1e-9 * module.weight, 1.0)
            module.weight.data += delta
            module.weight.data -= delta
    return each(planted.prefill)(other, texts, cut)


def eager(model: Any, texts: list[list[int]], cut: int) -> list[np.ndarray]:
    """Another attention kernel."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return each(planted.prefill)(other, texts, cut)


# The bank --------------------------------------------------------------------------------------------------------------

EVERY = "all 6 sequences are off"
REPLIES = "from their first generated token on|from position 4[89]|from generated token [12] "


def faults() -> Iterator[File]:
    """Yields every fault in two sizes."""

    def two(name: str, large: Rows, small: Rows | None, said: str, place: str, model: str = LLAMA,
            dtypes: tuple[str, str] = ("float32", "bfloat16")) -> Iterator[File]:  # fmt: skip
        yield File(f"{name}, large", large, dtypes[0], said, place, model)
        yield File(f"{name}, near the null", small or large, dtypes[1], said, place, model)

    yield from two("fp8 e4m3 cache", each(fp8(torch.float8_e4m3fn)), None, r"fp8\(e4m3", EVERY)
    yield from two("fp8 e5m2 cache", each(fp8(torch.float8_e5m2)), None, r"fp8\(e5m2", EVERY)
    yield from two("fp8 cache of gemma", each(fp8(torch.float8_e4m3fn)), None, r"fp8\(e4m3", EVERY, GEMMA)
    yield from two("int8 cache", each(held(int8)), None, "int8 cache", EVERY, dtypes=("float32", "float16"))
    yield from two("q8_0 prefix", each(planted.quantised(8)), None, "q8_0", REPLIES, dtypes=("float32", "float16"))
    yield from two("q4_0 prefix", each(planted.quantised(4)), None, "q4_0", REPLIES)
    yield from two("window ignored", each(windowed(None)), None, "window", "from position 3[0-9]", GEMMA)
    yield from two("window one too long", each(windowed(33)), None, "window", "from position 3[0-9]", GEMMA)
    yield from two("a window of 64", each(windowed(64)), None, "window of 64", "from position 6[0-9]")
    yield from two("rope", each(planted.rope(0.5)), each(planted.rope(0.99)), "RoPE", EVERY)
    yield from two("rope base", each(base(10.0)), each(base(1.05)), "RoPE", EVERY)
    yield from two("position off by one", each(planted.position_off), None, r"positions \+1", REPLIES)
    yield from two("no BOS", each(planted.no_bos), None, "BOS", EVERY)
    yield from two("temperature", each(planted.warm(0.7)), each(planted.warm(0.97)), "temperature 0.(7|69|97)", EVERY)
    yield from two("top-k", each(planted.top_k(10)), each(planted.top_k(50)), "top_k", EVERY)
    yield from two("top-p", each(top_p(0.9)), each(top_p(0.95)), "top_p", EVERY)
    yield from two("repetition penalty", each(penalised(1.2)), each(penalised(1.03)), "repetition_penalty", EVERY)
    yield from two("some requests shifted", among({1, 4}, planted.shifted), None, "shifted", "sequences 2 and 5 of 6")
    yield from two("a head without its adapter", head_missing(0.5), head_missing(0.1), "", "prompt tokens alone")
    yield from two("packed neighbours", neighbours, None, "packed", "every second sequence|sequences 2, 4 and 6")


def sound() -> Iterator[File]:
    """Yields engines that have no fault."""
    for model in (LLAMA, GEMMA):
        engines = {"prefill": each(planted.prefill), "decode": each(planted.decode), "chunked": each(planted.chunked),
                   "other batch": beside, "other kernel": eager}  # fmt: skip
        for name, rows in engines.items():
            dtype = {"prefill": "float16", "decode": "bfloat16", "chunked": "float32", "other batch": "bfloat16"}.get(name)
            yield File(f"sound {name} of {model}", rows, dtype or "float32", model=model)
        yield File(f"sound decode in float32 of {model}", each(planted.decode), "float32", model=model)
        yield File(f"sound chunked in bfloat16 of {model}", each(planted.chunked), "bfloat16", model=model)
        yield File(f"sound eager in bfloat16 of {model}", eager, "bfloat16", model=model)
        yield File(f"sound merged adapter of {model}", merged, "bfloat16", model=model)
        yield File(f"sound other batch in float16 of {model}", beside, "float16", model=model)


def files() -> list[File]:
    """The bank: 40 faults and 20 sound engines, and those of a writer who had not read the judge's causes."""
    return [*faults(), *sound(), *rollout_faults.files(File)]


# What is asked ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sampled(adapter: Any) -> list[list[int]]:
    """Rollouts at temperature 1 behind prompts of one length."""
    texts = []
    for number, prompt in enumerate(kv.load_prompts(f"natural:{COUNT}")):
        ids = (list(adapter.encode(prompt.text)) * 8)[:PROMPT]
        draw = torch.Generator().manual_seed(number)
        for _ in range(REPLY):
            p = adapter.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
            ids.append(int(torch.multinomial(p, 1, generator=draw)))
        texts.append(ids)
    return texts


def judged(file: File) -> dict[str, Any]:
    """Writes a file, judges it, and says what was right."""
    adapter = kv.load_model(file.model, kind="native", dtype="float32")
    texts = sampled(adapter)
    rows = file.rows(copy.deepcopy(adapter.at(getattr(torch, file.dtype)).model), texts, PROMPT)
    paths = [EnginePath(f"{n}", tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), row)
             for n, (ids, row) in enumerate(zip(texts, rows, strict=True))]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        written = write_given(paths, Path(folder) / "rollouts.jsonl")
        start = time.perf_counter()
        found = audit_engine(adapter, written, file.dtype)
    first, why, *_ = found.reading.splitlines()
    return {
        "name": file.name, "model": file.model, "dtype": file.dtype, "exit": found.exit_code, "verdict": found.verdict,
        "named": bool(file.said) and found.exit_code == 1 and bool(re.search(file.said, why)),
        "place": bool(file.place) and found.exit_code == 1 and bool(re.search(file.place, first)),
        "asked": [bool(file.said), bool(file.place)],
        "line_1": first, "line_2": why.strip(), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def tables(rows: list[dict[str, Any]]) -> None:
    """Prints the counts."""
    say = Console(width=160).print
    for kind in ("large", "near the null"):
        some = [row for row in rows if row["name"].endswith(kind)]
        for what, at in {"cause named": ("named", 0), "tokens right": ("place", 1)}.items():
            asked = [row for row in some if row["asked"][at[1]]]
            say(
                f"{kind}: {what} in {sum(row[at[0]] for row in asked)} of {len(asked)}; "
                f"cannot tell in {sum(row['exit'] == 3 for row in asked)}, passed {sum(row['exit'] == 0 for row in asked)}"
            )
    fine = [row for row in rows if row["name"].startswith("sound")]
    say(
        f"sound: failed {sum(row['exit'] == 1 for row in fine)}, cannot tell {sum(row['exit'] == 3 for row in fine)} of {len(fine)}"
    )
    for row in rows:
        wrong = (
            row["exit"] != 0
            if row["name"].startswith("sound")
            else not (row["named"] or not row["asked"][0]) or not row["place"]
        )
        if wrong:
            say(
                f"- {row['name']}: {row['line_1'][:60]} ... {row['line_1'].partition(': ')[2]} | {row['line_2'][:150]}",
                markup=False,
            )


def main() -> None:
    """Judges what was not judged yet, and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="a part of a file's name")
    parser.add_argument("--model", default="", help="files of this model alone")
    parser.add_argument("--size", default="", help="large, near or sound")
    parser.add_argument("--tables", action="store_true", help="print the counts of what is there")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    known = {
        row["name"]: row
        for line in (given.out.read_text().splitlines() if given.out.exists() else [])
        for row in [json.loads(line)]
    }
    for file in () if given.tables else files():
        if (
            file.name in known
            or given.only not in file.name
            or given.model not in file.model
            or given.size not in file.name
        ):
            continue
        row = known[file.name] = judged(file)
        with given.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        Console(width=200).print(
            f"{row['seconds']:.0f} s  {row['name']}: {row['verdict']}, {row['line_2'][:120]}", markup=False
        )
    tables(list(known.values()))


if __name__ == "__main__":
    main()
