"""The figures of a comparison, drawn from its tidy tables alone.

Every ``draw_*`` draws into a figure or a part of one; :func:`figures` makes one file's worth of each. No pyplot, so
importing or drawing leaves no trace in the user's own session.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D

from kvinterp.comparison import Comparison, mean_error
from kvinterp.comparison.where import most
from kvinterp.files import write_whole
from kvinterp.models import dtype_named
from kvinterp.views.drawing import color_bar, later, led, legend_below, line_of, log_norm, shift_of, short, whole_numbers
from kvinterp.views.precision import ladder_title
from kvinterp.views.style import CMAP, SERIES, looks, place_title, small_print, zero_aware

__all__ = [
    "FIGURES",
    "draw_attention",
    "draw_drift",
    "draw_kl",
    "draw_kv",
    "figure_of",
    "figures",
    "overview",
    "precision_ladder",
    "save",
]

Labelled = Mapping[str, Comparison]

FIGURES = {
    "kl_by_step": "KL by step",
    "drift_by_layer": "drift by layer",
    "attention_by_head": "attention KL by layer and head",
    "kv_by_position": "K and V error by position",
}
_SMALL = {"fontsize": 5.5, "color": "#555555"}


# Whole figures ---------------------------------------------------------------------------------------------------------


def figures(comparisons: Labelled) -> dict[str, Figure]:
    """One figure of each kind that the tables can give, by the names in :data:`FIGURES`.

    Args:
        comparisons: Comparisons of one model by what tells them apart; all share the figures of KL and drift, the first
            gives those of attention and of K and V.
    """
    first = next(iter(comparisons.values()))
    made: dict[str, Figure] = {}
    if any(not c.steps.empty for c in comparisons.values()):
        made["kl_by_step"] = figure_of(draw_kl, comparisons, (5.6, 3.9))
    if any(not c.layers.empty for c in comparisons.values()):
        made["drift_by_layer"] = figure_of(draw_drift, comparisons, (5.6, 3.7))
    if not first.heads.empty:
        made["attention_by_head"] = figure_of(draw_attention, {"": first}, (5.6, 3.5))
    if not first.kv_positions.empty:
        made["kv_by_position"] = figure_of(draw_kv, {"": first}, (5.6, 3.9))
    return made


def overview(kl: Labelled, drift: Labelled, attention: Labelled, kv: Labelled) -> Figure:
    """The four figures in one, for a page that has room for one picture.

    Args:
        kl: What the first shows, by what tells them apart.
        drift: What the second shows.
        attention: What the third shows: its first.
        kv: What the fourth shows: its first.
    """
    with looks():
        figure = _canvas((10.4, 7.2))
        grid: Any = figure.subfigures(2, 2, wspace=0.03, hspace=0.04)
        for target, draw, given in zip(
            grid.flat, (draw_kl, draw_drift, draw_attention, draw_kv), (kl, drift, attention, kv), strict=True
        ):
            draw(target, given)
        abouts = [c.about for given in (kl, drift, attention, kv) for c in given.values()]
        figure.supxlabel(small_print(abouts, 230), x=0.01, ha="left", **_SMALL)
        figure.provenance = abouts  # type: ignore[attr-defined]  # kept for save()
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a PNG, with the full provenance in its text fields.

    Args:
        figure: A figure made here.
        path: Where to; the folder is made.

    Raises:
        InputError: It cannot be written.
    """
    target = Path(path)
    about = json.dumps(getattr(figure, "provenance", []))
    drawn = io.BytesIO()
    with looks():
        figure.savefig(drawn, format="png", dpi=160, metadata={"Software": "kvinterp", "Description": about})
    write_whole(target, drawn.getvalue())
    return target


def figure_of(draw: Any, comparisons: Labelled, size: tuple[float, float]) -> Figure:
    """A figure of its own with one of the ``draw_*`` functions, provenance in small print.

    Args:
        draw: The function.
        comparisons: What it draws, by what tells them apart.
        size: Width and height in inches.
    """
    with looks():
        figure = _canvas(size)
        draw(figure, comparisons)
        abouts = [c.about for c in comparisons.values()]
        figure.supxlabel(small_print(abouts, round(size[0] * 22)), x=0.01, ha="left", **_SMALL)
        figure.provenance = abouts  # type: ignore[attr-defined]  # kept for save()
    return figure


def _canvas(size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# KL by step ------------------------------------------------------------------------------------------------------------


def draw_kl(target: FigureBase, comparisons: Labelled) -> None:
    """KL at every step: a point an example, a line for the median, exact zeros in a strip, flips marked."""
    axes = target.subplots()
    frames = {label: c.steps for label, c in comparisons.items() if not c.steps.empty}
    height = zero_aware(axes, [frame["kl"] for frame in frames.values()])
    flipped = False
    for index, (label, frame) in enumerate(frames.items()):
        series, shift = SERIES[index % len(SERIES)], shift_of(index, len(frames))
        axes.plot(
            frame["step"] + shift,
            height(frame["kl"]),
            series.marker,
            color=series.color,
            markersize=2.6,
            alpha=0.4,
            markeredgewidth=0,
            zorder=2,
        )
        median = frame.groupby("step")["kl"].median()
        name = f"{label}, median" if frame["example"].nunique() > 1 else label
        axes.plot(
            median.index + shift,
            height(median),
            **line_of(series, index),
            label=name,
            zorder=3,
        )
        first = frame[frame["flipped"] & ~frame["after_flip"]]
        flipped = flipped or not first.empty
        axes.plot(first["step"] + shift, height(first["kl"]), "X", color="#000000", markersize=7, zorder=4)
        axes.plot(first["step"] + shift, height(first["kl"]), "X", color=series.color, markersize=4, zorder=5)
    whole_numbers(axes)
    axes.set(xlabel="decode step (0 is the token the prefill decides)", ylabel="KL of next-token distributions (nats)")
    place_title(axes, _kl_title(frames))
    handles, labels = axes.get_legend_handles_labels()
    if flipped:
        handles.append(Line2D([], [], marker="X", color="#000000", linestyle="none", markersize=6))
        labels.append("first flipped token")
    legend_below(axes, handles, labels)


def _kl_title(frames: Mapping[str, pd.DataFrame]) -> str:
    label, steps = next(iter(frames.items()))
    which = f" ({label})" if len(frames) > 1 else ""
    differing = steps[steps["max_abs_logit"] > 0]
    if differing.empty:
        return f"The paths are bitwise equal at all {len(steps)} steps{which}"
    first = int(differing["step"].min())
    return f"The paths differ at {len(differing)} of {len(steps)} steps, first at step {first}{which}"


# Drift by layer --------------------------------------------------------------------------------------------------------


def draw_drift(target: FigureBase, comparisons: Labelled) -> None:
    """Relative L2 of the residual stream by layer: median and quartiles over examples and steps from 1 on."""
    axes = target.subplots()
    lines: dict[str, pd.DataFrame] = {}
    for label, comparison in comparisons.items():
        frame = later(comparison, comparison.layers)
        for site in frame["site"].unique():
            name = label if frame["site"].nunique() == 1 else f"{label}, {site}" if len(comparisons) > 1 else str(site)
            quartiles = frame[frame["site"] == site].groupby("layer")["relative_l2"].quantile([0.25, 0.5, 0.75])
            lines[name] = quartiles.unstack()
    height = zero_aware(axes, [line.to_numpy() for line in lines.values()])
    for index, (name, line) in enumerate(lines.items()):
        series, x = SERIES[index % len(SERIES)], line.index + shift_of(index, len(lines))
        low, middle, high = (height(line[q]) for q in (0.25, 0.5, 0.75))
        axes.vlines(x, low, high, color=series.color, linewidth=1.4, zorder=2)
        axes.plot(x, low, "_", x, high, "_", color=series.color, markersize=6, zorder=2)
        axes.plot(x, middle, **line_of(series, index), label=name, zorder=3)
    whole_numbers(axes)
    sites = sorted({str(site) for comparison in comparisons.values() for site in comparison.layers["site"].unique()})
    what = sites[0] if len(sites) == 1 else "residual stream"
    axes.set(xlabel="layer", ylabel=f"relative L2 difference of\n{what} (median, quartiles)")
    place_title(axes, _drift_title(lines, what if len(sites) == 1 else "what was recorded"))
    legend_below(axes, *axes.get_legend_handles_labels())


def _drift_title(lines: Mapping[str, pd.DataFrame], what: str) -> str:
    medians = pd.concat([line[0.5] for line in lines.values()], axis=1).sort_index()
    above = (medians > 0).any(axis=1)
    if not above.any():
        return f"The median difference of {what} is 0 at every layer"
    begin, last, first = medians.index[0], medians.index[-1], medians.index[above.to_numpy()][0]
    ends = sorted(medians.loc[last].dropna())
    size = short(ends[0]) if ends[0] == ends[-1] else f"{short(ends[0])} to {short(ends[-1])}"
    if first != begin:
        return f"The median difference of {what} is first above 0 at layer {first}; at layer {last} it is {size}"
    if begin == last or not (medians.loc[first] > 0).all():
        return f"At layer {last} the median difference of {what} is {size}"
    grown = sorted((medians.loc[last] / medians.loc[first]).dropna())
    times = list(dict.fromkeys(f"{value:.2g}" for value in (grown[0], grown[-1])))
    return f"From layer {first} to layer {last} the median difference changes {' to '.join(times)}-fold"


# Attention by layer and head -------------------------------------------------------------------------------------------


def draw_attention(target: FigureBase, comparisons: Labelled) -> None:
    """Mean KL of the attention pattern by layer and head, over examples and steps from 1 on."""
    axes = target.subplots()
    (label, comparison) = next(iter(comparisons.items()))
    frame = later(comparison, comparison.heads)
    table = frame.groupby(["layer", "head"])["kl"].mean().unstack()
    values = table.to_numpy()
    axes.grid(visible=False)
    norm = log_norm(values)
    cmap = colormaps[CMAP].with_extremes(bad="#ffffff")
    shown = np.ma.masked_where(~(values > 0), values)
    image = axes.imshow(shown, norm=norm, cmap=cmap, aspect="auto", origin="lower", interpolation="nearest")
    _mark_cells(axes, values, norm, cmap)
    axes.set_xticks(range(len(table.columns)), table.columns) if len(table.columns) <= 16 else whole_numbers(axes)
    axes.set_yticks(range(len(table.index)), table.index) if len(table.index) <= 16 else None
    axes.set(xlabel="query head", ylabel="layer")
    if (values > 0).any():
        color_bar(target, image, axes, "mean KL of attention (nats, log scale)")
    derived = " (derived)" * ("pattern" in comparison.derived)
    place_title(axes, led(label, _attention_title(table) + derived))


def _attention_title(table: pd.DataFrame) -> str:
    flat = table.stack()
    if not (flat > 0).any():
        return "every attention pattern is exactly equal"
    largest, place = most(flat, ("layer", "head"))
    return f"attention differs most in {place} ({short(largest)} nats)"


def _mark_cells(axes: Axes, values: np.ndarray, norm: LogNorm, cmap: Any) -> None:
    """Writes the number into each cell where there is room, and 0 where there is no difference at all."""
    if values.size > 64:
        for row, column in zip(*np.nonzero(values == 0), strict=True):
            axes.text(column, row, "0", ha="center", va="center", fontsize=5, color="#000000")
        return
    size = 7 if values.shape[1] <= 8 else 5.5
    for row, column in np.ndindex(*values.shape):
        value = values[row, column]
        red, green, blue, _ = cmap(norm(value)) if value > 0 else (1.0, 1.0, 1.0, 1.0)
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        shown = "0" if value == 0 else short(value, 0)
        color = "#ffffff" if dark else "#000000"
        axes.text(column, row, shown, ha="center", va="center", fontsize=size, color=color)


# K and V by position ---------------------------------------------------------------------------------------------------


def draw_kv(target: FigureBase, comparisons: Labelled) -> None:
    """Relative error of K and of V by layer and absolute position, in the example that decoded most; white is exactly 0."""
    (label, comparison) = next(iter(comparisons.items()))
    every = comparison.same_text(comparison.kv_positions)
    if every.empty:
        axes = target.subplots()
        axes.set_axis_off()
        place_title(axes, led(label, "no step after the prefill at which both paths hold the same text"))
        return
    drawn = comparison.examples[comparison.examples["example"].isin(every["example"])]
    example = int(drawn.sort_values("steps", kind="stable")["example"].iloc[-1])
    prompt = int(comparison.examples.set_index("example")["prompt_tokens"].loc[example])
    frame = every[every["example"] == example]
    means = mean_error(frame, ("tensor", "layer", "position"))
    tensors = [name for name in ("K", "K before RoPE", "V") if (frame["tensor"] == name).any()]
    panels = np.atleast_1d(target.subplots(len(tensors), 1, sharex=True))
    norm, cmap = log_norm(means.to_numpy()), colormaps[CMAP].with_extremes(bad="#ffffff")
    for axes, tensor in zip(panels, tensors, strict=True):
        table = means[tensor].unstack()
        values = table.to_numpy()
        layers, positions = table.index, table.columns
        extent = (positions[0] - 0.5, positions[-1] + 0.5, -0.5, len(layers) - 0.5)
        shown = np.ma.masked_where(~(values > 0), values)
        image = axes.imshow(
            shown, norm=norm, cmap=cmap, aspect="auto", origin="lower", interpolation="nearest", extent=extent
        )
        axes.axvline(prompt - 0.5, color="#ffffff", linewidth=2.2)
        axes.axvline(prompt - 0.5, color="#000000", linewidth=1.1, linestyle=(0, (3, 1.5)))
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(True)
        every = max(1, len(layers) // 8)
        axes.set_yticks(range(0, len(layers), every), layers[::every])
        axes.set_ylabel(f"{tensor}: layer")
    whole_numbers(panels[-1])
    panels[-1].set_xlabel(f"absolute cache position (example {example}; dashes: the prompt's {prompt} tokens end)")
    if (means > 0).any():
        color_bar(target, image, panels, "mean relative error\n(log scale; white is exactly 0)")
    place_title(panels[0], led(label, _kv_title(means, prompt)), beside=0.7)


def _kv_title(means: pd.Series, prompt: int) -> str:
    positions = means.index.get_level_values("position")
    inside, decoded = means[positions < prompt], means[positions >= prompt]
    if not (means > 0).any():
        return "K and V are exactly equal everywhere in this prompt and what it decoded"
    said: list[str] = []
    for name, part in (("this prompt's", inside), ("decoded", decoded)):
        if len(part):
            differ = (
                f"differ by {short(part.mean())} on average over positions" if (part > 0).any() else "are exactly equal"
            )
            said.append(f"{name} {'K and V' if not said else 'ones'} {differ}")
    return ", ".join(said)


# The ladder of precisions ----------------------------------------------------------------------------------------------


def precision_ladder(rungs: Mapping[str, Sequence[Comparison]]) -> Figure:
    """Largest logit difference by dtype, with each dtype's unit roundoff beside it.

    Args:
        rungs: For each model its comparisons, one a dtype, on the same prompts.
    """
    with looks():
        figure = _canvas((5.6, 3.7))
        axes = figure.subplots()
        dtypes = list(dict.fromkeys(c.about["dtype"] for group in rungs.values() for c in group))
        roundoff = [torch.finfo(dtype_named(name)).eps / 2 for name in dtypes]  # type: ignore[arg-type]
        largest = {
            model: {c.about["dtype"]: float(c.steps["max_abs_logit"].max()) for c in group if not c.steps.empty}
            for model, group in rungs.items()
        }
        height = zero_aware(axes, [roundoff, *(list(found.values()) for found in largest.values())])
        axes.plot(
            range(len(dtypes)), roundoff, "_", color="#777777", markersize=26, markeredgewidth=1.5, label="unit roundoff"
        )
        for index, (model, found) in enumerate(largest.items()):
            x = [dtypes.index(name) + shift_of(index, len(largest)) for name in found]
            axes.plot(x, height(list(found.values())), **line_of(SERIES[index % len(SERIES)], index), label=model)
        axes.set_xticks(range(len(dtypes)), dtypes)
        axes.set_xlim(-0.4, len(dtypes) - 0.6)
        axes.set(xlabel="dtype of weights and arithmetic", ylabel="largest logit difference")
        place_title(axes, ladder_title(rungs))
        legend_below(axes, *axes.get_legend_handles_labels())
        abouts = [c.about for group in rungs.values() for c in group]
        figure.supxlabel(small_print(abouts, 123), x=0.01, ha="left", **_SMALL)
        figure.provenance = abouts  # type: ignore[attr-defined]  # kept for save()
    return figure
