"""Figures of the telephone game: similarity by hop, final differences, and a map of models and policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvinterp.reading.chains import similarity_named
from kvinterp.reading.numbers import counted
from kvinterp.reading.results import only
from kvinterp.report.axes import broken, legend_outside, place_title, whole_numbers
from kvinterp.report.ink import ink_on
from kvinterp.report.style import SERIES, line_of, looks, of_models, sheet


def chain_figures(found: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures ``chain_curves``, ``chain_deltas`` and ``chain_map``.

    Args:
        found: The tables of :class:`kvinterp.experiments.chain.Chain` by name, ``provenance`` and ``embedder``.
    """
    signed = (list(found["provenance"].values()), [f"similarity: {similarity_named(found['embedder'])}"])
    drawn = {"curves": _curves(found["curves"]), "deltas": _deltas(found["deltas"]), "map": _map(found)}
    with looks():
        return {f"chain_{name}": of_models(figure, *signed) for name, figure in drawn.items()}


def _curves(curves: pd.DataFrame) -> Figure:
    """A panel a model and temperature, a line an arm, with its interval."""
    places = list(curves.groupby(["model", "temperature"], sort=False))
    arms = list(dict.fromkeys(curves["arm"]))
    with sheet(7.4, 0.9 + 2.5 * len(places) + 0.2 * len(arms)) as figure:
        # The legend within a part of the sheet, so that the small print has a place of its own.
        part: Any = figure.subfigures(1, 1)
        panels = part.subplots(len(places), 1, squeeze=False, sharex=True)[:, 0]
        for axes, ((model, temperature), table) in zip(panels, places, strict=True):
            for index, arm in enumerate(arms):
                line = only(table, arm=arm)
                look, (low, high) = line_of(index, 1.2), (line[f"similarity_{end}"] for end in ("low", "high"))
                axes.fill_between(line["hop"], low, high, color=look["color"], alpha=0.12, linewidth=0)
                axes.plot(line["hop"], line["similarity"], **look, label=arm, markevery=max(1, len(line) // 10))
            chains = int(table["chains"].max())
            place_title(axes, f"{model}, temperature {temperature:g}, {counted(chains, 'chain')} an arm")
            axes.set_ylabel("similarity to the first text\n(mean, 95% interval)")
            axes.set_ylim(-0.02, 1.04)
        panels[-1].set_xlabel("hop (0 is the text itself)")
        whole_numbers(panels[-1].xaxis, 10)
        legend_outside(part, panels[0], 2, fontsize=7.5)
    return figure


def _deltas(deltas: pd.DataFrame) -> Figure:
    """The final difference of every arm beside no policy, sorted, those of other seeds hollow."""
    rows = deltas[deltas["arm"] != "cached"].to_dict("records")
    names = [broken(f"{row['model']}, {row['arm']}, T {row['temperature']:g}", 56) for row in rows]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    with sheet(7.4, 1.6 + (0.14 + 0.13 * lines) * len(rows)) as figure:
        axes = figure.subplots()
        for height, row in enumerate(rows):
            null = row["arm"] == "cached, other seeds"
            color = SERIES[3 if null else 0].color
            axes.hlines(height, row["delta_low"], row["delta_high"], color=color, linewidth=1.4)
            axes.plot(row["delta"], height, "o", color=color, markersize=5, markerfacecolor="#ffffff" if null else color)
        axes.axvline(0, color="#888888", linewidth=0.8)
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(
            "final similarity minus that without a policy\n(mean and 95% interval over texts;\nhollow: other seeds, the null)"
        )
        axes.set_title("Final differences, sorted")
    return figure


def _map(found: Mapping[str, Any]) -> Figure:
    """Model and temperature by arm: the final difference."""
    deltas: pd.DataFrame = found["deltas"]
    of = deltas[deltas["arm"] != "cached"]
    names = of["model"] + ", T " + of["temperature"].map("{:g}".format)
    table = of.assign(row=names).pivot(index="row", columns="arm", values="delta")
    table = table[[arm for arm in dict.fromkeys(found["curves"]["arm"]) if arm in table.columns]]
    limit = float(np.nanmax(np.abs(table.to_numpy()))) or 1.0
    with sheet(2.6 + 1.0 * table.shape[1], 1.8 + 0.5 * table.shape[0]) as figure:
        axes = figure.subplots()
        image = axes.imshow(table.to_numpy(), cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        axes.grid(visible=False)
        for (down, along), value in np.ndenumerate(table.to_numpy()):
            if np.isfinite(value):
                color = ink_on(image.cmap(image.norm(value)))
                axes.text(along, down, f"{value:+.2f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_yticks(range(len(table)), map(broken, table.index), fontsize=7)
        axes.set_xticks(range(table.shape[1]), table.columns, rotation=30, ha="right", fontsize=7)
        place_title(axes, "Final similarity minus that without a policy", 3.0)
        figure.colorbar(image, ax=axes, label="difference")
    return figure
