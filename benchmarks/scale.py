"""How far cached and recomputed logits part as a model or a prompt grows: depth, width, logit scale, length, in three dtypes.

    python benchmarks/scale.py [--rows out/scale] [--out benchmarks/results] [--figure figures/scale.png]

Depth and length are those of SmolLM2-135M-Instruct (`make real`), cut to its first layers and read out by its own last norm and
head, over natural texts; width and logit scale those of random Llama models of two layers, a model a seed. Both paths are fed the
same tokens. Differences are of logits, relative to the standard deviation of a step's logits. An exponent is fitted prompt by prompt
(or seed by seed) by least squares on logarithms; its 95% interval is Student's over these. Rows are kept as they are made.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from kept import keep

import kvinterp as kv
from kvinterp.metrics import mean_of
from kvinterp.metrics.divergence import kl_divergence
from kvinterp.models.provenance import machine

REAL = "real:smollm2-135m"
STEPS = 4
"""Rows decoded behind a prompt, each compared."""
DTYPES = ("bfloat16", "float32", "float16")
LENGTHS = {"bfloat16": 1024, "float32": 512, "float16": 0}
"""About the longest prompt of each dtype, by what one core needs: none in float16, which it computes slowly."""
MEASURES = ("mean", "largest", "kl", "error")
Row = dict[str, Any]


@torch.no_grad()
def both(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the last rows of ids: decoded from the cache one by one, and each recomputed with all before it."""
    past = model(input_ids=ids[:, :-STEPS], use_cache=True).past_key_values
    first = ids.shape[1] - STEPS
    cached = [model(input_ids=ids[:, at : at + 1], past_key_values=past).logits[0, -1] for at in range(first, ids.shape[1])]
    whole = [model(input_ids=ids[:, : at + 1], use_cache=False).logits[0, -1] for at in range(first, ids.shape[1])]
    return [torch.stack(cached), torch.stack(whole)]


@torch.no_grad()
def measured(model: Any, ids: torch.Tensor, exact: Any = None) -> Row:
    """Means over a prompt's steps; ``error`` is that of the cached path against ``exact``, the same model in float64."""
    cached, whole = (logits.double() for logits in both(model, ids))
    spread = whole.std(-1)
    apart = (cached - whole).abs()
    found = {"mean": apart.mean(-1) / spread, "largest": apart.amax(-1) / spread, "kl": kl_divergence(cached, whole)}
    if exact is not None:
        true = exact(input_ids=ids, use_cache=False).logits[0, -STEPS:]
        found["error"] = (cached - true).abs().mean(-1) / true.std(-1)
    return {name: float(f"{values.mean().item():.4g}") for name, values in found.items()}


@contextlib.contextmanager
def cut(model: Any, layers: int) -> Iterator[Any]:
    """The model with its first layers alone, its last norm and head behind them."""
    whole = model.model.layers
    model.model.layers = whole[:layers]
    try:
        yield model
    finally:
        model.model.layers = whole


def random_llama(width: int, seed: int, vocabulary: int = 4096) -> Any:
    """Two layers with heads of 64 and weights of variance 1 / width, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    config = LlamaConfig(
        vocab_size=vocabulary, num_hidden_layers=2, initializer_range=width**-0.5, tie_word_embeddings=False, **sizes
    )
    return LlamaForCausalLM(config).eval()


def exponents(rows: pd.DataFrame) -> list[Row]:
    """The exponent of every sweep, dtype and measure: the mean over prompts of each one's slope, and its interval.

    A value of 0, which has no logarithm, is left out and counted; so is a prompt with fewer than three values.
    """
    found = []
    for (sweep, dtype), part in rows.groupby(["sweep", "dtype"], sort=False):
        for measure in (name for name in MEASURES if name in part and part[name].notna().any()):
            known = part[part[measure] > 0]
            many = [own for _, own in known.groupby("prompt") if len(own) >= 3]
            slopes = [np.polyfit(np.log(own["size"]), np.log(own[measure]), 1)[0] for own in many]
            fit = mean_of(slopes)
            typical = known.groupby("size")[measure].apply(lambda values: np.log(values).mean())
            line = np.polyfit(np.log(typical.index), typical, 1) if len(typical) > 1 else (np.nan, np.nan)
            off = float(np.exp(np.abs(typical - np.polyval(line, np.log(typical.index))).max()))
            found.append({
                "sweep": sweep, "dtype": dtype, "measure": measure, "from": int(part["size"].min()), "to": int(part["size"].max()),
                "n": len(slopes), "exponent": fit.effect, "low": fit.low, "high": fit.high, "zeros": len(part) - len(known),
                "times_off_the_line": off,
                "by_size": {int(size): float(f"{math.exp(value):.4g}") for size, value in typical.items()},
            })  # fmt: skip
    return found


# The sweeps ------------------------------------------------------------------------------------------------------------


def texts(tokenizer: Any, count: int, length: int) -> list[torch.Tensor]:
    """Natural prompts joined, each beginning at another place: below some hundred tokens no two share text."""
    every = [token for prompt in kv.load_prompts("natural:48") for token in tokenizer(prompt.text + "\n\n").input_ids]
    starts = [at * len(every) // count for at in range(count)]
    return [torch.tensor([(every * 2)[start : start + length]]) for start in starts]


def depth(dtype: str) -> Iterator[Row]:
    """SmolLM2's first layers, over 8 texts of 40 to 75 tokens: which bits differ rests on the number of rows."""
    adapter = kv.load_model(REAL, kind="native", dtype=dtype, device="cpu")
    exact = copy.deepcopy(adapter.model).double()
    for size in (1, 2, 4, 8, 15, 30):
        with cut(adapter.model, size) as model, cut(exact, size) as true:
            for at, ids in enumerate(texts(adapter.tokenizer, 8, 75 + STEPS)):
                yield {"size": size, "prompt": at, **measured(model, ids[:, : 40 + 5 * at + STEPS], true)}


def length(dtype: str) -> Iterator[Row]:
    """SmolLM2 as it is, over 6 texts, none as long as another."""
    adapter = kv.load_model(REAL, kind="native", dtype=dtype, device="cpu")
    size = 64
    while size <= LENGTHS[dtype]:
        for at, ids in enumerate(texts(adapter.tokenizer, 6, size + 15 + STEPS)):
            ids = ids[:, : size + 3 * at + STEPS]
            yield {"size": size, "prompt": at, **measured(adapter.model, ids)}
        size *= 2


def width(dtype: str) -> Iterator[Row]:
    """Random models, 8 seeds, 64 random tokens each."""
    for size in (64, 128, 256, 512, 1024):
        for seed in range(8):
            model = random_llama(size, seed).to(getattr(torch, dtype))
            ids = torch.randint(4096, (1, 64 + STEPS))
            yield {"size": size, "prompt": seed, **measured(model, ids, copy.deepcopy(model).double())}


def logit_scale(dtype: str) -> Iterator[Row]:
    """Random models of width 256 whose head is multiplied; their logits begin with a standard deviation of about 1."""
    for size in (1, 3, 10, 30):
        for seed in range(8):
            model = random_llama(256, seed)
            model.lm_head.weight.data *= size
            model = model.to(getattr(torch, dtype))
            ids = torch.randint(4096, (1, 64 + STEPS))
            yield {"size": size, "prompt": seed, **measured(model, ids)}


SWEEPS: dict[str, Callable[[str], Iterator[Row]]] = {
    "depth": depth, "width": width, "logit scale": logit_scale, "length": length,
}  # fmt: skip


def draw(fits: list[Row], here: dict[str, Any], picture: Path) -> None:
    """A panel a sweep: the mean difference and its line, a dtype each."""
    from kvinterp.common.files import write_whole
    from kvinterp.report.charts import set_scale
    from kvinterp.report.style import line_of, png, sheet, sign

    labels = {"depth": "layers", "width": "width", "logit scale": "head multiplied by", "length": "prompt (tokens)"}
    with sheet(9, 5.6) as figure:
        panels = figure.subplots(2, 2)
        for panel, sweep in zip(panels.flat, SWEEPS, strict=True):
            for at, dtype in enumerate(DTYPES):
                fit = next(
                    (one for one in fits if (one["sweep"], one["dtype"], one["measure"]) == (sweep, dtype, "mean")), None
                )
                if fit is not None:
                    panel.plot(list(fit["by_size"]), list(fit["by_size"].values()), label=dtype, **line_of(at))
            panel.set(xscale="log", yscale="log", xlabel=labels[sweep], title=sweep)
            sizes = sorted({size for one in fits if one["sweep"] == sweep for size in one["by_size"]})
            panel.set_xticks(sizes, [str(size) for size in sizes])
            set_scale(panel, "y", "log", np.empty(0))
            panel.minorticks_off()
            panel.set_ylabel("mean |logit difference| / std")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
        sign(
            figure,
            f"{here['device']}, {here['threads']} thread; SmolLM2-135M (depth, length), random Llama (others); zeros left out",
            [here],
        )
        write_whole(picture, png(figure))


def main() -> None:
    """Measures what is not kept yet, fits, prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("out/scale"), help="where rows are kept until all are made")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--figure", type=Path, default=Path(__file__).parents[1] / "figures/scale.png")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.rows.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for sweep, rows_of in SWEEPS.items():
        for dtype in DTYPES:
            kept = given.rows / f"{sweep.replace(' ', '_')}-{dtype}.json"
            if not kept.exists():
                kept.write_text(json.dumps([{"sweep": sweep, "dtype": dtype, **row} for row in rows_of(dtype)]))
            rows += json.loads(kept.read_text())
    fits, here = exponents(pd.DataFrame(rows)), machine(torch.device("cpu"))
    for fit in fits:
        print(
            f"{fit['sweep']:11} {fit['dtype']:8} {fit['measure']:7} {fit['from']:4} to {fit['to']:4} n {fit['n']:2} "
            f"exponent {fit['exponent']:6.2f} ({fit['low']:.2f} to {fit['high']:.2f}), {fit['times_off_the_line']:.2f} times off the "
            f"line at most, {fit['zeros']} zeros; {fit['by_size']}"
        )
    plain = [{name: None if value != value else value for name, value in fit.items()} for fit in fits]
    keep(given.out, "scale", {"model": REAL, "steps": STEPS, "exponents": plain, "rows": rows, "provenance": here})
    draw(fits, here, given.figure)


if __name__ == "__main__":
    main()
