"""Figures of the root-cause experiments; each takes the table of one function of :mod:`kvinterp.experiments.root_cause`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvinterp.reading.results import only
from kvinterp.reading.root_cause import ladder_title_of
from kvinterp.report.axes import Height, beside, legend_outside, place_title, powers_of_two, whole_numbers, zero_aware
from kvinterp.report.style import line_of, sheet

__all__ = [
    "accumulation_figure",
    "flips_figure",
    "gqa_figure",
    "kv_write_figure",
    "ladder_figure",
    "propagation_figure",
    "repeated_heads_figure",
    "root_cause_figures",
]


def root_cause_figures(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> dict[str, Figure]:
    """The figure of every table that has one.

    Args:
        tables: Those of :class:`kvinterp.experiments.root_cause.RootCause`, or some of them.
        provenance: Provenance of each model, kept in the files' text fields.
    """
    drawers: dict[str, Callable[[pd.DataFrame], Figure]] = {
        "accumulation": accumulation_figure,
        "propagation": propagation_figure,
        "kv_write": kv_write_figure,
        "flips": flips_figure,
        "ladder": ladder_figure,
        "gqa": gqa_figure,
        "repeated_heads": repeated_heads_figure,
    }
    drawn = {f"root_cause_{name}": draw(tables[name]) for name, draw in drawers.items() if len(tables.get(name, ()))}
    for figure in drawn.values():
        figure.provenance = list(provenance.values())  # type: ignore[attr-defined]  # kept for save()
    return drawn


def accumulation_figure(table: pd.DataFrame) -> Figure:
    """Experiment 1: error of a dot product against sequence length, relative to what was added and to the result."""
    head_dim = table["head_dim"].min()
    products = {
        "scores": (table["product"] == "scores") & (table["head_dim"] == head_dim),
        "values": table["product"] == "values",
    }
    measures = {"mean_relative": "the terms' magnitudes", "relative_to_result": "the result"}
    with _panels(4, table[list(measures)].to_numpy(), "relative error of the sum") as (figure, axes):
        for (axis, height), (column, to), (product, chosen) in zip(
            axes, [m for m in measures.items() for _ in products], [*products.items()] * 2, strict=True
        ):
            lines = table[chosen].groupby(["accumulate", "length"], sort=False)[column].mean()
            kept = dict.fromkeys(table["accumulate"])
            _lines(axis, height, {f"sums kept in {name}": lines[name] for name in kept})
            powers_of_two(axis, sorted(set(table["length"]))[::2], rotation=45)
            axis.set_xlabel("sequence length (positions)")
            grown = sorted(f"{line.iloc[-1] / line.iloc[0]:.2g}" for _, line in lines.groupby(level=0) if line.iloc[0])
            fold = f": {' to '.join(dict.fromkeys((grown[0], grown[-1])))}-fold" if grown else ""
            place_title(axis, f"{product}, to {to}{fold}", 6.6)
        legend_outside(figure, axes[0][0])
    return figure


def propagation_figure(table: pd.DataFrame) -> Figure:
    """Experiment 2: absolute and relative L2 of the residual stream behind one rounded block."""
    names = list(dict.fromkeys(table["model"]))
    measures = {"l2": "L2 of resid_post", "relative_l2": "the same, relative"}
    middle = table.groupby(["model", "source", "layer"])[list(measures)].median()
    with sheet(max(8.4, 2.0 * len(names)), 5.4) as figure:
        grid = figure.subplots(2, len(names), squeeze=False, sharex=True)
        for row, (measure, label) in zip(grid, measures.items(), strict=True):
            for name, axis in zip(names, row, strict=True):
                height = zero_aware(axis, [middle[measure].to_numpy(dtype=float)])
                behind = middle[measure][name].groupby("source")
                _lines(axis, height, {f"rounded in layer {source}": line.droplevel("source") for source, line in behind})
                whole_numbers(axis.xaxis, 10)
            beside(row, f"{label}\n(median over prompts)")
        for name, axis in zip(names, grid[0], strict=True):
            place_title(axis, _bare(name), 0.4)
        for axis in grid[1]:
            axis.set_xlabel("layer")
        legend_outside(figure, grid[0][0])
    return figure


def kv_write_figure(table: pd.DataFrame) -> Figure:
    """Experiment 3: error of the K and V of a new token, written alone and with its prefix, by kernel mode and layer."""
    mean = table.groupby(["tensor", "kernels", "layer"], sort=False)["relative_error"].mean()
    with _panels(2, mean, "mean relative error, alone against jointly") as (figure, axes):
        for tensor, (axis, height) in zip(("K", "V"), axes, strict=True):
            for index, (mode, line) in enumerate(mean[tensor].groupby("kernels", sort=False)):
                look = line_of(index, 1.3, label=f"{mode} kernels")
                axis.plot(line.index.get_level_values("layer"), height(line), **look)
            axis.set_xlabel("layer")
            whole_numbers(axis.xaxis, 10)
            place_title(axis, f"{tensor} of the new token", 5.0)
        legend_outside(figure, axes[0][0])
    return figure


def flips_figure(table: pd.DataFrame) -> Figure:
    """Experiment 4: the first flipped step against the mean KL, with the KL before the flip and the matched protocol."""
    titles = {"mean_kl": "Free, all steps", "mean_kl_before_flip": "Free, before the flip", "matched_mean_kl": "Matched"}
    flipped = table.dropna(subset=["flip_index"])
    with _panels(3, flipped[list(titles)].to_numpy(), "mean KL (nats)") as (figure, axes):
        if flipped.empty:
            axes[0][0].set_title(f"No token flipped in {len(table)} decodes", loc="left")
            return figure
        for (column, title), (axis, height) in zip(titles.items(), axes, strict=True):
            for index, ((mode, strategy), group) in enumerate(flipped.groupby(["kernels", "strategy"], sort=False)):
                known = group.dropna(subset=[column])
                look = line_of(index, 1.3, linestyle="none", alpha=0.7, label=f"{mode} kernels, {strategy}")
                axis.plot(known["flip_index"], height(known[column]), **look)
            axis.set_xlabel("step of the first flipped token")
            place_title(axis, f"{title} ({flipped[column].notna().sum()} texts)", 6.3)
        legend_outside(figure, axes[0][0], columns=2)
    return figure


def ladder_figure(table: pd.DataFrame) -> Figure:
    """Experiment 5: logit error and KL on every rung of precision and order of additions, matched protocol."""
    table = only(table, protocol="matched")
    rungs = list(dict.fromkeys(zip(table["dtype"], table["kernels"], strict=True)))
    with sheet(8.4, 5.2) as figure:
        panels = figure.subplots(2, 1, sharex=True)
        labels = {"rms_logit": "RMS logit difference", "mean_kl": "mean KL (nats)"}
        for axis, (column, label) in zip(panels, labels.items(), strict=True):
            height = zero_aware(axis, [table[column]])
            models = table.groupby("model", sort=False)
            for index, (name, group) in enumerate(models):
                places = [rungs.index(rung) for rung in zip(group["dtype"], group["kernels"], strict=True)]
                at = np.array(places) + (index - (len(models) - 1) / 2) * 0.12
                axis.plot(at, height(group[column]), **line_of(index, 1.3, linestyle="none"), label=_bare(name))
            axis.set_ylabel(label)
        place_title(panels[0], ladder_title_of(table))
        names = [f"{dtype}\n{kernels}".replace("(", "\n(").replace("_inv", "_\ninv") for dtype, kernels in rungs]
        panels[1].set_xticks(range(len(rungs)), names, fontsize=7)
        panels[1].set_xlabel("dtype, and the order in which kernels add")
        legend_outside(figure, panels[0])
    return figure


def gqa_figure(table: pd.DataFrame) -> Figure:
    """One KV head's planted error: how far it spreads, against how many query heads share the head."""
    titles = {
        "share_touched": ("Query heads touched", "share of the layer's query heads"),
        "attn_out": ("The layer's attention output", "relative L2, median"),
        "final": ("The last residual stream", "relative L2, median"),
    }
    with sheet(8.4, 3.4) as figure:
        for axis, (column, (title, label)) in zip(figure.subplots(1, 3), titles.items(), strict=True):
            middle = table.groupby(["tensor", "query_heads_per_kv_head"])[column].median()
            tensors = middle.index.unique("tensor")
            _lines(axis, np.asarray, {f"error planted in {tensor}": middle[tensor] for tensor in tensors})
            powers_of_two(axis, sorted(set(table["query_heads_per_kv_head"])))
            axis.set(xlabel="query heads a KV head", ylabel=label)
            axis.set_ylim(bottom=0)
            place_title(axis, title, 6.3)
        legend_outside(figure, figure.axes[0])
    return figure


def repeated_heads_figure(table: pd.DataFrame) -> Figure:
    """A model against itself: how far apart its paths are at each ratio of query heads to KV heads."""
    modes = list(dict.fromkeys(table["kernels"]))
    with _panels(len(modes), table["rms_logit"].to_numpy(), "RMS logit difference\n(mean over prompts)") as (figure, axes):
        for mode, (axis, height) in zip(modes, axes, strict=True):
            groups = only(table, kernels=mode).groupby(["model", "query_heads_per_kv_head"], sort=False)
            mean = groups["rms_logit"].mean()
            _lines(axis, height, {_bare(model): mean[model].sort_index() for model in mean.index.unique("model")})
            powers_of_two(axis, sorted(set(table["query_heads_per_kv_head"])))
            axis.set_xlabel("query heads a KV head (same function)")
            place_title(axis, mode if "+" in mode else f"{mode} kernels", 6.3)
        legend_outside(figure, axes[0][0])
    return figure


# What they share -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _panels(count: int, values: Any, label: str) -> Iterator[tuple[Figure, list[tuple[Axes, Height]]]]:
    """Panels side by side on one logarithmic scale, zeros in a strip of their own."""
    with sheet(max(8.4, 2.0 * count), 3.6) as figure:
        panels = figure.subplots(1, count, squeeze=False)[0]
        heights = [zero_aware(axis, [np.asarray(values, dtype=float)]) for axis in panels]
        beside(panels, label)
        yield figure, list(zip(panels, heights, strict=True))


def _lines(axis: Axes, height: Height, lines: Mapping[str, pd.Series]) -> None:
    """Lines by label; each has its x in its index."""
    for index, (label, line) in enumerate(lines.items()):
        axis.plot(line.index, height(line), **line_of(index, 1.3), label=label)


def _bare(name: object) -> str:
    return str(name).removeprefix("zoo:")
