"""Figures of drift by layer: where the paths come apart, how that grows, what the paper's selection shows, and the heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from kvinterp.metrics.massive import SUFFIX
from kvinterp.reading.layer_drift import EVERY_STEP, ONE_STEP, amplification_title, drift_title, heads_title, paper_title
from kvinterp.reading.results import only
from kvinterp.report.axes import (
    Height,
    beside,
    broken,
    color_bar,
    headed,
    legend_outside,
    log_norm,
    mapped,
    whole_numbers,
    zero_aware,
)
from kvinterp.report.style import line_of, of_models, sheet

__all__ = ["layer_drift_figures"]

_LABELS = {"l2": "L2 of resid_post", "relative_l2": "relative L2", "cosine": "cosine"}


def layer_drift_figures(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of :class:`kvinterp.experiments.layer_drift.LayerDrift`, from its tables and the provenance of each model."""
    means = tables["drift_by_layer"]
    if means.empty:
        return {}
    drawn = {
        "layer_drift": drift_figure(means),
        "layer_drift_decode_step_1": paper_figure(means, tables["layer_drift_rows"]),
        "layer_drift_amplification": amplification_figure(tables["amplification"]),
    }
    if len(tables["head_kl"]):
        drawn["layer_drift_heads"] = heads_figure(tables["head_kl"], tables["head_correlation"])
    return {name: of_models(figure, list(provenance.values())) for name, figure in drawn.items()}


def drift_figure(means: pd.DataFrame) -> Figure:
    """Absolute and relative drift by layer on the same tokens, with and without the largest dimensions, beside the null."""
    matched, null = (only(means, selection=EVERY_STEP, protocol=name) for name in ("matched", "same-path null"))

    def lines(model: str, measure: str) -> Iterator[tuple[str, pd.DataFrame]]:
        for label, table, name in (
            ("cached against recompute", matched, measure),
            ("without the three largest dimensions", matched, f"{measure}{SUFFIX}"),
            ("null: recompute among more rows, no cache", null, measure),
        ):
            yield label, only(table, model=model, measure=name)

    return _grid(list(dict.fromkeys(means["model"])), ("l2", "relative_l2"), lines, drift_title(means))


def paper_figure(means: pd.DataFrame, counts: pd.DataFrame) -> Figure:
    """What the paper reports, L2 and cosine at its decode step 1, of all rows and of those where both read the same tokens."""
    chosen = only(means, selection=ONE_STEP, protocol="free")

    def lines(model: str, measure: str) -> Iterator[tuple[str, pd.DataFrame]]:
        for label, rule in (
            ("every row, as in the paper", "none"),
            ("rows where both read the same tokens", "same tokens"),
        ):
            yield label, only(chosen, model=model, measure=measure, rule=rule)

    return _grid(list(dict.fromkeys(means["model"])), ("l2", "cosine"), lines, paper_title(counts))


def amplification_figure(table: pd.DataFrame) -> Figure:
    """How many times the drift of the layer before each layer's is."""
    models, known = list(dict.fromkeys(table["model"])), table.dropna(subset=["ratio"])
    labels = {
        "l2": "L2",
        f"l2{SUFFIX}": "L2 without the three largest dimensions",
        "relative_l2": "relative L2",
        f"relative_l2{SUFFIX}": "relative L2 without the three largest dimensions",
    }
    with sheet(max(7.2, 2.6 * len(models)), 3.9) as figure:
        inner: FigureBase = figure.subfigures(1, 1, squeeze=False)[0, 0]
        panels = inner.subplots(1, len(models), squeeze=False, sharey=True)[0]
        heights = [zero_aware(axis, [known[["ratio", "low", "high"]].to_numpy()]) for axis in panels]
        for axis, height, model in zip(panels, heights, models, strict=True):
            for index, (measure, label) in enumerate(labels.items()):
                mine = only(known, model=model, measure=measure)
                _line(axis, height, mine, "ratio", index, label, (index - 1.5) * 0.08)
            axis.axhline(1, color="#777777", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
            _by_layers(axis, table["layer"])
            axis.set_title(_bare(model), fontsize=9)
        panels[0].set_ylabel("drift over that of the layer before\n(median example, 95% interval)")
        headed(figure, amplification_title(table))
        legend_outside(inner, panels[0], 2)
    return figure


def heads_figure(heads: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """Attention KL of every head, and how the heads' errors go together within KV groups and across them."""
    models = list(dict.fromkeys(heads["model"]))
    with sheet(max(7.2, 2.6 * len(models)), 5.6) as figure:
        inner: FigureBase = figure.subfigures(1, 1, squeeze=False)[0, 0]
        grid = inner.subplots(2, len(models), squeeze=False)
        norm, image = log_norm(heads["kl"].to_numpy(float)), None
        for axis, model in zip(grid[0], models, strict=True):
            table = only(heads, model=model).pivot(index="layer", columns="head", values="kl")
            image = mapped(axis, table.to_numpy(float), norm)
            whole_numbers(axis.xaxis, 8)
            whole_numbers(axis.yaxis, 8)
            axis.set(xlabel="query head")
            axis.set_title(_bare(model), fontsize=9)
        grid[0][0].set_ylabel("layer")
        color_bar(inner, image, list(grid[0]), "mean attention KL (nats);\nblank: exactly 0")
        for axis, model in zip(grid[1], models, strict=True):
            for index, kind in enumerate(("within", "across", "within - across")):
                line = only(correlations, model=model, kind=kind).dropna(subset=["r"])
                label = {"within": "within a KV group", "across": "across KV groups"}.get(kind, "difference")
                _line(axis, np.asarray, line, "r", index, label, (index - 1) * 0.1)
            axis.axhline(0, color="#777777", linewidth=0.8, zorder=1)
            _by_layers(axis, heads["layer"])
            axis.set_ylim(-1.05, 1.05)
        grid[1][0].set_ylabel("Spearman correlation of\nhead errors (95% interval)")
        headed(figure, heads_title(heads, correlations))
        legend_outside(inner, grid[1][0], 3)
    return figure


# What they share -------------------------------------------------------------------------------------------------------


def _grid(models: Sequence[str], measures: Sequence[str], lines: Any, title: str) -> Figure:
    """A row a measure and a column a model, each row on one scale; a cosine's is linear."""
    with sheet(max(7.2, 2.6 * len(models)), 5.4) as figure:
        inner: FigureBase = figure.subfigures(1, 1, squeeze=False)[0, 0]
        grid = inner.subplots(len(measures), len(models), squeeze=False, sharex=True)
        for row, measure in zip(grid, measures, strict=True):
            drawn = {model: list(lines(model, measure)) for model in models}
            values = [table[["median", "low", "high"]].to_numpy(float) for each in drawn.values() for _, table in each]
            for axis, model in zip(row, models, strict=True):
                height: Height = np.asarray if measure == "cosine" else zero_aware(axis, values)
                for index, (label, table) in enumerate(drawn[model]):
                    _line(axis, height, table, "median", index, label, (index - 1) * 0.08)
                if measure == "cosine":
                    least = np.nanmin([0.0, *(np.nanmin(each, initial=0.0) for each in values)])
                    axis.set_ylim(least - 0.05, 1.05)
            beside(row, f"{_LABELS[measure]}\n(median, 95% interval)")
        for axis, model in zip(grid[0], models, strict=True):
            axis.set_title(_bare(model), fontsize=9)
        for axis in grid[-1]:
            whole_numbers(axis.xaxis, 10)
            axis.set_xlabel("layer")
        headed(figure, title)
        legend_outside(inner, grid[0][0], 2)
    return figure


def _line(axis: Axes, height: Height, table: pd.DataFrame, column: str, index: int, label: str, shift: float) -> None:
    """A line over the layers with its intervals as bars, moved sideways so that those of one place are all seen."""
    look = line_of(index)
    x = table["layer"].to_numpy(float) + shift
    axis.plot(x, height(table[column]), **look, label=label)
    axis.vlines(x, height(table["low"]), height(table["high"]), color=look["color"], linewidth=1.2)


def _by_layers(axis: Axes, layers: pd.Series) -> None:
    whole_numbers(axis.xaxis, 10)
    axis.set_xlim(layers.min() - 0.5, layers.max() + 0.5)
    axis.set_xlabel("layer")


def _bare(name: str) -> str:
    return broken(name.removeprefix("zoo:"), 26)
