"""The figures of a comparison, drawn from its tidy tables alone.

Every ``draw_*`` draws into a figure or a part of one; :func:`figures` makes one file's worth of each. No pyplot, so
importing or drawing leaves no trace in the user's own session.
"""

from __future__ import annotations

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
from matplotlib.ticker import MaxNLocator

from kvinterp.comparison import Comparison
from kvinterp.models import dtype_named
from kvinterp.views.style import CMAP, SERIES, Series, looks, place_title, small_print, zero_aware

__all__ = [
    "FIGURES",
    "draw_attention",
    "draw_drift",
    "draw_kl",
    "draw_kv",
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
    label = next(iter(comparisons))
    made: dict[str, Figure] = {}
    if any(not c.steps.empty for c in comparisons.values()):
        made["kl_by_step"] = _figure(draw_kl, comparisons, (5.6, 3.9))
    if any(not c.layers.empty for c in comparisons.values()):
        made["drift_by_layer"] = _figure(draw_drift, comparisons, (5.6, 3.7))
    if not first.heads.empty:
        made["attention_by_head"] = _figure(draw_attention, {label: first}, (5.6, 3.5))
    if not first.kv.empty:
        made["kv_by_position"] = _figure(draw_kv, {label: first}, (5.6, 3.9))
    return made


def overview(kl: Labelled, drift: Labelled, attention: Labelled, kv: Labelled) -> Figure:
    """The four figures in one, for a page that has room for one picture."""
    with looks():
        figure = _canvas((10.4, 7.2))
        grid = figure.subfigures(2, 2, wspace=0.03, hspace=0.04)
        for target, draw, given in zip(
            grid.flat, (draw_kl, draw_drift, draw_attention, draw_kv), (kl, drift, attention, kv), strict=True
        ):
            draw(target, given)
        abouts = [c.about for given in (kl, drift, attention, kv) for c in given.values()]
        figure.supxlabel(small_print(abouts, 210), x=0.01, ha="left", **_SMALL)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a PNG, with the full provenance in its text fields.

    Args:
        figure: A figure made here.
        path: Where to; the folder is made.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with looks():
        about = json.dumps(getattr(figure, "provenance", []))
        figure.savefig(partial, format="png", dpi=160, metadata={"Software": "kvinterp", "Description": about})
    partial.replace(target)
    return target


def _figure(draw: Any, comparisons: Labelled, size: tuple[float, float]) -> Figure:
    with looks():
        figure = _canvas(size)
        draw(figure, comparisons)
        abouts = [c.about for c in comparisons.values()]
        figure.supxlabel(small_print(abouts, round(size[0] * 21)), x=0.01, ha="left", **_SMALL)
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
        series, shift = SERIES[index % len(SERIES)], _shift(index, len(frames))
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
            **_line(series, index),
            label=name,
            zorder=3,
        )
        first = frame[frame["flipped"] & ~frame["after_flip"]]
        flipped = flipped or not first.empty
        axes.plot(first["step"] + shift, height(first["kl"]), "X", color="#000000", markersize=7, zorder=4)
        axes.plot(first["step"] + shift, height(first["kl"]), "X", color=series.color, markersize=4, zorder=5)
    _whole_numbers(axes)
    axes.set(xlabel="decode step (0 is the token the prefill decides)", ylabel="KL of next-token distributions (nats)")
    place_title(axes, _kl_title(frames))
    handles, labels = axes.get_legend_handles_labels()
    if flipped:
        handles.append(Line2D([], [], marker="X", color="#000000", linestyle="none", markersize=6))
        labels.append("first flipped token")
    _legend_below(axes, handles, labels)


def _kl_title(frames: Mapping[str, pd.DataFrame]) -> str:
    steps = pd.concat([frame.assign(series=label) for label, frame in frames.items()])
    differing = steps[steps["max_abs_logit"] > 0]
    if differing.empty:
        return f"The paths are bitwise equal at all {len(steps)} steps"
    first = int(differing["step"].min())
    return f"The paths differ at {len(differing)} of {len(steps)} steps, first at step {first}"


# Drift by layer --------------------------------------------------------------------------------------------------------


def draw_drift(target: FigureBase, comparisons: Labelled) -> None:
    """Relative L2 of the residual stream by layer: median and quartiles over examples and steps from 1 on."""
    axes = target.subplots()
    lines: dict[str, pd.DataFrame] = {}
    for label, comparison in comparisons.items():
        frame = comparison.layers
        frame = frame[frame["step"] > 0] if (frame["step"] > 0).any() else frame
        for site in frame["site"].unique():
            name = label if frame["site"].nunique() == 1 else f"{label}, {site}" if len(comparisons) > 1 else str(site)
            quartiles = frame[frame["site"] == site].groupby("layer")["relative_l2"].quantile([0.25, 0.5, 0.75])
            lines[name] = quartiles.unstack()
    height = zero_aware(axes, [line.to_numpy() for line in lines.values()])
    for index, (name, line) in enumerate(lines.items()):
        series, x = SERIES[index % len(SERIES)], line.index + _shift(index, len(lines))
        low, middle, high = (height(line[q]) for q in (0.25, 0.5, 0.75))
        axes.vlines(x, low, high, color=series.color, linewidth=1.4, zorder=2)
        axes.plot(x, low, "_", x, high, "_", color=series.color, markersize=6, zorder=2)
        axes.plot(x, middle, **_line(series, index), label=name, zorder=3)
    _whole_numbers(axes)
    site_names = sorted({str(s) for c in comparisons.values() for s in c.layers["site"].unique()})
    axes.set(xlabel="layer", ylabel="relative L2 difference of the\nresidual stream (median, quartiles)")
    if not lines:
        return
    place_title(axes, _drift_title(lines))
    _legend_below(axes, *axes.get_legend_handles_labels(), title=", ".join(site_names) if len(site_names) == 1 else None)


def _drift_title(lines: Mapping[str, pd.DataFrame]) -> str:
    medians = pd.concat([line[0.5] for line in lines.values()], axis=1)
    if not (medians > 0).to_numpy().any():
        return "The residual streams are equal at the median of every layer"
    deepest = medians.iloc[-1].max()
    first = medians.index[(medians > 0).any(axis=1)][0]
    grown = medians.iloc[-1] / medians.loc[first]
    grown = grown[np.isfinite(grown)]
    if first != medians.index[0]:
        return f"The difference begins at layer {first} and is {deepest:.1e} of the stream at the last"
    if grown.empty or first == medians.index[-1]:
        return f"At the last layer the streams differ by {deepest:.1e} of their length"
    times = sorted({f"{grown.min():.2g}", f"{grown.max():.2g}"}, key=float)
    return f"From layer {first} to layer {medians.index[-1]} the difference changes {' to '.join(times)}-fold"


# Attention by layer and head -------------------------------------------------------------------------------------------


def draw_attention(target: FigureBase, comparisons: Labelled) -> None:
    """Mean KL of the attention pattern by layer and head, over examples and steps from 1 on."""
    axes = target.subplots()
    (label, comparison) = next(iter(comparisons.items()))
    frame = comparison.heads
    frame = frame[frame["step"] > 0] if (frame["step"] > 0).any() else frame
    table = frame.groupby(["layer", "head"])["kl"].mean().unstack()
    values = table.to_numpy()
    axes.grid(visible=False)
    positive = values[values > 0]
    norm = (
        LogNorm(positive.min(), positive.max() if positive.max() > positive.min() else positive.min() * 10)
        if len(positive)
        else LogNorm(1e-9, 1e-8)
    )
    cmap = colormaps[CMAP].with_extremes(bad="#ffffff")
    shown = np.ma.masked_where(~(values > 0), values)
    image = axes.imshow(shown, norm=norm, cmap=cmap, aspect="auto", origin="lower", interpolation="nearest")
    _mark_cells(axes, values, norm, cmap)
    axes.set_xticks(range(len(table.columns)), table.columns) if len(table.columns) <= 16 else _whole_numbers(axes)
    axes.set_yticks(range(len(table.index)), table.index) if len(table.index) <= 16 else None
    axes.set(xlabel="query head", ylabel="layer")
    if len(positive):
        bar = target.colorbar(image, ax=axes, pad=0.02, aspect=30)
        bar.set_label("mean KL of attention (nats, log scale)")
        bar.ax.grid(visible=False)
    place_title(axes, _attention_title(table, label))


def _attention_title(table: pd.DataFrame, label: str) -> str:
    name = f"{label}: " if label else ""
    flat = table.stack()
    if not (flat > 0).any():
        return f"{name}every attention pattern is exactly equal"
    layer, head = flat.idxmax()  # type: ignore[misc]
    return f"{name}attention differs most in layer {layer}, head {head} ({flat.max():.1e} nats)"


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
        shown = "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-").replace("e-", "\ne-")
        color = "#ffffff" if dark else "#000000"
        axes.text(column, row, shown.replace("\n", ""), ha="center", va="center", fontsize=size, color=color)


# K and V by position ---------------------------------------------------------------------------------------------------


def draw_kv(target: FigureBase, comparisons: Labelled) -> None:
    """Relative error of K and of V by absolute position, in the example that decoded most; the prompt's end marked."""
    (label, comparison) = next(iter(comparisons.items()))
    example = int(comparison.examples.sort_values("steps", kind="stable")["example"].iloc[-1])
    row = comparison.examples.set_index("example").loc[example]
    prompt = int(row["prompt_tokens"])
    frame = comparison.kv[(comparison.kv["example"] == example) & (comparison.kv["step"] > 0)]
    frame = frame if not frame.empty else comparison.kv[comparison.kv["example"] == example]
    tensors = [name for name in ("K", "K before RoPE", "V") if (frame["tensor"] == name).any()]
    panels = np.atleast_1d(target.subplots(1, len(tensors), sharex=True, sharey=True))
    means = frame.groupby(["tensor", "layer", "position"])["relative_error"].mean()
    layers = sorted(frame["layer"].unique())
    height = zero_aware(panels[0], [means.to_numpy()])
    for axes, tensor in zip(panels, tensors, strict=True):
        if axes is not panels[0]:
            zero_aware(axes, [means.to_numpy()])
            axes.tick_params(labelleft=False)
        axes.axvline(prompt - 0.5, color="#000000", linewidth=1, linestyle=(0, (1, 1)), zorder=1)
        for index, layer in enumerate(layers):
            line = means[tensor, layer]
            axes.plot(line.index, height(line), **_layer_line(index, len(layers)), label=f"layer {layer}", zorder=3)
        axes.set_title(tensor, loc="left")
        _whole_numbers(axes)
    panels[0].set_ylabel("relative error of the cached vector\n(mean over KV heads and steps)")
    panels[0].annotate(
        "prompt | decoded", (prompt - 0.5, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom",
        fontsize=7, xytext=(0, 1), textcoords="offset points",
    )  # fmt: skip
    target.supxlabel(f"absolute cache position (example {example}: prompt of {prompt} tokens)", fontsize=9)
    name = f"{label}: " if label else ""
    target.suptitle(name + _kv_title(means, prompt), x=0.01, ha="left", fontsize=10, fontweight="bold")
    handles, labels = panels[0].get_legend_handles_labels()
    target.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=8)


def _kv_title(means: pd.Series, prompt: int) -> str:
    positions = means.index.get_level_values("position")
    inside, decoded = means[positions < prompt], means[positions >= prompt]
    if not (means > 0).any():
        return "K and V are exactly equal everywhere"
    if not (inside > 0).any():
        return f"the prompt's K and V are exactly equal, decoded ones differ by {decoded.mean():.1e}"
    return f"K and V differ by {inside.mean():.1e} in the prompt, {decoded.mean():.1e} where decoded"


def _layer_line(index: int, count: int) -> dict[str, Any]:
    if count <= len(SERIES):
        return {**_line(SERIES[index], index), "markersize": 2.5, "linewidth": 1}
    return {"color": colormaps[CMAP](index / (count - 1)), "linewidth": 0.8}


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
            x = [dtypes.index(name) + _shift(index, len(largest)) for name in found]
            axes.plot(x, height(list(found.values())), **_line(SERIES[index % len(SERIES)], index), label=model)
        axes.set_xticks(range(len(dtypes)), dtypes)
        axes.set_xlim(-0.4, len(dtypes) - 0.6)
        axes.set(xlabel="dtype of weights and arithmetic", ylabel="largest logit difference")
        place_title(axes, _ladder_title(largest, dtypes))
        _legend_below(axes, *axes.get_legend_handles_labels())
        abouts = [c.about for group in rungs.values() for c in group]
        figure.supxlabel(small_print(abouts, 118), x=0.01, ha="left", **_SMALL)
        figure.provenance = abouts  # type: ignore[attr-defined]
    return figure


def _ladder_title(largest: Mapping[str, Mapping[str, float]], dtypes: Sequence[str]) -> str:
    falls = all(
        found[low] > found[high] or found[high] == 0
        for found in largest.values()
        for low, high in zip(dtypes, dtypes[1:], strict=False)
        if low in found and high in found
    )
    return "The difference falls with every step up in precision" if falls else "The difference does not fall everywhere"


# What they share -------------------------------------------------------------------------------------------------------


def _line(series: Series, index: int) -> dict[str, Any]:
    # Later lines are drawn hollow: where two coincide, both are seen.
    hollow = {"markerfacecolor": "#ffffff"} if index % 2 else {}
    return {**series.drawn(), "linewidth": 1.4, "markersize": 4, **hollow}


def _shift(index: int, count: int) -> float:
    return 0.0 if count == 1 else (index - (count - 1) / 2) * min(0.16, 0.5 / count)


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str], title: str | None = None) -> None:
    if len(handles):
        axes.legend(
            handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=min(3, len(labels)), title=title
        )
