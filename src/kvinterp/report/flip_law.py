"""The figure of the law of flips: how many came against how many were foretold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvinterp.report.axes import legend_outside, log_ticks, place_title
from kvinterp.report.style import line_of, of_models, series_of, sheet

__all__ = ["flip_law_figure"]


def flip_law_figure(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> Figure:
    """Foretold flips with the interval of such counts, and those that came, a line a path and unembedding.

    Args:
        tables: Those of :class:`kvinterp.experiments.flip_law.FlipLaw`.
        provenance: Its provenance.
    """
    law = tables["law"]
    with sheet(7.6, 1.6 + 0.36 * len(law)) as figure:
        axis = figure.subplots()
        for index, (name, group) in enumerate(law.groupby("unembedding", sort=False)):
            y = -group.index.to_numpy(float)
            known = group["foretold"].notna().to_numpy()
            bars = np.abs(group[["low", "high"]].to_numpy(float).T - group["foretold"].to_numpy(float))[:, known]
            look = line_of(index, 1.3, linestyle="none", elinewidth=1.2, markerfacecolor="#ffffff")
            axis.errorbar(group["foretold"][known], y[known], xerr=bars, **look, label=f"foretold, {name}")
            look = line_of(index, linestyle="none", markerfacecolor=series_of(index).color)
            axis.plot(group["flips"], y, **look, label=f"came, {name}")
        axis.set_yticks(-law.index.to_numpy(float), [str(path) for path in law["path"]])
        axis.set_xscale("symlog", linthresh=1)
        log_ticks(axis.xaxis)
        # Marks at 0 are seen whole.
        axis.set_xlim(-0.1, max(1.2, axis.get_xlim()[1]))
        axis.set(xlabel=f"flips of {int(law['steps'].iloc[0])} steps")
        place_title(axis, "Flips foretold from margins, errors and the grid (95% of such counts), and those that came")
        legend_outside(figure, axis, 2, "upper")
    return of_models(figure, [provenance])
