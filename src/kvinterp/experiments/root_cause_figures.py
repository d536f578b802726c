"""Figures of the root-cause experiments, and :func:`write`, which runs them all and keeps tables and figures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from kvinterp.experiments import root_cause
from kvinterp.models import wrap
from kvinterp.provenance import provenance

__all__ = [
    "accumulation_figure",
    "flips_figure",
    "gqa_figure",
    "kv_write_figure",
    "ladder_figure",
    "propagation_figure",
    "write",
]

_COLORS = ("#0a5c96", "#b3541e", "#2f7d4f", "#7a3e9d", "#8a6d00", "#555b63", "#a01c44", "#117a8b")
_ZERO = 1e-20
"""Where a logarithmic axis draws what is exactly 0; the axis says so."""


def accumulation_figure(table: pd.DataFrame) -> Figure:
    """Experiment 1: relative error against sequence length, for scores and for the value product."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    head_dim = table["head_dim"].min()
    for axis, (product, title) in zip(
        axes,
        (("scores", "Scores: sum over the head's width"), ("values", "Value product: sum over positions")),
        strict=True,
    ):
        for color, (name, group) in zip(
            _COLORS,
            table[(table["product"] == product) & (table["head_dim"] == head_dim)].groupby("accumulate"),
            strict=False,
        ):
            axis.loglog(group["length"], group["mean_relative"], "o-", color=color, label=str(name))
        axis.set(title=title, xlabel=f"sequence length (head_dim {head_dim})")
    axes[0].set_ylabel("mean error / sum of magnitudes")
    axes[0].legend(title="accumulate in")
    return figure


def propagation_figure(table: pd.DataFrame) -> Figure:
    """Experiment 2: relative L2 of the residual stream behind one rounded block."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    names = list(table["model"].unique())
    for axis, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        chosen = table[table["model"] == name].groupby(["source", "layer"])["relative_l2"].median().unstack("source")
        for color, source in zip(_COLORS, chosen, strict=False):
            axis.semilogy(chosen.index, chosen[source], "o-", color=color, label=f"layer {source}")
        axis.set(title=str(name).removeprefix("zoo:"), xlabel="layer", xticks=list(chosen.index))
    axis.legend(title="rounded in", fontsize=7)
    figure.axes[0].set_ylabel("relative L2, median over prompts")
    return figure


def kv_write_figure(table: pd.DataFrame) -> Figure:
    """Experiment 3: error of K and V at write time, by kernel mode and layer."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    modes = list(dict.fromkeys(table["kernels"]))
    for axis, tensor in zip(figure.subplots(1, 2, sharey=True), ("K", "V"), strict=True):
        for color, mode in zip(_COLORS, modes, strict=False):
            chosen = (
                table[(table["tensor"] == tensor) & (table["kernels"] == mode)].groupby("layer")["relative_error"].mean()
            )
            axis.semilogy(chosen.index, chosen.clip(lower=_ZERO), "o-", color=color, label=mode)
        axis.set(title=f"{tensor} of the new token", xlabel="layer")
    figure.axes[0].set_ylabel(f"mean relative error (0 drawn at {_ZERO:g})")
    figure.axes[1].legend(fontsize=7)
    return figure


def flips_figure(examples: pd.DataFrame) -> Figure:
    """Experiment 4: flip index against mean KL, free and matched."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    titles = {"mean_kl": "Free: all steps", "mean_kl_before_flip": "Free: before the flip", "matched_mean_kl": "Matched"}
    flipped = examples.dropna(subset=["flip_index"])
    for axis, (column, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        axis.scatter(flipped["flip_index"], flipped[column].clip(lower=_ZERO), s=14, color=_COLORS[0])
        axis.set(title=f"{title} ({len(flipped)} flips)", xlabel="first flipped step", yscale="log")
    figure.axes[0].set_ylabel("mean KL (nats)")
    return figure


def ladder_figure(table: pd.DataFrame) -> Figure:
    """Experiment 5: logit error and KL on every rung, matched protocol."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    chosen = table[table["protocol"] == "matched"]
    labels = [f"{d}\n{k}" for d, k in chosen[["dtype", "kernels"]].drop_duplicates().itertuples(index=False, name=None)]
    for axis, column, title in zip(
        figure.subplots(2, 1, sharex=True),
        ("rms_logit", "mean_kl"),
        ("RMS logit difference", "mean KL (nats)"),
        strict=True,
    ):
        for color, (name, group) in zip(_COLORS, chosen.groupby("model", sort=False), strict=False):
            axis.semilogy(
                range(len(group)), group[column].clip(lower=_ZERO), "o", color=color, label=str(name).removeprefix("zoo:")
            )
        axis.set_ylabel(title, fontsize=8)
        axis.axhline(_ZERO, color="#999999", linewidth=0.6)
    axis.set_xticks(range(len(labels)), labels, fontsize=7)
    axis.set_xlabel(f"what is exactly 0 is drawn at {_ZERO:g}", fontsize=8)
    figure.axes[0].legend(fontsize=7, ncols=5)
    return figure


def gqa_figure(table: pd.DataFrame) -> Figure:
    """The spread of one KV head's error, against how many query heads share it."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axis, (column, title) in zip(
        figure.subplots(1, 3),
        (
            ("share_touched", "share of query heads touched"),
            ("attn_out", "attention output"),
            ("final", "last residual stream"),
        ),
        strict=True,
    ):
        for color, (tensor, group) in zip(_COLORS, table.groupby("tensor"), strict=False):
            by = group.groupby("query_heads_per_kv_head")[column].median()
            axis.plot(by.index, by, "o-", color=color, label=str(tensor))
        axis.set(title=title, xlabel="query heads a KV head", xscale="log", xticks=list(by.index))
        axis.set_xticklabels([str(n) for n in by.index])
    figure.axes[1].set_ylabel("median relative L2")
    figure.axes[0].legend(title="planted in")
    return figure


def write(
    models: Sequence[Any],
    prompts: Any,
    out: str | os.PathLike[str],
    figures: str | os.PathLike[str] | None = None,
    flip_kernels: str = "split_k(8,float16)",
    ladder_prompts: int = 6,
    ladder_steps: int = 16,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Runs every root-cause experiment on every model; writes a CSV and a figure each, and the provenance.

    Args:
        models: Adapters or models in float16; those that differ only in grouped-query attention give the GQA figure.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        out: Folder of the tables.
        figures: Folder of the figures; the tables' unless said.
        flip_kernels: The kernel mode under which flips are looked for, beside the machine's own.
        ladder_prompts: How many of the prompts go up the ladder, whose slow rungs cost the most.
        ladder_steps: Most steps of each there.
        progress: Told what runs next.
    """
    tell = progress or (lambda _: None)
    folder, pictures = Path(out), Path(figures or out)
    folder.mkdir(parents=True, exist_ok=True)
    pictures.mkdir(parents=True, exist_ok=True)
    adapters = [wrap(model) for model in models]
    tables: dict[str, pd.DataFrame] = {}
    tell("experiment 1")
    widths = sorted({a.facts.head_dim for a in adapters} | {64, 128, 256})
    tables["accumulation"] = root_cause.accumulation_error(head_dims=widths)
    parts: dict[str, list[pd.DataFrame]] = {}
    for adapter in adapters:
        ids = [adapter.encode(getattr(p, "text", p)) if not isinstance(p, list) else p for p in prompts]
        name = adapter.facts.name
        for what, run in {
            "propagation": partial(root_cause.propagation, adapter, ids[:4]),
            "kv_write": partial(root_cause.kv_write_error, adapter, ids[:4]),
            "ladder": partial(root_cause.precision_ladder, adapter, prompts[:ladder_prompts], max_new_tokens=ladder_steps),
        }.items():
            tell(f"{what} of {name}")
            parts.setdefault(what, []).append(run().assign(model=name))
        for kernels in dict.fromkeys(("native", flip_kernels)):
            tell(f"flips of {name}, {kernels}")
            examples, correlations = root_cause.flips_against_kl(adapter, prompts, kernels)
            parts.setdefault("flips", []).append(examples.assign(model=name, kernels=kernels))
            parts.setdefault("correlations", []).append(correlations.assign(model=name, kernels=kernels))
    tables |= {what: pd.concat(frames, ignore_index=True) for what, frames in parts.items()}
    alike = [a for a in adapters if a.facts.width == adapters[0].facts.width and not any(a.facts.windows)]
    tell("grouped-query attention")
    shared = [adapters[0].encode(getattr(p, "text", p)) if not isinstance(p, list) else p for p in prompts][:4]
    tables["gqa"] = root_cause.gqa_spread(alike, shared)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    drawn = {
        "accumulation": accumulation_figure(tables["accumulation"]),
        "propagation": propagation_figure(tables["propagation"]),
        "kv_write": kv_write_figure(tables["kv_write"]),
        "flips": flips_figure(tables["flips"]),
        "ladder": ladder_figure(tables["ladder"]),
        "gqa": gqa_figure(tables["gqa"]),
    }
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, figure in drawn.items():
            figure.savefig(pictures / f"root_cause_{name}.png", dpi=130)
    about = {adapter.facts.name: provenance(adapter, flip_kernels=flip_kernels) for adapter in adapters}
    (folder / "provenance.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return folder
