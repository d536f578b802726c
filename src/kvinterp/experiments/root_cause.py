"""The root-cause experiments of the FP16 paper (arXiv 2604.15409, section 5.2), each a function that returns a table.

The paper argues that FP16 sums taken in another order are the cause of the divergence. Its five experiments are here, on any
model, each with the control that tells the possible readings apart: the sum whose length grows beside the one whose length
does not; a rounding planted in one layer; the K and V projections under kernels that split their sums and kernels that do
not; flips beside the matched protocol; and the whole pipeline over a ladder that changes the precision and the order of
additions one at a time. :func:`gqa_spread` plants the same error in one KV head of models that differ in how many query heads
share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from kvinterp import metrics
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.subject import BlockTaps, Subject
from kvinterp.comparison import compare
from kvinterp.errors import InputError
from kvinterp.metrics.drift import relative_l2
from kvinterp.metrics.kv import relative_error, ulp_error
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.threads import own_threads
from kvinterp.paths import kernels_named
from kvinterp.paths.runner import encode
from kvinterp.provenance import provenance

__all__ = [
    "LADDER",
    "accumulation_error",
    "flips_against_kl",
    "gqa_spread",
    "kv_write_error",
    "precision_ladder",
    "propagation",
    "root_cause",
]

LADDER = (
    ("float16", "native"),
    ("bfloat16", "native"),
    ("float32", "native"),
    ("float64", "native"),
    ("float16", "batch_invariant"),
    ("float16", "split_k(4,float16)"),
    ("float16", "split_k(4,float32)"),
    ("float16", "layer_cast"),
)
"""Dtype and kernel mode of each rung: precision changes down the first four, the order of additions in the others."""


def root_cause(
    models: Sequence[Any],
    prompts: Any,
    flip_kernels: str = "split_k(8,float16)",
    flip_strategy: str = "top_p(1.0,2.0)",
    flip_steps: int = 48,
    ladder_prompts: int = 6,
    ladder_steps: int = 16,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[str, Callable[[], pd.DataFrame]], pd.DataFrame] | None = None,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Runs every experiment on every model.

    Args:
        models: Adapters or models, their weights in float16; those that differ only in how many query heads share a KV head
            give the grouped-query table.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        flip_kernels: The kernel mode under which flips are looked for, beside the machine's own.
        flip_strategy: The strategy under which they are looked for, beside greedy.
        flip_steps: Most steps of each there.
        ladder_prompts: How many of the prompts go up the ladder, whose slow rungs cost the most.
        ladder_steps: Most steps of each there.
        progress: Told what runs next.
        keep: Given the name of a table and what makes it, returns the table; :meth:`kvinterp.results.Parts.made` reads one
            that an interrupted run had finished.

    Returns:
        The tables accumulation, propagation, kv_write, flips, correlations, ladder and gqa (each with a column ``model``
        where it has one; correlations have ``all`` beside each model), and the provenance of each model.
    """
    tell, keep = progress or (lambda _: None), keep or (lambda _, make: make())
    adapters = [wrap(model) for model in models]
    if not adapters:
        raise InputError("the list of models is empty: give at least one.")
    widths = sorted({a.facts.head_dim for a in adapters} | {64, 128, 256})
    tell("sums of growing length")
    parts: dict[str, list[pd.DataFrame]] = {
        "accumulation": [keep("accumulation", partial(accumulation_error, head_dims=widths))]
    }
    for number, adapter in enumerate(adapters):
        name, ids = adapter.facts.name, [encode(adapter, prompt, 1) for prompt in prompts[:4]]
        runs = {
            "propagation": partial(propagation, adapter, ids),
            "kv_write": partial(kv_write_error, adapter, ids),
            "ladder": partial(precision_ladder, adapter, prompts[:ladder_prompts], max_new_tokens=ladder_steps),
        }
        for what, run in runs.items():
            tell(f"{what} of {name}")
            parts.setdefault(what, []).append(keep(f"{what}-{number}", run).assign(model=name))
        settings = itertools.product(*map(dict.fromkeys, (("native", flip_kernels), ("greedy", flip_strategy))))
        for turn, (kernels, strategy) in enumerate(settings):
            tell(f"flips of {name}, {kernels} kernels, {strategy}")
            look = partial(_flips, adapter, prompts, kernels, strategy, flip_steps)
            examples = keep(f"flips-{number}-{turn}", look)
            for what, table in (("flips", examples), ("correlations", _correlations(examples))):
                parts.setdefault(what, []).append(table.assign(model=name, kernels=kernels, strategy=strategy))
    if len(adapters) > 1:
        pooled = pd.concat(parts["flips"], ignore_index=True)
        for (kernels, strategy), group in pooled.groupby(["kernels", "strategy"], sort=False):
            table = _correlations(group).assign(model="all", kernels=kernels, strategy=strategy)
            parts["correlations"].append(table)
    tell("grouped-query attention")
    alike = [a for a in adapters if a.facts.width == adapters[0].facts.width and not any(a.facts.windows)]
    parts["gqa"] = [gqa_spread(alike, [encode(alike[0], prompt, 1) for prompt in prompts[:4]])] if alike else []
    tables = {what: pd.concat(frames, ignore_index=True) for what, frames in parts.items() if frames}
    return tables, {
        adapter.facts.name: provenance(adapter, flip_kernels=flip_kernels, flip_strategy=flip_strategy)
        for adapter in adapters
    }


# Experiment 1 ----------------------------------------------------------------------------------------------------------


def accumulation_error(
    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    head_dims: Sequence[int] = (16, 64, 128, 256),
    accumulate: Sequence[str] = ("float16", "bfloat16", "float32"),
    samples: int = 64,
    seed: int = 0,
) -> pd.DataFrame:
    """Experiment 1: relative error of the dot products of attention, one term added after another, against length.

    The paper reports it flat in the sequence length. Attention has two sums: a score adds over the head's width, which a
    longer sequence does not change, and the value product adds over the positions. And an error is relative to something:
    to the magnitudes that were added, or to their sum, which cancellation makes smaller the more terms there are. The
    operands are the same 16-bit numbers for every accumulator, so that what is measured is the sum's own rounding.

    Args:
        lengths: Numbers of positions.
        head_dims: Widths of a head, over which a score adds.
        accumulate: The dtypes running sums are rounded to.
        samples: Dot products each.
        seed: Seeds the operands, standard normal; attention's weights are the softmax of standard normal scores.

    Returns:
        One row a product (scores for every head_dim, values), length and accumulator: terms, mean_relative and std_relative
        (to the sum of the terms' magnitudes), relative_to_result (median), in_unit_roundoffs (of mean_relative).
    """
    generator = torch.Generator().manual_seed(seed)
    sums: list[tuple[str, int, int | None]] = [("scores", length, head_dim) for head_dim in head_dims for length in lengths]
    sums += [("values", length, None) for length in lengths]
    rows = []
    for product, length, head_dim in sums:
        terms = length if head_dim is None else head_dim
        a, b = torch.randn(2, samples, terms, generator=generator)
        a = torch.softmax(a, -1) if product == "values" else a
        a, b = a.to(torch.float16).double(), b.to(torch.float16).double()
        exact, size = (a * b).sum(-1), (a * b).abs().sum(-1)
        for name in accumulate:
            dtype: Any = dtype_named(name)
            error = (_added_up(a, b, dtype) - exact).abs()
            relative = error / size
            rows.append(
                {
                    "product": product,
                    "length": length,
                    "head_dim": head_dim,
                    "accumulate": name,
                    "terms": terms,
                    "mean_relative": float(relative.mean()),
                    "std_relative": float(relative.std()),
                    "relative_to_result": float((error / exact.abs().clamp(min=1e-12)).median()),
                    "in_unit_roundoffs": float(relative.mean()) / unit_roundoff(dtype),
                }
            )
    return pd.DataFrame(rows).astype({"head_dim": "Int64"})


def _added_up(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(a.shape[0], dtype=dtype)
    for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True):
        # The product of two 16-bit numbers is exact in float64: one rounding for the product, one for the sum.
        total = (total.double() + (x * y).to(dtype).double()).to(dtype)
    return total.double()


# Experiment 2 ----------------------------------------------------------------------------------------------------------


def propagation(
    model: Any, prompts: Sequence[Sequence[int]], rounding: str = "float16", sources: Sequence[int] | None = None
) -> pd.DataFrame:
    """Experiment 2: one block's output rounded once, everything else in float64, and how far it is off in every later block.

    Args:
        model: A model of any kind; it is run in float64.
        prompts: Token ids.
        rounding: The dtype one block's output is rounded to, at every position.
        sources: The blocks, one at a time; all unless said.

    Returns:
        One row a prompt, source and layer: relative_l2 of the residual stream at the newest position, amplification (over
        that at the source).
    """
    adapter = wrap(model).at(torch.float64)
    dtype: Any = dtype_named(rounding)
    count = adapter.facts.layers
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        clean = _residuals(adapter, tokens, None)
        for source in range(count) if sources is None else sources:
            noisy = _residuals(adapter, tokens, (source, lambda x: x.to(dtype).to(x.dtype)))
            first = float("nan")
            for layer in range(source, count):
                off = float(relative_l2(noisy[layer][None], clean[layer][None]))
                first = off if layer == source else first
                rows.append(
                    {
                        "prompt": number,
                        "source": source,
                        "layer": layer,
                        "relative_l2": off,
                        "amplification": off / first if first else float("nan"),
                    }
                )
    return pd.DataFrame(rows)


@torch.no_grad()
def _residuals(adapter: Adapter, tokens: Tensor, change: tuple[int, Callable[[Tensor], Tensor]] | None) -> list[Tensor]:
    kept: dict[int, Tensor] = {}

    def listener(layer: int) -> Callable[[Tensor], Tensor | None]:
        def hear(tensor: Tensor) -> Tensor | None:
            new = change[1](tensor) if change is not None and change[0] == layer else None
            kept[layer] = (tensor if new is None else new)[0, -1].clone()
            return new

        return hear

    places = [("resid_post", layer) for layer in range(adapter.facts.layers)]
    heard = {place: [listener(place[1])] for place in places}
    with own_threads(adapter), adapter.attached(places), adapter.listening(heard):
        adapter.forward(tokens)
    return [kept[layer] for layer in range(adapter.facts.layers)]


# Experiment 3 ----------------------------------------------------------------------------------------------------------


def kv_write_error(
    model: Any,
    prompts: Sequence[Sequence[int]],
    kernels: Sequence[str] = ("native", "split_k(4,float16)", "split_k(4,float32)", "batch_invariant"),
    steps: int = 8,
) -> pd.DataFrame:
    """Experiment 3: K and V of one new token, computed alone as a cached step does and jointly with the whole prefix.

    Both are given bitwise the same residual stream, so that what differs is born where the cache is written.

    Args:
        model: A model of any kind, in the dtype to be measured.
        prompts: Token ids; the last ``steps`` of each are the new tokens.
        kernels: Kernel modes to measure under.
        steps: New tokens a prompt.

    Returns:
        One row a kernel mode, prompt, position, layer and tensor: relative_error (worst head), ulp_mean, ulp_max,
        share_differing (of the numbers written).
    """
    adapter = wrap(model)
    rows = []
    for mode, (number, prompt) in itertools.product(kernels, enumerate(prompts)):
        if len(prompt) <= steps:
            raise InputError(f"prompt {number} has {len(prompt)} tokens: expected more than steps={steps}.")
        taps = BlockTaps(Subject(adapter, kernels_named(mode)))
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        with taps.attached():
            reference = taps.reference(tokens)
            for position, alone, jointly in _written(adapter, taps, reference, len(prompt) - steps):
                for (tensor, layer), mine in alone.items():
                    theirs = jointly[tensor, layer]
                    ulp = ulp_error(mine, theirs)
                    rows.append(
                        {
                            "kernels": mode,
                            "prompt": number,
                            "position": position,
                            "layer": layer,
                            "tensor": tensor.upper(),
                            "relative_error": float(relative_error(mine, theirs).max()),
                            "ulp_mean": float(ulp["mean"].mean()),
                            "ulp_max": float(ulp["max"].max()),
                            "share_differing": float((mine != theirs).double().mean()),
                        }
                    )
    return pd.DataFrame(rows)


Written = dict[tuple[str, int], Tensor]


def _written(adapter: Adapter, taps: BlockTaps, reference: Any, prefill: int) -> Iterator[tuple[int, Written, Written]]:
    seen: Written = {}
    places = [(site, layer) for site in ("k", "v") for layer in range(adapter.facts.layers)]

    def listener(place: tuple[str, int]) -> Callable[[Tensor], None]:
        return lambda tensor: seen.__setitem__(place, tensor[0, -1].clone())

    with adapter.attached(places), adapter.listening({place: [listener(place)] for place in places}):
        _, cache = taps.feed(reference, 0, prefill, None)
        for position in range(prefill, reference.tokens.shape[1]):
            _, cache = taps.feed(reference, position, position + 1, cache)
            alone = dict(seen)
            taps.recompute(reference, position + 1)
            yield position, alone, dict(seen)


# Experiment 4 ----------------------------------------------------------------------------------------------------------


def flips_against_kl(
    model: Any,
    prompts: Any,
    kernels: str = "native",
    strategy: str = "greedy",
    max_new_tokens: int = 48,
    dtype: str | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Experiment 4: the step of the first flipped token against the mean KL, and the control that the paper lacks.

    In the free protocol the KL after a flip is that of two texts: an early flip leaves more such steps, so a negative
    correlation follows from counting alone. Beside it: the KL before the flip, and the matched protocol's, which hold only
    arithmetic.

    Args:
        model: A model of any kind.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        kernels: The kernel mode of both paths.
        strategy: How tokens are chosen; sampled ones stand at a boundary more often than a sure model's greedy ones.
        max_new_tokens: Most steps.
        dtype: The dtype of both paths; the model's own unless said.

    Returns:
        The examples (flip_index, mean_kl, mean_kl_before_flip, mean_kl_after_flip, matched_mean_kl, smallest_margin), and
        the correlations of the flip index: against, examples, pearson, pearson_p, spearman, spearman_p, and the paper's
        split into the earliest and the latest third: early_mean, late_mean, welch_p.
    """
    examples = _flips(model, prompts, kernels, strategy, max_new_tokens, dtype)
    return examples, _correlations(examples)


def _flips(
    model: Any, prompts: Any, kernels: str, strategy: str, max_new_tokens: int, dtype: str | None = None
) -> pd.DataFrame:
    tail = f"[kernels={kernels}]" + (f"@{dtype}" if dtype else "")
    settings: dict[str, Any] = {"strategy": strategy, "max_new_tokens": max_new_tokens, "record": "", "progress": "none"}
    free = compare(model, prompts, f"cached{tail}", f"recompute{tail}", protocol="free", **settings).examples
    matched = compare(model, prompts, f"cached{tail}", f"recompute{tail}", **settings).examples
    columns = [
        "example",
        "id",
        "flip_index",
        "mean_kl",
        "mean_kl_before_flip",
        "mean_kl_after_flip",
        "smallest_margin",
        "steps",
    ]
    return free[columns].merge(
        matched[["example", "mean_kl", "smallest_margin"]].rename(
            columns={"mean_kl": "matched_mean_kl", "smallest_margin": "matched_smallest_margin"}
        ),
        on="example",
    )


def _correlations(examples: pd.DataFrame) -> pd.DataFrame:
    flipped = examples.dropna(subset=["flip_index"])
    rows = []
    for against in ("mean_kl", "mean_kl_before_flip", "matched_mean_kl", "matched_smallest_margin"):
        pair = flipped[["flip_index", against]].dropna()
        rows.append({"against": against, "examples": len(pair), **_correlated(pair["flip_index"], pair[against])})
    return pd.DataFrame(rows)


def _correlated(x: pd.Series, y: pd.Series) -> dict[str, float]:
    names = ("pearson", "pearson_p", "spearman", "spearman_p", "early_mean", "late_mean", "welch_p")
    if len(x) < 6 or x.nunique() < 2 or y.nunique() < 2:
        return dict.fromkeys(names, np.nan)
    pearson, spearman = stats.pearsonr(x, y), stats.spearmanr(x, y)
    early, late = y[x <= x.quantile(1 / 3)], y[x >= x.quantile(2 / 3)]
    welch = stats.ttest_ind(early, late, equal_var=False).pvalue if min(len(early), len(late)) > 1 else np.nan
    numbers = (pearson.statistic, pearson.pvalue, spearman.statistic, spearman.pvalue, early.mean(), late.mean(), welch)
    return dict(zip(names, map(float, numbers), strict=True))


# Experiment 5 ----------------------------------------------------------------------------------------------------------


def precision_ladder(
    model: Any,
    prompts: Any,
    rungs: Sequence[tuple[str, str]] = LADDER,
    max_new_tokens: int = 32,
    protocols: Sequence[str] = ("matched", "free"),
) -> pd.DataFrame:
    """Experiment 5: the full pipeline in every precision and under every order of additions.

    Args:
        model: A model of any kind whose weights are in float16.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        rungs: Dtype and kernel mode of each rung.
        max_new_tokens: Most steps.
        protocols: Protocols to run.

    Returns:
        One row a rung and protocol: flip_rate (share of examples), mean_kl, mean_kl_before_flip, rms_logit (mean over steps),
        max_abs_logit, bitwise_equal_steps, steps, kl_over_squared_logit (mean_kl over the mean of rms_logit squared).
    """
    rows = []
    for (dtype, kernels), protocol in itertools.product(rungs, protocols):
        tail = f"[kernels={kernels}]@{dtype}"
        result = compare(
            model,
            prompts,
            f"cached{tail}",
            f"recompute{tail}",
            protocol=protocol,
            max_new_tokens=max_new_tokens,
            record="",
            progress="none",
        )
        steps, summary = result.steps, result.summary()
        squared = float((steps["rms_logit"] ** 2).mean()) if len(steps) else 0.0
        rows.append(
            {
                "dtype": dtype,
                "kernels": kernels,
                "protocol": protocol,
                "unit_roundoff": unit_roundoff(dtype_named(dtype)),  # type: ignore[arg-type]
                "flip_rate": summary["divergence_rate"],
                "mean_kl": summary["mean_kl"],
                "mean_kl_before_flip": summary["mean_kl_before_flip"],
                "rms_logit": float(steps["rms_logit"].mean()) if len(steps) else np.nan,
                "max_abs_logit": summary["max_abs_logit"],
                "bitwise_equal_steps": summary["bitwise_equal_steps"],
                "steps": summary["steps"],
                "failed": summary["failed"],
                "kl_over_squared_logit": summary["mean_kl"] / squared if squared else np.nan,
            }
        )
    return pd.DataFrame(rows)


# Grouped-query attention -----------------------------------------------------------------------------------------------


def gqa_spread(
    models: Sequence[Any],
    prompts: Sequence[Sequence[int]],
    layer: int = 1,
    error: float = 2.0**-11,
    positions: Sequence[int] = (-1, -4, -8),
) -> pd.DataFrame:
    """The same relative error planted in one KV head's entry, and how far it spreads through the heads that share it.

    Everything is computed in float64, so that the planted error (one float16 unit roundoff unless said) is the only one.

    Args:
        models: Models that differ in how many query heads share a KV head.
        prompts: Token ids, the same for every model.
        layer: Where it is planted.
        error: Its size relative to the entry.
        positions: The cache positions it is planted at, one at a time, counted from the newest.

    Returns:
        One row a model, prompt, tensor, KV head and position: query_heads_per_kv_head, heads_touched, share_touched,
        head_error (mean relative error of z in the touched heads), attn_out, resid_post (relative L2, at the planted layer),
        final (relative L2 of the last residual stream), kl (nats).
    """
    rows = []
    for model in models:
        adapter = wrap(model).at(torch.float64)
        facts = adapter.facts
        for number, prompt in enumerate(prompts):
            tokens = torch.tensor([list(prompt)], device=adapter.device)
            clean = _attention_of(adapter, tokens, layer, None)
            for tensor, head, position in itertools.product(("k", "v"), range(facts.kv_heads), positions):
                noisy = _attention_of(adapter, tokens, layer, (tensor, head, position, error))
                off = relative_error(noisy["z"], clean["z"])
                touched = off > 0
                rows.append(
                    {
                        "model": facts.name,
                        "query_heads_per_kv_head": facts.query_heads // facts.kv_heads,
                        "prompt": number,
                        "tensor": tensor.upper(),
                        "kv_head": head,
                        "position": position,
                        "heads_touched": int(touched.sum()),
                        "share_touched": float(touched.double().mean()),
                        "head_error": float(off[touched].mean()) if bool(touched.any()) else 0.0,
                        "attn_out": _relative(noisy["attn_out"], clean["attn_out"]),
                        "resid_post": _relative(noisy["resid_post"], clean["resid_post"]),
                        "final": _relative(noisy["final"], clean["final"]),
                        "kl": float(metrics.compare_logits(clean["logits"][None], noisy["logits"][None])["kl"]),
                    }
                )
    return pd.DataFrame(rows)


def _relative(a: Tensor, b: Tensor) -> float:
    return float(relative_l2(a[None], b[None]))


@torch.no_grad()
def _attention_of(
    adapter: Adapter, tokens: Tensor, layer: int, plant: tuple[str, int, int, float] | None
) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    last = adapter.facts.layers - 1

    def keep(name: str) -> Callable[[Tensor], None]:
        return lambda tensor: seen.__setitem__(name, tensor[0, -1].clone())

    listeners: dict[Any, Any] = {(site, layer): [keep(site)] for site in ("z", "attn_out", "resid_post")}
    listeners.setdefault(("resid_post", last), []).append(keep("final"))
    if plant is not None:
        site, head, position, error = plant

        def change(tensor: Tensor) -> Tensor:
            planted = tensor.clone()
            planted[:, position, head] *= 1 + error
            return planted

        listeners[site, layer] = [change]
    with own_threads(adapter), adapter.attached(list(listeners)), adapter.listening(listeners):
        seen["logits"] = adapter.forward(tokens)[0, -1]
    return seen
