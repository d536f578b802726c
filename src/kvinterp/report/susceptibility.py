"""The figure of noise in K and V: how often tokens flip, and whether that was to be expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvinterp.reading.numbers import short
from kvinterp.report.axes import legend_outside, log_ticks, place_title, spread
from kvinterp.report.style import line_of, of_models, sheet

__all__ = ["susceptibility_figure"]


def susceptibility_figure(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> Figure:
    """Flip rate against the size of the noise by class of margin, and the observed rate against the predicted chance.

    Args:
        tables: Those of :class:`kvinterp.experiments.susceptibility.Susceptibility`.
        provenance: Its provenance.
    """
    with sheet(8.4, 3.9) as figure:
        left, right = figure.subplots(1, 2)
        _rates(left, tables["rates"])
        _calibration(right, tables["calibration"])
        legend_outside(figure, left, 3, "upper")
    return of_models(figure, [provenance])


def _rates(axis: Axes, rates: pd.DataFrame) -> None:
    for index, (number, line) in enumerate(rates.groupby("bin")):
        bounds = f"{short(line['margin_low'].min())} to {short(line['margin_high'].max())}"
        label = "all steps" if number == -1 else f"margin {bounds} logits"
        look = line_of(index, 1.3, elinewidth=0.7, label=label)
        axis.errorbar(line["size"], line["rate"], spread(line, "rate"), **look)
    axis.axhline(0.5, color="#888888", linewidth=0.8)
    axis.set_xscale("log")
    log_ticks(axis.xaxis)
    axis.set_ylim(-0.03, 1.03)
    axis.set(xlabel="size of the noise in K and V", ylabel="share of steps that flip")
    place_title(axis, "Flips by noise and margin, 95% intervals", 4.2)


def _calibration(axis: Axes, table: pd.DataFrame) -> None:
    axis.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
    look = line_of(0, 1.3, linestyle="none", elinewidth=0.7)
    axis.errorbar(table["predicted"], table["observed"], spread(table, "observed"), **look)
    axis.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axis.set(xlabel="chance predicted from margin and logit noise", ylabel="share of steps that flip")
    place_title(axis, f"Expected? {int(table['steps'].sum())} steps; grey: as predicted", 4.2)
