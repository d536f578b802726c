"""The figures of a comparison, drawn from its tidy tables alone.

Every ``draw_*`` draws into a figure or a part of one; :func:`figures` makes one file's worth of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D

from kvinterp.comparison import Comparison, mean_error
from kvinterp.reading.numbers import short, upper
from kvinterp.reading.precision import ladder_title
from kvinterp.reading.results import decoded, only, unit_roundoff
from kvinterp.reading.titles import attention_title, drift_title, kl_title, kv_title
from kvinterp.report.axes import (
    color_bar,
    legend_below,
    log_norm,
    mapped,
    medians,
    place_title,
    quartiles,
    shift_of,
    whole_numbers,
    zero_aware,
)
from kvinterp.report.ink import ink_on
from kvinterp.report.style import CMAP, line_of, series_of, sheet, signed, small_print

Labelled = Mapping[str, Comparison]

FIGURES = {
    "kl_by_step": "KL by step",
    "drift_by_layer": "drift by layer",
    "attention_by_head": "attention KL by layer and head",
    "kv_by_position": "K and V error by position",
}


# Whole figures ---------------------------------------------------------------------------------------------------------


def figures(comparisons: Labelled) -> dict[str, Figure]:
    """One figure of each kind that the tables can give, by the names in :data:`FIGURES`.

    Args:
        comparisons: Comparisons of one model by what tells them apart; all share the figures of KL and drift, the first
            gives those of attention and of K and V.
    """
    first = {"": next(iter(comparisons.values()))}
    made = {}
    for name, (table, _, _) in _DRAWN.items():
        given = comparisons if name in _SHARED else first
        if any(len(getattr(c, table)) for c in given.values()):
            made[name] = figure_named(name, given)
    return made


def figure_named(name: str, comparisons: Labelled) -> Figure:
    """The figure of one of the names in :data:`FIGURES`."""
    _, draw, height = _DRAWN[name]
    return figure_of(draw, comparisons, (5.6, height))


def overview(kl: Labelled, drift: Labelled, attention: Labelled, kv: Labelled) -> Figure:
    """The four figures in one, for a page that has room for one picture: of each what it shows, by what tells them apart."""
    given = (kl, drift, attention, kv)
    with sheet(10.4, 7.2) as figure:
        grid: Any = figure.subfigures(2, 2, wspace=0.03, hspace=0.04)
        for target, (_, draw, _), lines in zip(grid.flat, _DRAWN.values(), given, strict=True):
            draw(target, lines)
        provenances = [c.provenance for lines in given for c in lines.values()]
        signed(figure, small_print(provenances, 230), provenances)
    return figure


def figure_of(draw: Any, comparisons: Labelled, size: tuple[float, float]) -> Figure:
    """A figure of its own, of a width and height in inches, with one of the ``draw_*`` functions; provenance in small print."""
    with sheet(*size) as figure:
        draw(figure, comparisons)
        provenances = [c.provenance for c in comparisons.values()]
        signed(figure, small_print(provenances, round(size[0] * 22)), provenances)
    return figure


# KL by step ------------------------------------------------------------------------------------------------------------


def draw_kl(target: FigureBase, comparisons: Labelled) -> None:
    """KL at every step: a point an example, a line for the median, exact zeros in a strip, flips marked."""
    axes = target.subplots()
    frames = {label: c.steps for label, c in comparisons.items() if not c.steps.empty}
    height = zero_aware(axes, [frame["kl"] for frame in frames.values()])
    flipped = False
    for index, (label, frame) in enumerate(frames.items()):
        series, shift = series_of(index), shift_of(index, len(frames))
        name = f"{label}, median" if frame["example"].nunique() > 1 else label
        medians(axes, frame, "kl", height, index, name, size=2.6, alpha=0.4, shift=shift)
        first = frame[frame["flipped"] & ~frame["after_flip"]]
        flipped = flipped or not first.empty
        axes.plot(first["step"] + shift, height(first["kl"]), "X", color="#000000", markersize=7, zorder=4)
        axes.plot(first["step"] + shift, height(first["kl"]), "X", color=series.color, markersize=4, zorder=5)
    whole_numbers(axes.xaxis)
    axes.set(xlabel="decode step (0 is the token the prefill decides)", ylabel="KL of next-token distributions (nats)")
    place_title(axes, kl_title(frames))
    handles, labels = axes.get_legend_handles_labels()
    if flipped:
        handles.append(Line2D([], [], marker="X", color="#000000", linestyle="none", markersize=6))
        labels.append("first flipped token")
    legend_below(axes, handles, labels)


# Drift by layer --------------------------------------------------------------------------------------------------------


def draw_drift(target: FigureBase, comparisons: Labelled) -> None:
    """Relative L2 of the residual stream by layer: median and quartiles over examples and steps from 1 on."""
    axes = target.subplots()
    lines: dict[str, pd.DataFrame] = {}
    for label, comparison in comparisons.items():
        frame = _later(comparison, comparison.layers)
        for site in frame["site"].unique():
            name = label if frame["site"].nunique() == 1 else f"{label}, {site}" if len(comparisons) > 1 else str(site)
            of_site = only(frame, site=site).groupby("layer")["relative_l2"]
            lines[name] = of_site.quantile([0.25, 0.5, 0.75]).unstack()
    height = zero_aware(axes, [line.to_numpy() for line in lines.values()])
    for index, (name, line) in enumerate(lines.items()):
        quartiles(axes, line, height, index, shift_of(index, len(lines)), name, ends="_")
    whole_numbers(axes.xaxis)
    sites = sorted({str(site) for comparison in comparisons.values() for site in comparison.layers["site"].unique()})
    what = sites[0] if len(sites) == 1 else "residual stream"
    axes.set(xlabel="layer", ylabel=f"relative L2 difference of\n{what} (median, quartiles)")
    place_title(axes, drift_title(lines, what if len(sites) == 1 else "what was recorded"))
    legend_below(axes, *axes.get_legend_handles_labels())


def _later(comparison: Comparison, frame: pd.DataFrame) -> pd.DataFrame:
    """The steps from 1 on at which both paths hold the same text; step 0 where there is no other."""
    found = decoded(comparison, frame)
    return found if len(found) else comparison.same_text(frame)


# Attention by layer and head -------------------------------------------------------------------------------------------


def draw_attention(target: FigureBase, comparisons: Labelled) -> None:
    """Mean KL of the attention pattern by layer and head, over examples and steps from 1 on."""
    axes = target.subplots()
    (label, comparison) = next(iter(comparisons.items()))
    frame = _later(comparison, comparison.heads)
    table = frame.groupby(["layer", "head"])["kl"].mean().unstack()
    values = table.to_numpy()
    norm = log_norm(values)
    image = mapped(axes, values, norm)
    _mark_cells(axes, values, norm)
    axes.set_xticks(range(len(table.columns)), table.columns) if len(table.columns) <= 16 else whole_numbers(axes.xaxis)
    axes.set_yticks(range(len(table.index)), table.index) if len(table.index) <= 16 else None
    axes.set(xlabel="query head", ylabel="layer")
    if (values > 0).any():
        color_bar(target, image, axes, "mean KL of attention (nats, log scale)")
    derived = " (derived)" * ("pattern" in comparison.derived)
    place_title(axes, _led(label, attention_title(table, derived)))


def _led(label: str, sentence: str) -> str:
    """A title that begins with what it is about, where that has a name."""
    return f"{label}: {sentence}" if label else upper(sentence)


def _mark_cells(axes: Axes, values: np.ndarray, norm: LogNorm) -> None:
    """Writes the number into each cell where there is room, and 0 where there is no difference at all."""
    if values.size > 64:
        for row, column in zip(*np.nonzero(values == 0), strict=True):
            axes.text(column, row, "0", ha="center", va="center", fontsize=5, color="#000000")
        return
    size = 7 if values.shape[1] <= 8 else 5.5
    for row, column in np.ndindex(*values.shape):
        value = values[row, column]
        shown = "0" if value == 0 else short(value, 0)
        color = ink_on(colormaps[CMAP](norm(value))) if value > 0 else "#000000"
        axes.text(column, row, shown, ha="center", va="center", fontsize=size, color=color)


# K and V by position ---------------------------------------------------------------------------------------------------


def draw_kv(target: FigureBase, comparisons: Labelled) -> None:
    """Relative error of K and of V by layer and absolute position, in the example that decoded most; blank is exactly 0."""
    (label, comparison) = next(iter(comparisons.items()))
    every = comparison.same_text(comparison.kv_positions)
    if every.empty:
        axes = target.subplots()
        axes.set_axis_off()
        place_title(axes, _led(label, "no step after the prefill at which both paths hold the same text"))
        return
    drawn = comparison.examples[comparison.examples["example"].isin(every["example"])]
    example = int(drawn.sort_values("steps", kind="stable")["example"].iloc[-1])
    prompt = int(comparison.examples.set_index("example")["prompt_tokens"].loc[example])
    frame = only(every, example=example)
    means = mean_error(frame, ("tensor", "layer", "position"))
    of = "where both paths hold them" if comparison.provenance.get("lets_go") else ""
    tensors = [name for name in ("K", "K before RoPE", "V") if (frame["tensor"] == name).any()]
    panels = np.atleast_1d(target.subplots(len(tensors), 1, sharex=True))
    norm = log_norm(means.to_numpy())
    for axes, tensor in zip(panels, tensors, strict=True):
        table = means[tensor].unstack()
        table = table.reindex(columns=range(table.columns.min(), table.columns.max() + 1))
        layers, positions = table.index, table.columns
        extent = (positions[0] - 0.5, positions[-1] + 0.5, -0.5, len(layers) - 0.5)
        # Blank on hatched: where nothing is drawn no row was held by both.
        axes.patch.set(hatch="//////", facecolor="#ededed", edgecolor="#a0a0a0", linewidth=0)
        mapped(axes, np.where(table.isna(), np.nan, 1.0), None, ListedColormap(["#ffffff"]), extent=extent)
        errors = np.ma.masked_where(~(table.to_numpy() > 0), table.to_numpy())
        image = mapped(axes, errors, norm, colormaps[CMAP], extent=extent)
        axes.axvline(prompt - 0.5, color="#ffffff", linewidth=2.2)
        axes.axvline(prompt - 0.5, color="#000000", linewidth=1.1, linestyle=(0, (3, 1.5)))
        for spine in axes.spines.values():
            spine.set_visible(True)
        stride = max(1, len(layers) // 8)
        axes.set_yticks(range(0, len(layers), stride), layers[::stride])
        axes.set_ylabel(f"{tensor}: layer")
    whole_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel(f"absolute cache position (example {example}; dashes: the prompt's {prompt} tokens end)")
    if (means > 0).any():
        color_bar(target, image, panels, "mean relative error\n(log scale; blank is exactly 0)")
    place_title(panels[0], _led(label, kv_title(means, prompt, of)), beside=0.7)


_DRAWN = {
    "kl_by_step": ("steps", draw_kl, 3.9),
    "drift_by_layer": ("layers", draw_drift, 3.7),
    "attention_by_head": ("heads", draw_attention, 3.5),
    "kv_by_position": ("kv_positions", draw_kv, 3.9),
}
"""Of each figure the table it needs, its function and its height."""
_SHARED = ("kl_by_step", "drift_by_layer")


# The ladder of precisions ----------------------------------------------------------------------------------------------


def precision_ladder(rungs: Mapping[str, Sequence[Comparison]]) -> Figure:
    """Largest logit difference by dtype, with each dtype's unit roundoff beside it.

    Args:
        rungs: For each model its comparisons, one a dtype, on the same prompts.
    """
    every = [c for group in rungs.values() for c in group]
    units = {c.provenance["dtype"]: unit_roundoff(c.provenance["dtype"]) for c in every}
    lines = {
        model: {c.provenance["dtype"]: float(c.steps["max_abs_logit"].max()) for c in group if not c.steps.empty}
        for model, group in rungs.items()
    }
    with sheet(5.6, 3.7) as figure:
        axes = draw_ladder(figure, units, lines)
        axes.set(xlabel="dtype of weights and arithmetic", ylabel="largest logit difference")
        place_title(axes, ladder_title(rungs))
        provenances = [c.provenance for c in every]
        signed(figure, small_print(provenances, 123), provenances)
    return figure


def draw_ladder(target: FigureBase, units: Mapping[str, float], lines: Mapping[str, Mapping[str, float]]) -> Axes:
    """Differences by dtype, one line each, and the unit roundoff of every dtype.

    Args:
        target: Where it goes.
        units: The unit roundoff of each dtype, in the order drawn.
        lines: Of each line its difference by dtype.
    """
    axes, dtypes, roundoff = target.subplots(), list(units), list(units.values())
    height = zero_aware(axes, [roundoff, *(list(found.values()) for found in lines.values())])
    axes.plot(range(len(dtypes)), roundoff, "_", color="#777777", markersize=26, markeredgewidth=1.5, label="unit roundoff")
    for index, (name, found) in enumerate(lines.items()):
        x = [dtypes.index(dtype) + shift_of(index, len(lines)) for dtype in found]
        axes.plot(x, height(list(found.values())), **line_of(index), label=name)
    axes.set_xticks(range(len(dtypes)), dtypes)
    axes.set_xlim(-0.4, len(dtypes) - 0.6)
    legend_below(axes, *axes.get_legend_handles_labels())
    return axes
