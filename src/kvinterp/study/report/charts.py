"""Draws charts, which are data (:mod:`kvinterp.findings.charts`), with one function for each kind of panel."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from kvinterp.common.numbers import percent, power, short
from kvinterp.findings import Chart, Panel
from kvinterp.study.report.style import CMAP, DIVERGING, ink_on, line_of, sheet, sign_with_models

_GREY = {"color": "#808080", "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 1}
_WRITTEN = 96
"""A map with more cells than this has no numbers in them."""
_SHARE = (-0.03, 1.03)
_EDGE = 1.12
_NARROW = 4.6
"""The width in inches that a phone shows without scrolling."""
_ON_WHITE = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.6, "pad": 0.8}
_PERCENT = FuncFormatter(lambda value, _: percent(value))


def draw_chart(chart: Chart, provenances: Sequence[Mapping[str, Any]], wide: float = 7.2) -> Figure:
    """Draws a chart, with the provenance of its models below; the figure's ``narrow()`` draws it again for a phone.

    Args:
        chart: The chart.
        provenances: The provenance of each model.
        wide: The smallest width in inches.
    """
    grids = [(panel, *_grid(panel)) for panel in chart.panels]
    heights = []
    for panel, _, rows, _ in grids:
        colors = panel.table[panel.color].unique() if panel.color and panel.kind != "map" else ()
        heights.append(rows * _row_height(panel) + 0.3 + 0.1 * len(panel.names or colors))
    widest = max(2.6 * columns + 1.9 * (panel.kind == "dots") for panel, _, _, columns in grids)
    with sheet(max(wide, widest), 0.9 + sum(heights)) as figure:
        # In a part of the sheet, so that the small print has a place of its own.
        inner: Any = figure.subfigures(1, 1)
        legend: list[str] = []
        parts = inner.subfigures(len(grids), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (panel, facets, rows, columns) in zip(parts, grids, strict=True):
            grid = part.subplots(rows, columns, squeeze=False, sharey=panel.kind != "map")
            for axes in grid.flat[len(facets) :]:
                axes.set_visible(False)
            (_draw_map if panel.kind == "map" else _draw_series)(part, grid, panel, facets)
            labels = grid.flat[0].get_legend_handles_labels()[1]
            if len(labels) > 1 and labels != legend:
                across = 2 if max(map(len, labels)) > 24 else 4
                legend_outside(part, grid.flat[0], across // (2 if wide <= _NARROW else 1))
            legend = labels
        title = wrapped(chart.title, int(figure.get_figwidth() * 11))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        if wide > _NARROW and not any(panel.kind == "map" for panel in chart.panels):
            narrow = dataclasses.replace(chart, panels=[dataclasses.replace(panel, columns=1) for panel in chart.panels])
            figure.narrow = lambda: draw_chart(narrow, provenances, _NARROW)  # type: ignore[attr-defined]  # for a page
        return sign_with_models(figure, provenances, chart.notes)


def _grid(panel: Panel) -> tuple[list[Any], int, int]:
    """The values of ``facet`` to draw, and the numbers of rows and columns of panels for them."""
    values = list(dict.fromkeys(panel.table[panel.facet])) if panel.facet else [None]
    facets = [title for title in panel.titles if title in values] if panel.titles else values
    columns = min(max(1, len(facets)), panel.columns)
    return facets, max(1, math.ceil(len(facets) / columns)), columns


def _row_height(panel: Panel) -> float:
    """The height of one row of panels in inches."""
    if panel.kind == "dots":
        lines = sum(wrapped(str(label)).count("\n") + 1 for label in panel.table[panel.y].unique())
        return 0.7 + 0.2 * lines
    return 0.9 + min(2.4, max(0.6, 0.24 * panel.table[panel.y].nunique())) if panel.kind == "map" else 2.5


def _facet(axes: Axes, panel: Panel, facet: Any, table: pd.DataFrame) -> pd.DataFrame:
    """Writes the title of a facet, and returns its rows of a table."""
    if not panel.facet:
        return table
    axes.set_title(wrapped(panel.titles.get(facet, str(facet).removeprefix("zoo:")), 28), fontsize=9)
    return table[table[panel.facet] == facet]


def wrapped(text: str, width: int = 34) -> str:
    """Breaks a label into lines of ``width`` characters, so that no name pushes the axes out of their figure."""
    return "\n".join(textwrap.wrap(text, width))


def legend_outside(target: FigureBase, axes: Axes, columns: int = 5, side: str = "lower") -> None:
    """Draws the legend of some axes below all axes of a figure, or above them (``side="upper"``)."""
    handles, labels = axes.get_legend_handles_labels()
    place: Any = f"outside {side} center"
    target.legend(handles, [wrapped(label, 44) for label in labels], loc=place, ncols=min(len(labels), columns))


# Lines, points, steps and dots ------------------------------------------------------------------------------------------


def _draw_series(target: FigureBase, grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    table, names = panel.table, dict(panel.names)
    if panel.color:
        names = names or {key: str(key) for key in table[panel.color].unique()}
        table = table[table[panel.color].isin(names)]
    names = names or {None: ""}
    if panel.ends == "none":
        table = table.drop(columns=["low", "high"], errors="ignore")
    sideways = panel.kind == "dots"
    value = panel.x if sideways else panel.y
    numbers = [value, *(name for name in ("low", "high") if name in table)]
    lines = list(table[panel.y].unique())[::-1] if sideways else []
    place = table[panel.y].map(lines.index) if sideways else table[panel.x]
    points = table.assign(_value=table[value], _place=place)
    if panel.scale == "signed":
        points[numbers] = points[numbers].clip(-1.05, 1.05)
    apart = sideways or (panel.xscale == "whole" and panel.ends == "bars")
    for axes, facet in zip(grid.flat, facets, strict=False):
        _scale(axes, "x" if sideways else "y", panel.scale, table[numbers].to_numpy(float))
        facet_points = _facet(axes, panel, facet, points)
        for index, (key, name) in enumerate(names.items()):
            shift = (index - (len(names) - 1) / 2) * min(0.08, 0.4 / len(names)) * apart * (-2.5 if sideways else 1)
            line_points = facet_points[facet_points[panel.color] == key] if panel.color else facet_points
            _draw_line(axes, line_points.dropna(subset=[value]), panel, index, name, shift)
        if panel.level == "equal":
            ends, limit = np.geomspace(1e-9, 1, 20) if panel.xscale == "log" else (0.0, 1.0), axes.get_ylim()
            axes.plot(ends, ends, **_GREY)
            axes.set_ylim(*limit)
        elif panel.level is not None:
            (axes.axvline if sideways else axes.axhline)(float(panel.level), **_GREY)
        axes.set_xlabel(wrapped(panel.label if sideways else panel.xlabel or panel.x, 36 if len(facets) > 1 else 80))
        if sideways:
            axes.grid(visible=True, axis="x")
            axes.grid(visible=False, axis="y")
        else:
            _scale(axes, "x", panel.xscale, table[panel.x].to_numpy(float))
    if sideways:
        grid.flat[0].set_yticks(range(len(lines)), [wrapped(str(key)) for key in lines], fontsize=7.5)
        grid.flat[0].set_ylim(-0.6, len(lines) - 0.4)
        return
    for axes in grid[:, 0]:
        axes.set_ylabel(panel.label)


def _draw_line(axes: Axes, table: pd.DataFrame, panel: Panel, index: int, name: str, shift: float) -> None:
    """Draws one line of a panel; sideways where the places are on the vertical axis."""
    sideways = panel.kind == "dots"
    look = line_of(index, linestyle="none", markersize=4.5) if sideways else line_of(index)
    if panel.kind == "medians":
        faint = {"markersize": 2.6, "alpha": 0.35, "markeredgewidth": 0, "color": look["color"]}
        axes.plot(table["_place"] + shift, table[panel.y], line_of(index)["marker"], **faint)
        column, label = panel.mark
        if column and table[column].any():
            marked, labels = table[table[column]], axes.get_legend_handles_labels()[1]
            cross: dict[str, Any] = {"linestyle": "none", "marker": "X", "color": "#000000", "markersize": 6, "zorder": 5}
            axes.plot(marked["_place"] + shift, marked[panel.y], label="" if label in labels else label, **cross)
        table = table.groupby("_place")[[panel.y, "_value"]].median().reset_index()
    places = table["_place"].to_numpy(float) + shift
    if "low" in table and panel.ends == "band" and not sideways:
        step: Any = "post" if panel.kind == "step" else None
        axes.fill_between(places, table["low"], table["high"], step=step, color=look["color"], alpha=0.15, linewidth=0)
    elif "low" in table:
        draw, width = (axes.hlines, 1.4) if sideways else (axes.vlines, 1.2)
        draw(places, table["low"], table["high"], color=look["color"], linewidth=width)
    if panel.kind == "step":
        look |= {"marker": "", "drawstyle": "steps-post"}
    elif panel.kind == "points":
        look |= {"linestyle": "none", "alpha": 0.75}
    elif len(table) > 40 and not sideways:
        look |= {"markevery": max(1, len(table) // 20)}
    axes.plot(*((table[panel.x], places) if sideways else (places, table[panel.y])), **look, label=name)
    _write_beyond(axes, panel, places, table["_value"])


def _write_beyond(axes: Axes, panel: Panel, places: np.ndarray, values: pd.Series) -> None:
    """Writes the numbers that lie beyond a signed scale at its edge."""
    for place, value in zip(places, values, strict=True) if panel.scale == "signed" else ():
        if abs(value) > 1:
            text = f"{'▲' if value > 0 else '▼'} {percent(value)}"
            at = (0.86 * np.sign(value), place) if panel.kind == "dots" else (place, 0.92 * np.sign(value))
            axes.annotate(text, at, ha="center", va="center", fontsize=6.5, zorder=5, bbox=_ON_WHITE)


# Scales ----------------------------------------------------------------------------------------------------------------


def _scale(axes: Axes, along: str, name: str, values: np.ndarray) -> None:
    """Sets the scale of an axis for the numbers that are drawn along it."""
    axis, scale, limits = (getattr(axes, part) for part in (f"{along}axis", f"set_{along}scale", f"set_{along}lim"))
    if name == "zero":
        zero_aware(axes, values, along)
    elif name == "share":
        limits(*_SHARE)
    elif name == "signed":
        limits(-_EDGE, _EDGE)
        axis.set_major_formatter(_PERCENT)
    elif name == "log":
        scale("log")
        log_ticks(axis)
    elif name == "doubling":
        scale("log", base=2)
        axis.set_ticks(places := sorted({int(value) for value in values}), list(map(str, places)))
    elif name == "whole":
        axis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        if len(values):
            limits(values.min() - 0.5, values.max() + 0.5)


def zero_aware(axes: Axes, values: np.ndarray, along: str = "y") -> None:
    """Makes an axis logarithmic, with a place for exact zeros: a grey strip below the smallest decade.

    Args:
        axes: The axes.
        values: All the numbers that will be drawn; NaN is ignored.
        along: The axis, ``"x"`` or ``"y"``.
    """
    span, line = (axes.axhspan, axes.axhline) if along == "y" else (axes.axvspan, axes.axvline)
    axis, scale, limits = (getattr(axes, part) for part in (f"{along}axis", f"set_{along}scale", f"set_{along}lim"))
    positive, zero = values[np.isfinite(values) & (values > 0)], bool((values == 0).any())
    ends = np.log10([positive.min(), positive.max()]) if positive.size else np.zeros(2)
    low, decades = np.floor(ends[0]), max(1.0, np.ceil(ends[1]) - np.floor(ends[0]))
    least, bottom = 10.0**low, 10 ** (low - 0.04 * decades)
    ticks = list(10 ** np.arange(low, low + decades + 1, max(1, math.ceil(decades / 6)))) if positive.size else []
    if zero or not positive.size:
        # Linear below the smallest decade, which holds nothing but zeros.
        scale("symlog", linthresh=least, linscale=0.11 * decades)
        span(-least / 2, least / 2, color="#dcdcdc", zorder=0, linewidth=0)
        line(least / 2, color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
        bottom, ticks = -least / 2, [0.0, *ticks]
    else:
        scale("log")
    limits(bottom, 10 ** (low + 1.04 * decades) if positive.size else least)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda at, _: power(at) if at else "exactly 0"))


def log_ticks(axis: Any) -> None:
    """Gives a logarithmic axis plain numbers as tick labels, since text is not parsed for mathematics."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# Maps -------------------------------------------------------------------------------------------------------------------


def _draw_map(target: FigureBase, grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    """Draws a cell for each x and y, all panels on one scale: logarithmic and blank at 0, or symmetric and white at 0."""
    values = panel.table[panel.color].to_numpy(float)
    finite, positive = values[np.isfinite(values)], values[values > 0]
    signed, limit = panel.scale != "zero", 1.0
    if panel.scale == "linear":
        limit = float(np.abs(finite).max(initial=0.0)) or 1.0
    low, high = (positive.min(), positive.max()) if positive.size else (1e-9, 1e-8)
    norm: Any = Normalize(-limit, limit) if signed else LogNorm(low, high if high > low else low * 10)
    # Numbers are sorted; other rows and columns are in the order of the table, which is the caller's.
    labels = (list(panel.table[name].unique()) for name in (panel.y, panel.x))
    rows, columns = (sorted(values) if _numbers(values) else values for values in labels)
    options: Any = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
    for axes, facet in zip(grid.flat, facets, strict=False):
        table = _facet(axes, panel, facet, panel.table)
        table = table.pivot_table(index=panel.y, columns=panel.x, values=panel.color, dropna=False)
        cells = table.reindex(index=rows, columns=columns).to_numpy(float)
        axes.grid(visible=False)
        # Cells without a value are hatched; an exact zero is white.
        axes.patch.set(hatch="//////", facecolor="#ededed", edgecolor="#a0a0a0", linewidth=0)
        axes.imshow(np.where(np.isnan(cells), np.nan, 1.0), cmap=ListedColormap(["#ffffff"]), **options)
        visible, colors = (cells, DIVERGING) if signed else (np.ma.masked_where(~(cells > 0), cells), CMAP)
        image = axes.imshow(visible, norm=norm, cmap=colors, **options)
        room = cells.size <= _WRITTEN
        for (row, column), value in np.ndenumerate(cells) if signed or room else ():
            _write_cell(axes, row, column, value, limit, room, panel.scale == "signed", colors(norm(value)))
        if panel.level is not None:
            axes.axvline(columns.index(panel.level) - 0.5, color="#000000", linewidth=1.1, linestyle=(0, (3, 1.5)))
        _set_ticks(axes.xaxis, columns)
        _set_ticks(axes.yaxis, rows)
        axes.set_xlabel(panel.xlabel or panel.x.replace("_", " "))
    for first, *rest in grid:
        for axes in rest:
            axes.tick_params(labelleft=False)
        if _numbers(rows):
            first.set_ylabel(panel.y.replace("_", " "))
    bar: dict[str, Any] = {"extend": "both" if (np.abs(finite) > limit).any() else "neither"}
    if panel.scale == "signed":
        bar["format"] = _PERCENT
    elif not signed:
        tens = [10.0**exponent for exponent in np.arange(np.ceil(np.log10(norm.vmin)), np.floor(np.log10(norm.vmax)) + 1)]
        few = len(tens) < 2
        form = FuncFormatter(lambda value, _: f"{value:.1e}" if few else power(value))
        bar = {"ticks": [norm.vmin, norm.vmax] if few else tens, "format": form}
    if signed or positive.size:
        colorbar = target.colorbar(image, ax=list(grid.flat), pad=0.02, aspect=30, **bar)
        colorbar.set_label(wrapped(panel.label, 20))
        colorbar.ax.grid(visible=False)
        colorbar.minorticks_off()


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float | np.number) for value in values)


def _set_ticks(axis: Any, values: Sequence[Any]) -> None:
    if _numbers(values):
        stride = math.ceil(len(values) / 12) if len(values) > 16 else 1
        axis.set_ticks(range(0, len(values), stride), [f"{value:g}" for value in values[::stride]])
    else:
        rotation = {"rotation": 30, "ha": "right"} if axis.axis_name == "x" and max(map(len, map(str, values))) > 4 else {}
        axis.set_ticks(range(len(values)), [wrapped(str(value)) for value in values], fontsize=7.5, **rotation)


def _write_cell(axes: Axes, row: int, column: int, value: float, limit: float, room: bool, share: bool, color: Any) -> None:
    """Writes the number into a cell, or a sign alone where there is no room."""
    style: dict[str, Any]
    if not np.isfinite(value):
        text, style = "n/a" if room else "×", {"fontsize": 6, "color": "#555555"}
    else:
        label = percent(value) if share else short(value).replace("-", "−")
        text = label if room else "−" if value < -0.005 * limit else ""
        style = {"fontsize": 6.5, "color": ink_on(color) if value else "#000000"}
    axes.text(column, row, text, ha="center", va="center", **style)
