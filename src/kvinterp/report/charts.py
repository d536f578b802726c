"""Draws charts, which are data (:mod:`kvinterp.findings`), with one function for each kind of
panel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from kvinterp.common.numbers import percent, power
from kvinterp.findings import Chart, Panel
from kvinterp.report.panels import (
    WRITTEN,
    Provenances,
    all_numbers,
    cells_of,
    grid_of,
    medians_of,
    points_of,
    small_print,
    text_of_cell,
    titles_of,
)
from kvinterp.report.style import CMAP, DIVERGING, ink_on, line_of, sheet, sign

_GREY = {"color": "#808080", "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 1}
_MANY = 1000
"""A line with more marks than this is drawn as pixels where the file is of lines (SVG, PDF)."""
_LABEL = 34
"""The most characters in a line of a label, so that no name pushes the axes out of their figure."""
_ON_WHITE = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.6, "pad": 0.8}
_PERCENT = FuncFormatter(lambda value, _: percent(value))


def draw_chart(chart: Chart, provenances: Provenances, wide: float = 7.2) -> Figure:
    """Draws a chart, with the provenance of its models below.

    Args:
        chart: The chart.
        provenances: The provenance of each model.
        wide: The smallest width in inches.
    """
    titles_of, columns_of, widths, heights = zip(*map(_layout, chart.panels), strict=True)
    width = max(wide, *widths)
    print_below = small_print(provenances, chart.notes, min(130, int(18 * width)))
    with sheet(width, 0.9 + sum(heights)) as figure:
        # In a part of the sheet, so that the small print has a place of its own.
        inner: Any = figure.subfigures(1, 1)
        parts = inner.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        legend: list[str] = []
        for part, panel, titles, columns in zip(
            parts, chart.panels, titles_of, columns_of, strict=True
        ):
            grid = part.subplots(
                math.ceil(len(titles) / columns), columns, squeeze=False, sharey=panel.kind != "map"
            )
            for axes in grid.flat[len(titles) :]:
                axes.set_visible(False)
            for axes, title in zip(grid.flat, titles.values(), strict=False):
                axes.set_title(fill(title, 28), fontsize=9)
            (_draw_map if panel.kind == "map" else _draw_series)(grid, panel, list(titles))
            handles, labels = grid[0, 0].get_legend_handles_labels()
            if len(labels) > 1 and labels != legend:
                across = 2 if max(map(len, labels)) > 24 else 4
                names = [fill(label, 44) for label in labels]
                part.legend(
                    handles, names, loc="outside lower center", ncols=min(len(names), across)
                )
            legend = labels
        figure.suptitle(
            fill(chart.title, int(width * 11)), x=0.01, ha="left", fontsize=10, fontweight="bold"
        )
        return sign(figure, print_below, provenances)


def _layout(panel: Panel) -> tuple[dict[Any, str], int, float, float]:
    """The title of each axes by the value of ``facet``, the number of columns of axes, and width
    and height of all in inches.
    """
    titles = titles_of(panel)
    columns = min(len(titles), panel.columns)
    labels = panel.table[panel.y].unique()
    if panel.kind == "dots":
        height = 0.7 + 0.2 * sum(fill(str(label), _LABEL).count("\n") + 1 for label in labels)
    else:
        height = 0.9 + min(2.4, max(0.6, 0.24 * len(labels))) if panel.kind == "map" else 2.5
    lines = panel.names or (
        panel.table[panel.color].unique() if panel.color and panel.kind != "map" else ()
    )
    width = 2.6 * columns + 1.9 * (panel.kind == "dots")
    return (
        titles,
        columns,
        width,
        math.ceil(len(titles) / columns) * height + 0.3 + 0.1 * len(lines),
    )


# Lines, points, steps and dots --------------------------------------------------------------------


def _draw_series(grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    """Draws a line, or a row of marks, for each value of ``color``; dots have their values on the
    horizontal axis.
    """
    sideways = panel.kind == "dots"
    points, names, labels = points_of(panel)
    numbers = points[["drawn", "low", "high"]]
    apart = sideways or (panel.xscale == "whole" and panel.ends == "bars")
    gap = min(0.08, 0.4 / len(names)) * apart * (-2.5 if sideways else 1)
    for axes, facet in zip(grid.flat, facets, strict=False):
        set_scale(axes, "x" if sideways else "y", panel.scale, numbers.to_numpy(float))
        for index, (color, name) in enumerate(names.items()):
            line = points[(points["facet"] == facet) & (points["color"] == color)].dropna(
                subset=["value"]
            )
            shift = (index - (len(names) - 1) / 2) * gap
            _draw_line(axes, line.assign(tick=line["tick"] + shift), panel, index, name)
        _write_why(axes, points[points["facet"] == facet], sideways)
        if panel.level == "equal":
            axes.axline((0.5, 0.5), (1, 1), **_GREY)
        elif panel.level is not None:
            (axes.axvline if sideways else axes.axhline)(float(panel.level), **_GREY)
        axes.set_xlabel(
            fill(
                panel.label if sideways else panel.xlabel or panel.x, 36 if len(facets) > 1 else 80
            )
        )
        if sideways:
            axes.grid(visible=True, axis="x")
            axes.grid(visible=False, axis="y")
        else:
            set_scale(axes, "x", panel.xscale, points["tick"].to_numpy(float))
    if sideways:
        grid[0, 0].set_yticks(
            range(len(labels)), [fill(str(label), _LABEL) for label in labels], fontsize=7.5
        )
        grid[0, 0].set_ylim(-0.6, len(labels) - 0.4)
        return
    for axes in grid[:, 0]:
        axes.set_ylabel(panel.label)


def _write_why(axes: Axes, points: pd.DataFrame, sideways: bool) -> None:
    """Writes why there is no value: at each line of dots without one, or in the middle of a panel
    where nothing is drawn.
    """
    said = points[(points["why"] != "") & points["value"].isna()]
    look: Any = {
        "transform": axes.get_yaxis_transform() if sideways else axes.transAxes,
        "color": "#555555",
        "va": "center",
    }
    for tick, why in dict(zip(said["tick"], said["why"], strict=True)).items() if sideways else ():
        if points.loc[points["tick"] == tick, "value"].isna().all():
            axes.text(0.01, tick, why, fontsize=6.5, bbox=_ON_WHITE, **look)
    if sideways and points["value"].isna().all():
        axes.set_xticks([])
        axes.set_xticks([], minor=True)
    if not sideways and points["value"].isna().all() and len(said):
        axes.text(
            0.5,
            0.5,
            fill(said["why"].iloc[0], 30),
            fontsize=7.5,
            ha="center",
            bbox=_ON_WHITE,
            **look,
        )


def _draw_line(axes: Axes, points: pd.DataFrame, panel: Panel, index: int, name: str) -> None:
    """Draws one line of a panel; sideways where the places are on the vertical axis."""
    sideways, look = panel.kind == "dots", {**line_of(index), "rasterized": len(points) > _MANY}
    alike = {name: look[name] for name in ("color", "rasterized")}
    if panel.kind == "medians":
        faint: Any = {"markersize": 2.6, "alpha": 0.35, "markeredgewidth": 0}
        axes.plot(points["tick"], points["drawn"], look["marker"], **faint, **alike)
        marked = points[points["mark"].astype(bool)]
        if len(marked):
            label = (
                panel.mark[1] if panel.mark[1] not in axes.get_legend_handles_labels()[1] else ""
            )
            axes.plot(
                marked["tick"],
                marked["drawn"],
                "X",
                color="#000000",
                markersize=6,
                zorder=5,
                label=label,
            )
        points = medians_of(points)
    ends = points["tick"], points["low"], points["high"]
    if points["low"].isna().all():
        pass
    elif panel.ends == "band" and not sideways:
        step: Any = "post" if panel.kind == "step" else None
        axes.fill_between(*ends, step=step, color=look["color"], alpha=0.15, linewidth=0)
    else:
        (axes.hlines if sideways else axes.vlines)(
            *ends, linewidth=1.4 if sideways else 1.2, **alike
        )
    if sideways:
        look |= {"linestyle": "none", "markersize": 4.5}
    elif panel.kind == "step":
        look |= {"marker": "", "drawstyle": "steps-post"}
    elif panel.kind == "points":
        look |= {"linestyle": "none", "alpha": 0.75}
    elif len(points) > 40:
        look["markevery"] = max(1, len(points) // 20)
    across, up = ("drawn", "tick") if sideways else ("tick", "drawn")
    axes.plot(points[across], points[up], label=name, **look)
    beyond = points[points["value"].abs() > 1] if panel.scale == "signed" else points[:0]
    for tick, value in zip(beyond["tick"], beyond["value"], strict=True):
        # What is beyond a signed scale is written at its edge.
        text = f"{'▲' if value > 0 else '▼'} {percent(value)}"
        at = (0.86 * np.sign(value), tick) if sideways else (tick, 0.92 * np.sign(value))
        axes.annotate(text, at, ha="center", va="center", fontsize=6.5, zorder=5, bbox=_ON_WHITE)


# Scales -------------------------------------------------------------------------------------------

_LIMITS = {"share": (-0.03, 1.03), "signed": (-1.12, 1.12)}


def set_scale(axes: Axes, along: str, name: str, values: np.ndarray) -> None:
    """Sets the scale of an axis.

    Args:
        axes: The axes.
        along: The axis, ``"x"`` or ``"y"``.
        name: A scale of a :class:`Panel`. ``zero`` is logarithmic, with a place for exact zeros: a
            grey strip below the smallest decade.
        values: All the numbers that will be drawn along the axis; NaN is ignored.
    """
    axis, scale, limits = (
        getattr(axes, part) for part in (f"{along}axis", f"set_{along}scale", f"set_{along}lim")
    )
    if name in _LIMITS:
        limits(*_LIMITS[name])
        if name == "signed":
            axis.set_major_formatter(_PERCENT)
    elif name == "log":
        scale("log")
        # Plain numbers, since text is not parsed for mathematics.
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        positive = values[np.isfinite(values) & (values > 0)]
        if positive.size and (span := positive.max() / positive.min()) < 100:
            # Powers of ten alone would leave an axis with one tick, or none.
            axis.set_major_locator(MaxNLocator(6) if span < 10 else LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    elif name == "doubling":
        scale("log", base=2)
        axis.set_ticks(tick_values := np.unique(values), [f"{tick:g}" for tick in tick_values])
    elif name == "whole":
        axis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        if len(values):
            limits(values.min() - 0.5, values.max() + 0.5)
    if name != "zero":
        return
    span, line = (axes.axhspan, axes.axhline) if along == "y" else (axes.axvspan, axes.axvline)
    positive = values[np.isfinite(values) & (values > 0)]
    ends = np.log10([positive.min(), positive.max()]) if positive.size else np.zeros(2)
    low, decades = np.floor(ends[0]), max(1.0, np.ceil(ends[1]) - np.floor(ends[0]))
    ticks = list(10 ** np.arange(low, low + decades + 1, max(1, math.ceil(decades / 6))))
    least, top = 10.0**low, 10 ** (low + 1.04 * decades)
    if not positive.size:
        ticks, top = ticks[:0], least
    if (values == 0).any() or not positive.size:
        # Linear below the smallest decade, which holds nothing but zeros.
        scale("symlog", linthresh=least, linscale=0.11 * decades)
        span(-least / 2, least / 2, color="#dcdcdc", zorder=0, linewidth=0)
        line(least / 2, color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
        limits(-least / 2, top)
        ticks = [0.0, *ticks]
    else:
        scale("log")
        limits(10 ** (low - 0.04 * decades), top)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda at, _: power(at) if at else "exactly 0" if along == "y" else "0")
    )


# Maps ---------------------------------------------------------------------------------------------


def _draw_map(grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    """Draws a cell for each x and y, all panels on one scale: logarithmic and blank at 0, or
    symmetric and white at 0.
    """
    table, down, across = cells_of(panel)
    values = table["value"].to_numpy(float)
    largest, positive = np.abs(values[np.isfinite(values)]).max(initial=0.0), values[values > 0]
    signed, share = panel.scale != "zero", panel.scale == "signed"
    limit = 1.0 if share else largest or 1.0
    low, high = (positive.min(), positive.max()) if positive.size else (1e-9, 1e-8)
    norm: Any = (
        Normalize(-limit, limit) if signed else LogNorm(low, high if high > low else low * 10)
    )
    colors = DIVERGING if signed else CMAP
    options: Any = {"aspect": "auto", "origin": "lower", "interpolation": "none"}
    for axes, facet in zip(grid.flat, facets, strict=False):
        cells = grid_of(table, facet, down, across)
        axes.grid(visible=False)
        # Cells without a value are hatched; an exact zero is white.
        hatched: Any = {
            "hatch": "//////",
            "facecolor": "#ededed",
            "edgecolor": "#a0a0a0",
            "linewidth": 0,
        }
        axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, zorder=-1, **hatched))
        axes.imshow(
            np.where(np.isnan(cells), np.nan, 1.0), cmap=ListedColormap(["#ffffff"]), **options
        )
        visible = cells if signed else np.ma.masked_where(~(cells > 0), cells)
        image = axes.imshow(visible, norm=norm, cmap=colors, **options)
        # Where there is no room for numbers, signs tell the colours apart in grey.
        fits = cells.size <= WRITTEN
        for (row, column), value in np.ndenumerate(cells) if signed or fits else ():
            text = text_of_cell(value, panel, limit, "yes" if fits else "no")
            ink = ink_on(colors(norm(value))) if value else "#000000"
            if np.isfinite(value):
                axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
        if panel.level is not None:
            axes.axvline(
                across.index(panel.level) - 0.5,
                color="#000000",
                linewidth=1.1,
                linestyle=(0, (3, 1.5)),
            )
        _set_ticks(axes.xaxis, across)
        _set_ticks(axes.yaxis, down)
        axes.set_xlabel(panel.xlabel or panel.x.replace("_", " "))
    for first, *others in grid:
        for axes in others:
            axes.tick_params(labelleft=False)
        if all_numbers(down):
            first.set_ylabel(panel.y.replace("_", " "))
    if signed:
        bar: dict[str, Any] = {
            "extend": "both" if largest > limit else "neither",
            "format": _PERCENT if share else None,
        }
    else:
        tens = 10.0 ** np.arange(np.ceil(np.log10(norm.vmin)), np.floor(np.log10(norm.vmax)) + 1)
        few = len(tens) < 2
        form = FuncFormatter(lambda value, _: f"{value:.1e}" if few else power(value))
        bar = {"ticks": [norm.vmin, norm.vmax] if few else tens, "format": form}
    if signed or positive.size:
        colorbar = grid[0, 0].figure.colorbar(image, ax=list(grid.flat), pad=0.02, aspect=30, **bar)
        colorbar.set_label(fill(panel.label, 20))
        colorbar.ax.grid(visible=False)
        colorbar.minorticks_off()


def _set_ticks(axis: Any, values: Sequence[Any]) -> None:
    if all_numbers(values):
        stride = math.ceil(len(values) / 12) if len(values) > 16 else 1
        axis.set_ticks(range(0, len(values), stride), [f"{value:g}" for value in values[::stride]])
    else:
        rotation = (
            {"rotation": 30, "ha": "right"}
            if axis.axis_name == "x" and max(map(len, map(str, values))) > 4
            else {}
        )
        axis.set_ticks(
            range(len(values)),
            [fill(str(value), _LABEL) for value in values],
            fontsize=7.5,
            **rotation,
        )
