"""Figures of what policies do to keys and values, and of what that does to behaviour."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvinterp.behaviour.scores import AGAIN, METRICS
from kvinterp.reading.numbers import short
from kvinterp.reading.results import only
from kvinterp.report.axes import legend_outside, on_lines, place_title
from kvinterp.report.style import SERIES, Series, of_models, series_of, sheet


def kv_error_figures(result: tuple[Mapping[str, pd.DataFrame], Mapping[str, Any]]) -> dict[str, Figure]:
    """The figures ``kv_error``, ``kv_error_noise`` and, where there are contrasts, ``kv_error_contrasts``.

    Args:
        result: That of :class:`kvinterp.experiments.kv_error.KvError`.
    """
    tables, summary = result
    drawn = {"kv_error": scores_figure(tables["scores"]), "kv_error_noise": bits_figure(tables["scores"])}
    if len(tables["contrasts"]):
        drawn["kv_error_contrasts"] = contrasts_figure(tables["contrasts"])
    return {name: of_models(figure, [summary["provenance"]]) for name, figure in drawn.items()}


# Figures ---------------------------------------------------------------------------------------------------------------


def equivalent_noise_figure(result: tuple[pd.DataFrame, pd.DataFrame, Mapping[str, Any]]) -> Figure:
    """Size, bias and flipped signs of the error of every policy, K and V, smallest error first.

    Args:
        result: That of :class:`kvinterp.experiments.equivalent_noise.EquivalentNoise`: a table by policy, layer, tensor and KV
            head, one by policy and tensor, and the summary.
    """
    table, wholes, summary = result
    order = wholes.groupby("policy")["relative_rms"].max().sort_values().index.tolist()
    bits = wholes.groupby("policy")["bits"].mean()
    columns = {"relative_rms": "RMS error, relative", "bias": "bias, relative", "sign_flips": "share of signs flipped"}
    with sheet(8.4, 1.3 + 0.3 * len(order)) as figure:
        panels = figure.subplots(1, len(columns), sharey=True)
        for axes, (column, label) in zip(panels, columns.items(), strict=True):
            for index, tensor in enumerate(("K", "V")):
                series, shift = SERIES[index], (index - 0.5) * 0.26
                here, places = (only(each, tensor=tensor) for each in (wholes, table))
                ends = places.groupby("policy")[column].agg(["min", "max"]).reindex(order)
                heights = np.arange(len(order)) + shift
                axes.hlines(heights, ends["min"], ends["max"], color=series.color, linewidth=1.2, alpha=0.6)
                values = here.set_index("policy")[column].reindex(order)
                axes.plot(values, heights, series.marker, color=series.color, markersize=4.5, label=tensor)
            axes.set_xlabel(label)
            on_lines(axes)
        _log(panels[0], [*table["relative_rms"], *wholes["relative_rms"]])
        for height, name in enumerate(order):
            if not (wholes.loc[wholes["policy"] == name, "relative_rms"] > 0).any():
                panels[0].annotate("exactly 0", (0.02, height), xycoords=("axes fraction", "data"), va="center", fontsize=7)
        labels = [f"{_wrapped(name)} ({short(bits[name])} bits)" for name in order]
        _named(panels[0], labels)
        legend_outside(figure, panels[0], side="upper")
    return of_models(figure, [summary["provenance"]])


def scores_figure(scores: pd.DataFrame) -> Figure:
    """Every policy's scores: percent of control, and of what the control has none of, the share itself."""
    order = list(dict.fromkeys(scores["policy"]))[::-1]
    readings = list(dict.fromkeys(scores.loc[scores["policy"] != AGAIN, "reading"]))
    with sheet(9.4, 1.6 + 2 * (0.5 + max(0.25, 0.17 * len(readings)) * len(order))) as figure:
        panels = figure.subplots(2, 3, sharey=True)
        for axes, metric in zip(panels.flat, METRICS, strict=True):
            of = only(scores, metric=metric)
            share = metric in ("loops", "outside")
            value, scale = ("value", 100.0) if share else ("percent", 1.0)
            for index, reading in enumerate(readings):
                here = of[(of["reading"] == reading) | (of["policy"] == AGAIN)].set_index("policy").reindex(order)
                heights = np.arange(len(order)) + (index - (len(readings) - 1) / 2) * 0.3
                color, marker = SERIES[index].color, SERIES[index].marker
                # The ends of a share are those of its difference from control, which is paired.
                low, high = (here[f"percent_{e}"] if not share else here["control"] + here[e] for e in ("low", "high"))
                axes.hlines(heights, scale * low, scale * high, color=color, linewidth=1.2)
                axes.plot(scale * here[value], heights, marker, color=color, markersize=4, label=f"prefill={reading}")
            told = f"{METRICS[metric].meaning}, %" + ("" if share else " of control")
            place_title(axes, told, 6.8)
            if share:
                axes.set_xlim(-2, max(5, 105 * (of["control"] + of["high"]).max()))
            if len(of) or not share:
                axes.axvline(scale * of["control"].iloc[0] if share else 100, **_CONTROL)
            if metric == "perplexity":
                _log(axes, of[["percent_low", "percent_high"]], least=300)
            on_lines(axes)
        for axes in panels[:, 0]:
            _named(axes, [_wrapped(name) for name in order])
        legend_outside(figure, panels[0][0], side="upper")
    return figure


def bits_figure(scores: pd.DataFrame) -> Figure:
    """Percent of control against the error in K and V: noise and formats on one axis, the arms of other designs in grey."""
    metrics = ("instructions", "next_token", "problems")
    known = scores[(scores["relative_rms"] > 0) & scores["percent"].notna()]
    readings = list(dict.fromkeys(known["reading"])) or ["stored"]
    most = known["bits"].max()
    own = known[known["design"].isin(["grid", "given"])]
    own = (known if own.empty else own).sort_values("relative_rms")
    looks = {policy: series_of(index) for index, policy in enumerate(dict.fromkeys(own["policy"]))}
    # As many names beside each other as the sheet has room for.
    columns = max(1, min(5, 130 // (8 + max(map(len, looks), default=0))))
    with sheet(9.4, 0.8 + 0.17 * (len(looks) // columns + 1) + 2.6 * len(readings)) as figure:
        panels = figure.subplots(len(readings), len(metrics), sharex=True, sharey=True, squeeze=False)
        for row, reading in zip(panels, readings, strict=True):
            for axes, metric in zip(row, metrics, strict=True):
                of = only(known, metric=metric, reading=reading).sort_values("relative_rms")
                for policy, here in of.groupby("policy", sort=False):
                    look, size = looks.get(policy, Series("#808080", ".", "-")), here["bits"].iloc[0]
                    label = f"{policy} ({short(size)} bits)" if size < most else str(policy)
                    shown = {"label": label} if policy in looks else {}
                    axes.plot(here["relative_rms"], here["percent"], look.marker, color=look.color, **shown)
                    axes.vlines(
                        here["relative_rms"], here["percent_low"], here["percent_high"], color=look.color, linewidth=1
                    )
                axes.axhline(100, **_CONTROL)
                place_title(axes, f"{METRICS[metric].meaning}, prefill={reading}", 6.9)
            row[0].set_ylabel("% of control")
        for axes in panels.flat:
            _log(axes, known["relative_rms"])
        for axes in panels[-1]:
            axes.set_xlabel("RMS error of K and V, relative")
        legend_outside(figure, panels[0][0], columns, side="upper", fontsize=7.5)
    return figure


def contrasts_figure(contrasts: pd.DataFrame) -> Figure:
    """Contrasts of the designs, and stored against exact, in three scores."""
    metrics = {"instructions": "share followed", "problems": "share solved", "perplexity": "log of perplexity"}
    order = list(dict.fromkeys(contrasts["contrast"]))[::-1]
    with sheet(9.4, 1.2 + 0.26 * len(order)) as figure:
        panels = figure.subplots(1, len(metrics), sharey=True)
        for axes, (metric, label) in zip(panels, metrics.items(), strict=True):
            here = only(contrasts, metric=metric).set_index("contrast").reindex(order)
            axes.hlines(range(len(order)), here["low"], here["high"], color=SERIES[0].color, linewidth=1.2)
            axes.plot(here["difference"], range(len(order)), "o", color=SERIES[0].color, markersize=4)
            axes.axvline(0, **_CONTROL)
            axes.set_xlabel(f"difference, {label}")
            on_lines(axes)
        _named(panels[0], [_wrapped(name) for name in order], 6.5)
    return figure


_CONTROL: dict[str, Any] = {"color": "#555555", "linewidth": 0.9, "linestyle": (0, (3, 2))}
"""The line at which nothing differs from control."""


def _named(axes: Axes, names: Sequence[str], size: float = 7) -> None:
    """Lines one above the other, with their names."""
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set_ylim(-0.6, len(names) - 0.4)


def _wrapped(name: str) -> str:
    """A policy or a contrast in short lines, broken behind commas and between words."""
    lines = textwrap.wrap(name.replace(",", ",\0 "), 32, break_on_hyphens=False)
    return "\n".join(lines).replace("\0 ", "").replace("\0", "")


def _log(axes: Axes, values: Any, least: float = 0.0) -> None:
    """A logarithmic x axis with a few ticks in plain digits, where some value is above ``least``."""
    known = np.asarray(values, dtype=float).reshape(-1)
    known = known[np.isfinite(known) & (known > 0)]
    if not known.size or known.max() <= least:
        return
    axes.set_xscale("log")
    low, high = np.floor(np.log10(known.min())), np.ceil(np.log10(known.max()))
    wide = known.max() > 30 * known.min()
    steps = np.arange(low, high + 1, max(1, (high - low) // 3) if wide else 1)
    ticks = [first * 10.0**power for power in steps for first in ((1,) if wide else (1, 2, 5))]
    ends = known.min() / 1.3, known.max() * 1.3
    axes.set_xlim(*ends)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if ends[0] <= tick <= ends[1]]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
