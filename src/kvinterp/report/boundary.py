"""Figures of flips and margins: flip step against KL under each protocol, and how well the margin tells a flip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvinterp.reading.results import only
from kvinterp.report.axes import beside, legend_outside, place_title, whole_numbers, zero_aware
from kvinterp.report.behaviour import drawn_of_models
from kvinterp.report.style import line_of, sheet

__all__ = ["boundary_figures", "flips_figure", "prediction_figure"]

_TITLES = {"mean_kl": "Free, all steps", "mean_kl_before_flip": "Up to the flip", "matched_mean_kl": "Matched, all steps"}


def boundary_figures(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of :class:`kvinterp.experiments.boundary.Boundary`, those that have something to show, signed with its models."""
    # A condition without a flip has neither a curve nor a place on it.
    known = dict(tables) | {"roc": tables["roc"].dropna(subset=["true_positive_rate"])}
    drawers = {"boundary_flips": flips_figure, "roc": prediction_figure}
    return drawn_of_models("boundary", drawers, known, provenance)


def flips_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """The step of the first flip against the mean KL: free, up to the flip, and matched."""
    flips = tables["boundary_flips"]
    with sheet(8.6, 3.7) as figure:
        panels = figure.subplots(1, 3)
        values = [flips[name] for name in _TITLES]
        for (column, title), axis in zip(_TITLES.items(), panels, strict=True):
            height = zero_aware(axis, values)
            for index, (model, group) in enumerate(flips.groupby("model", sort=False)):
                look = line_of(index, 1.2, linestyle="none", alpha=0.7)
                axis.plot(group["flip_index"], height(group[column]), **look, label=str(model).removeprefix("zoo:"))
            axis.set_xlabel("step of the first flipped token")
            whole_numbers(axis.xaxis, 6)
            place_title(axis, title, 6.2)
        beside(panels, f"mean KL (nats) of {len(flips)} decodes that flip")
        legend_outside(figure, panels[0], side="upper")
    return figure


def prediction_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """How well the margin tells which step flips (ROC), and how often steps flip beside the chance that was predicted."""
    curves, bins = tables["roc"], tables["calibration"]
    areas = tables["prediction"].set_index(["model", "strategy"])["auc"]
    models = list(dict.fromkeys(curves["model"]))
    strategies = list(dict.fromkeys(tables["prediction"]["strategy"]))
    with sheet(max(6.4, 2.9 * len(models)), 5.8) as figure:
        grid = figure.subplots(2, len(models), squeeze=False)
        heights = [zero_aware(axis, [bins["observed"]]) for axis in grid[1]]
        for model, above, below, height in zip(models, *grid, heights, strict=True):
            above.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
            for index, strategy in enumerate(strategies):
                curve, found = (only(table, model=model, strategy=strategy) for table in (curves, bins))
                if len(curve):
                    look = line_of(index, marker="", label=f"{strategy}: area {areas[model, strategy]:.3f}")
                    above.plot(curve["false_positive_rate"], curve["true_positive_rate"], **look)
                ends = [np.abs(height(found["observed"]) - height(found[end])) for end in ("low", "high")]
                look = line_of(index, linestyle="none", elinewidth=0.7, label=strategy)
                below.errorbar(found["predicted"].clip(lower=1e-6), height(found["observed"]), ends, **look)
            above.legend(loc="lower right", fontsize=6.5)
            above.set(xlabel="share of other steps", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
            place_title(above, model.removeprefix("zoo:"), 0.4)
            equal = np.geomspace(1e-6, 1, 20)
            below.plot(equal, equal, color="#888888", linewidth=0.8)
            below.set_xscale("log")
            below.set(xlabel="chance that a greedy token flips", xlim=(4e-7, 2.5))
            below.set_xticks([1e-6, 1e-4, 1e-2, 1.0], ["below 1e-6", "1e-4", "0.01", "1"])
            below.minorticks_off()
        grid[0][0].set_ylabel("share of flips with a margin\nbelow the threshold")
        grid[1][0].set_ylabel("steps that flip\n(grey: as predicted)")
    return figure
