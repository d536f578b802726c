"""The figures of mitigations: what each leaves against what it computes, and whether a policy's error adds to the path's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvinterp.report.axes import legend_outside, log_ticks, place_title, zero_aware
from kvinterp.report.style import line_of, of_models, series_of, sheet

__all__ = ["interaction_figure", "mitigate_figures", "mitigation_figure"]


def mitigate_figures(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of :class:`kvinterp.experiments.mitigate.Mitigate`; of policies and paths where they were crossed."""
    drawn = {"mitigations": mitigation_figure(tables["mitigations"])}
    if len(tables["interactions"]):
        drawn["mitigations_interaction"] = interaction_figure(tables["interactions"])
    return {name: of_models(figure, [provenance]) for name, figure in drawn.items()}


def mitigation_figure(table: pd.DataFrame) -> Figure:
    """Divergence left against rows computed a token; paths on the Pareto front are filled."""
    with sheet(7.2, 4.6) as figure:
        axis = figure.subplots()
        height = zero_aware(axis, [table["mean_kl"], table["low"], table["high"]])
        places: dict[tuple[float, float], int] = {}
        for index, row in enumerate(table.to_dict("records")):
            fill = series_of(index).color if row["pareto"] else "#ffffff"
            look = line_of(index, linestyle="none", markersize=8, markeredgewidth=1.4, markerfacecolor=fill)
            x, y = row["rows_a_token"], float(height([row["mean_kl"]])[0])
            axis.plot([x], [y], **look, label=f"{index + 1}  {row['path']}")
            # Those of one place stand one behind the other; their numbers beside each other.
            place = round(float(np.log10(x)), 1), round(float(np.log10(max(y, 1e-300))), 1)
            turn = places[place] = places.get(place, -1) + 1
            axis.annotate(f"{index + 1}", (x, y), (9 + 9 * turn, 4), textcoords="offset points", fontsize=8)
        axis.set_xscale("log")
        log_ticks(axis.xaxis)
        axis.margins(x=0.08)
        axis.set(xlabel="rows that a block computes for each new token", ylabel="mean KL from its recompute path (nats)")
        place_title(axis, "What is left, and what it costs; filled: none is better in one and as good in all")
        legend_outside(figure, axis, 3, "upper")
    return figure


def interaction_figure(table: pd.DataFrame) -> Figure:
    """The mean squared logit error of a policy alone, the path alone, their sum, and both together."""
    with sheet(7.2, 3.9) as figure:
        axis = figure.subplots()
        bars = {
            "policy alone": table["policy_alone"],
            "path alone": table["path_alone"],
            "their sum": table["policy_alone"] + table["path_alone"],
            "both together": table["both"],
        }
        height = zero_aware(axis, list(bars.values()))
        places = np.arange(len(table))
        for index, (label, values) in enumerate(bars.items()):
            look = line_of(index, linestyle="none", markersize=7, label=label)
            axis.plot(places + (index - 1.5) * 0.12, height(values), **look)
        axis.set_xticks(places, table["policy"])
        axis.set_xlim(-0.6, len(table) - 0.4)
        axis.set(xlabel="policy on K and V", ylabel="mean squared logit error")
        place_title(axis, "Does a policy's error add to that of decoding from a cache?")
        legend_outside(figure, axis, 4, "upper")
    return figure
