"""Figures of what two paths write: KL by step, how long decodes stay the same, and the answers of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvinterp.comparison import COLUMNS, PARTS, Comparison
from kvinterp.reading.results import only
from kvinterp.report.axes import beside, legend_outside, place_title, spread, whole_numbers, zero_aware
from kvinterp.report.style import line_of, of_models, sheet

__all__ = [
    "accuracy_figure",
    "behaviour_figures",
    "drawn_of_models",
    "flipped_decodes",
    "kl_by_step_figure",
    "survival_figure",
]

Draw = Callable[[Mapping[str, pd.DataFrame]], Figure]


def behaviour_figures(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of :class:`kvinterp.experiments.behaviour.Behaviour`, those that have something to show, signed with its models."""
    drawers: dict[str, Draw] = {"kl_by_step": kl_by_step_figure, "survival": survival_figure, "accuracy": accuracy_figure}
    return drawn_of_models("behaviour", drawers, tables, provenance)


def drawn_of_models(
    name: str, drawers: Mapping[str, Draw], tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]
) -> dict[str, Figure]:
    """A figure for each table that has rows, signed with the models and how they were decoded."""
    first = next(iter(provenance.values()))
    more = [f"kernels {first['kernels']}", f"{first['max_new_tokens']} tokens at most", f"until {first['stop']}"]
    return {
        f"{name}_{table.removeprefix(f'{name}_')}": of_models(draw(tables), list(provenance.values()), more)
        for table, draw in drawers.items()
        if len(tables[table])
    }


def flipped_decodes(tables: Mapping[str, pd.DataFrame], paths: tuple[str, str]) -> dict[str, Comparison]:
    """The decodes that flip, each path on its own text, as comparisons without activations: one a model, strategy and seed."""
    found = {}
    of = ["model", "strategy", "seed"]
    free = only(tables["decodes"], protocol="free")
    for place, steps in tables["flip_steps"].groupby(of, sort=False):
        label = dict(zip(of, place, strict=True))
        examples, tokens = (only(table, **label) for table in (free, tables["flip_tokens"]))
        empty = {name: pd.DataFrame(columns=COLUMNS.get(name, ())) for name in PARTS}
        given = {"steps": steps, "examples": examples[examples["diverged"]], "tokens": tokens}
        provenance = {
            "paths": dict(zip("ab", paths, strict=True)),
            "protocol": "free",
            "strategy": label["strategy"],
            "derived": [],
        }
        name = f"{label['model'].removeprefix('zoo:')}, {label['strategy']}, seed {label['seed']}"
        found[name] = Comparison(**{**empty, **given}, provenance=provenance)
    return found


def kl_by_step_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """The median KL of every step, matched and free, a column a model; bands are 95% intervals."""
    table = tables["kl_by_step"]
    models, protocols = list(dict.fromkeys(table["model"])), ("matched", "free")
    with sheet(max(6.4, 2.9 * len(models)), 5.4) as figure:
        grid = figure.subplots(2, len(models), squeeze=False, sharex=True)
        for protocol, row in zip(protocols, grid, strict=True):
            chosen = only(table, protocol=protocol)
            for model, axis in zip(models, row, strict=True):
                height = zero_aware(axis, [chosen[name].dropna() for name in ("median_kl", "low", "high")])
                for index, (strategy, line) in enumerate(only(chosen, model=model).groupby("strategy", sort=False)):
                    look = line_of(index, 1.2, markersize=2.5)
                    low, high = (height(line[end]) for end in ("low", "high"))
                    axis.fill_between(line["step"], low, high, color=look["color"], alpha=0.15, linewidth=0)
                    axis.plot(line["step"], height(line["median_kl"]), **look, label=strategy)
            beside(row, f"median KL (nats), {protocol}")
        _steps(grid, models)
        legend_outside(figure, grid[0][0], side="upper")
    return figure


def survival_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """The share of decodes without a flipped token up to each step (Kaplan and Meier), a panel a model."""
    table = tables["survival"]
    models = list(dict.fromkeys(table["model"]))
    with sheet(max(6.4, 2.9 * len(models)), 3.4) as figure:
        panels = figure.subplots(1, len(models), squeeze=False, sharey=True)
        for model, axis in zip(models, panels[0], strict=True):
            for index, (strategy, line) in enumerate(only(table, model=model).groupby("strategy", sort=False)):
                # Before the first flip all survive.
                x, y = [0.0, *line["step"]], [1.0, *line["survival"]]
                flips = int(line["flips"].sum())
                low, high = ([1.0, *line[f"survival_{end}"].fillna(1.0)] for end in ("low", "high"))
                look = line_of(index, marker="")
                axis.fill_between(x, low, high, step="post", color=look["color"], alpha=0.12, linewidth=0)
                label = f"{strategy}" if len(models) > 1 else f"{strategy}: {flips} flips"
                axis.step(x, y, where="post", **look, label=label)
            axis.set_ylim(-0.03, 1.03)
        panels[0][0].set_ylabel("share of decodes\nwithout a flipped token")
        _steps(panels, models)
        legend_outside(figure, panels[0][0], side="upper")
    return figure


def accuracy_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Right answers on both paths, and their difference with its 95% interval, a line a model and strategy."""
    table = tables["accuracy"].iloc[::-1]
    places = np.arange(len(table))
    with sheet(8.4, max(2.4, 0.32 * len(table) + 1.4)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for index, (side, path) in enumerate((("a", "cached"), ("b", "recompute"))):
            look = line_of(index, 1.2, linestyle="none")
            left.plot(table[f"accuracy_{side}"], places + 0.1 - 0.2 * index, **look, label=path, zorder=3)
        left.set_xlim(-0.03, 1.03)
        left.set_xlabel("share of right answers")
        left.set_yticks(places, [f"{row.model.removeprefix('zoo:')}, {row.strategy}" for row in table.itertuples()])
        ends = spread(table, "difference")
        right.errorbar(table["difference"], places, xerr=ends, **line_of(0, 1.2, linestyle="none"), elinewidth=1)
        right.axvline(0, color="#888888", linewidth=0.8)
        right.set_xlabel("cached less recompute, 95% interval")
        for axis in (left, right):
            axis.grid(axis="x", visible=True)
        place_title(left, f"{int(table['decodes'].sum())} decodes, each path its own text", 4.2)
        place_title(right, "Difference, and what so many examples leave open", 4.6)
        legend_outside(figure, left, side="upper")
    return figure


def _steps(grid: Any, models: Sequence[str]) -> None:
    """Titles over the columns, and steps under them."""
    for model, axis in zip(models, grid[0], strict=True):
        place_title(axis, model.removeprefix("zoo:"), 0.4)
    for axis in grid[-1]:
        axis.set_xlabel("decode step")
        whole_numbers(axis.xaxis, 6)
