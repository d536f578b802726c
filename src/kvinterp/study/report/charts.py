"""Draws charts that are data (:mod:`kvinterp.study.findings.charts`): one place for each kind of panel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure, FigureBase

from kvinterp.common.numbers import percent, short
from kvinterp.study.findings import Chart, Panel
from kvinterp.study.report.axes import (
    Height,
    beside,
    broken,
    color_bar,
    headed,
    legend_outside,
    log_norm,
    log_ticks,
    mapped,
    on_lines,
    percents,
    powers_of_two,
    stacked,
    whole_numbers,
    zero_aware,
)
from kvinterp.study.report.style import CMAP, DIVERGING, ink_on, line_of, of_models, series_of, sheet

_GREY = "#808080"
_WRITTEN = 96
"""So many cells of a map have their numbers written."""
_SHARE = (-0.03, 1.03)
_EDGE = 1.12
_NARROW = 4.6
"""Inches that a phone shows without scrolling."""
_ON_WHITE = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}


def drawn(chart: Chart, provenances: Sequence[Mapping[str, Any]], wide: float = 7.2) -> Figure:
    """The figure of a chart, signed with the models that it is of; its ``narrow()`` draws the same for a phone.

    Args:
        chart: What is drawn.
        provenances: Those of the models.
        wide: Inches that it is wide, at least.
    """
    grids = [_grid(panel) for panel in chart.panels]
    heights = [rows * _height(panel) + _below(panel) for panel, (_, rows, _) in zip(chart.panels, grids, strict=True)]
    widest = max(
        2.6 * columns + 1.9 * (panel.kind == "dots") for panel, (_, _, columns) in zip(chart.panels, grids, strict=True)
    )
    with sheet(max(wide, widest), 0.9 + sum(heights)) as figure:
        # Within a part of the sheet, so that the small print has a place of its own.
        inner: FigureBase = figure.subfigures(1, 1, squeeze=False)[0, 0]
        told: list[str] = []
        for part, panel, (facets, rows, columns) in zip(stacked(inner, heights), chart.panels, grids, strict=True):  # type: ignore[arg-type]
            grid = part.subplots(rows, columns, squeeze=False, sharey=panel.kind != "map")
            for axes in grid.flat[len(facets) :]:
                axes.set_visible(False)
            (_map if panel.kind == "map" else _series)(part, grid, panel, facets)
            labels = grid.flat[0].get_legend_handles_labels()[1]
            if len(labels) > 1 and labels != told:
                legend_outside(
                    part, grid.flat[0], (2 if max(map(len, labels)) > 24 else 4) // (2 if wide <= _NARROW else 1)
                )
            told = labels
        headed(figure, chart.title)
        if wide > _NARROW and not any(panel.kind == "map" for panel in chart.panels):
            narrow = dataclasses.replace(chart, panels=[dataclasses.replace(panel, columns=1) for panel in chart.panels])
            figure.narrow = lambda: drawn(narrow, provenances, _NARROW)  # type: ignore[attr-defined]  # for a page
        return of_models(figure, provenances, chart.notes)


def _grid(panel: Panel) -> tuple[list[Any], int, int]:
    """The values of ``facet`` that are drawn, and how many rows and columns of panels they need."""
    there = list(dict.fromkeys(panel.table[panel.facet])) if panel.facet else [None]
    facets = [each for each in panel.titles if each in there] if panel.titles else there
    columns = min(max(1, len(facets)), panel.columns)
    return facets, max(1, math.ceil(len(facets) / columns)), columns


def _height(panel: Panel) -> float:
    """Inches of one row of panels."""
    if panel.kind == "dots":
        lines = sum(broken(str(each), 34).count("\n") + 1 for each in dict.fromkeys(panel.table[panel.y]))
        return 0.7 + 0.2 * lines
    return 0.9 + min(2.4, max(0.6, 0.24 * panel.table[panel.y].nunique())) if panel.kind == "map" else 2.5


def _below(panel: Panel) -> float:
    """Inches for the legend of a row."""
    names = panel.names.values() or (panel.table[panel.color].unique() if panel.color and panel.kind != "map" else ())
    return 0.3 + 0.1 * len(list(names))


def _of(panel: Panel, facet: Any) -> pd.DataFrame:
    return panel.table[panel.table[panel.facet] == facet] if panel.facet else panel.table


def _titled(axes: Axes, panel: Panel, facet: Any) -> None:
    if panel.facet:
        axes.set_title(broken(panel.titles.get(facet, str(facet).removeprefix("zoo:")), 28), fontsize=9)


# Lines, points, steps and dots ------------------------------------------------------------------------------------------


def _series(target: FigureBase, grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    names = dict(panel.names) or {None: ""}
    if panel.color and not panel.names:
        names = {each: str(each) for each in dict.fromkeys(panel.table[panel.color])}
    among = panel.table[panel.table[panel.color].isin(names)] if panel.color else panel.table
    sideways = panel.kind == "dots"
    ends = [name for name in ("low", "high") if name in among and panel.ends != "none"]
    values = among[[panel.x if sideways else panel.y, *ends]].to_numpy(float)
    lines = list(dict.fromkeys(among[panel.y]))[::-1] if sideways else []
    for axes, facet in zip(grid.flat, facets, strict=False):
        height = _scaled(axes, panel, values)
        mine = _of(panel, facet)
        for index, (each, name) in enumerate(names.items()):
            apart = sideways or (panel.xscale == "whole" and panel.ends == "bars")
            shift = (index - (len(names) - 1) / 2) * min(0.08, 0.4 / len(names)) * apart
            draw = _dots if sideways else _line
            draw(axes, mine[mine[panel.color] == each] if panel.color else mine, panel, height, index, name, shift, lines)
        _levelled(axes, panel, height)
        _titled(axes, panel, facet)
        axes.set_xlabel(broken(panel.label if sideways else panel.xlabel or panel.x, 36 if len(facets) > 1 else 80))
        if sideways:
            on_lines(axes)
        else:
            _along(axes, panel, among)
    if sideways:
        grid.flat[0].set_yticks(range(len(lines)), [broken(str(each), 34) for each in lines], fontsize=7.5)
        grid.flat[0].set_ylim(-0.6, len(lines) - 0.4)
    else:
        for row in grid:
            beside(list(row), panel.label)


def _line(
    axes: Axes, table: pd.DataFrame, panel: Panel, height: Height, index: int, name: str, shift: float, _: list[Any]
) -> None:
    table = table.dropna(subset=[panel.y])
    look = line_of(index)
    if panel.kind == "medians":
        faint = {"markersize": 2.6, "alpha": 0.35, "markeredgewidth": 0, "color": look["color"]}
        axes.plot(table[panel.x] + shift, height(table[panel.y]), series_of(index).marker, **faint)
        column, told = panel.mark
        if column and table[column].any():
            crossed, known = table[table[column]], axes.get_legend_handles_labels()[1]
            cross: dict[str, Any] = {"linestyle": "none", "marker": "X", "color": "#000000", "markersize": 6, "zorder": 5}
            axes.plot(crossed[panel.x] + shift, height(crossed[panel.y]), label="" if told in known else told, **cross)
        table = table.groupby(panel.x)[panel.y].median().reset_index()
    x = table[panel.x].to_numpy(float) + shift
    if {"low", "high"} <= set(table) and panel.ends != "none":
        low, high = height(table["low"]), height(table["high"])
        if panel.ends == "band":
            step: Any = "post" if panel.kind == "step" else None
            axes.fill_between(x, low, high, step=step, color=look["color"], alpha=0.15, linewidth=0)
        else:
            axes.vlines(x, low, high, color=look["color"], linewidth=1.2)
    if panel.kind == "step":
        axes.step(x, height(table[panel.y]), where="post", **{**look, "marker": ""}, label=name)
        return
    if panel.kind == "points":
        look |= {"linestyle": "none", "alpha": 0.75}
    elif len(table) > 40:
        look |= {"markevery": max(1, len(table) // 20)}
    axes.plot(x, height(table[panel.y]), **look, label=name)
    _beyond(axes, panel, x, table[panel.y].to_numpy(float))


def _dots(
    axes: Axes, table: pd.DataFrame, panel: Panel, height: Height, index: int, name: str, shift: float, lines: list[Any]
) -> None:
    look, series = line_of(index, linestyle="none", markersize=4.5), series_of(index)
    y = np.array([lines.index(each) for each in table[panel.y]]) - 2.5 * shift
    if {"low", "high"} <= set(table) and panel.ends != "none":
        axes.hlines(y, height(table["low"]), height(table["high"]), color=series.color, linewidth=1.4)
    axes.plot(height(table[panel.x]), y, **look, label=name)
    _beyond(axes, panel, y, table[panel.x].to_numpy(float))


def _beyond(axes: Axes, panel: Panel, places: np.ndarray, values: np.ndarray) -> None:
    """The numbers of what lies beyond a signed scale, at its edge."""
    for place, value in zip(places, values, strict=True) if panel.scale == "signed" else ():
        if abs(value) > 1:
            text = f"{'▲' if value > 0 else '▼'} {percent(value)}"
            at = (0.86 * np.sign(value), place) if panel.kind == "dots" else (place, 0.92 * np.sign(value))
            axes.annotate(text, at, ha="center", va="center", fontsize=6.5, zorder=5, bbox=_ON_WHITE)


def _scaled(axes: Axes, panel: Panel, values: np.ndarray) -> Height:
    """Scales the axis of values, and says how high a value stands on it."""
    along = "x" if panel.kind == "dots" else "y"
    axis, limits = (axes.xaxis, axes.set_xlim) if along == "x" else (axes.yaxis, axes.set_ylim)
    if panel.scale == "zero":
        return zero_aware(axes, [values], along)
    if panel.scale in ("share", "signed"):
        limits(*(_SHARE if panel.scale == "share" else (-_EDGE, _EDGE)))
    if panel.scale == "signed":
        percents(axis)
        return lambda given: np.clip(np.asarray(given, dtype=float), -1.05, 1.05)
    if panel.scale == "log":
        (axes.set_xscale if along == "x" else axes.set_yscale)("log")
        log_ticks(axis)
    if panel.scale == "counts":
        # Linear up to 1, so that 0 has a place; marks at 0 are seen whole.
        (axes.set_xscale if along == "x" else axes.set_yscale)("symlog", linthresh=1)
        log_ticks(axis)
        limits(-0.15, 1.3 * max(1.0, np.nanmax(values, initial=1.0)))
    return lambda given: np.asarray(given, dtype=float)


def _along(axes: Axes, panel: Panel, among: pd.DataFrame) -> None:
    """Scales the horizontal axis of lines and points."""
    x = among[panel.x].to_numpy(float)
    if panel.xscale == "doubling":
        powers_of_two(axes, sorted({int(each) for each in x}))
    elif panel.xscale == "log":
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
    elif panel.xscale == "share":
        axes.set_xlim(*_SHARE)
    elif panel.xscale == "whole":
        whole_numbers(axes.xaxis, 10)
        if len(x):
            axes.set_xlim(x.min() - 0.5, x.max() + 0.5)


def _levelled(axes: Axes, panel: Panel, height: Height) -> None:
    look: dict[str, Any] = {"color": _GREY, "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 1}
    if panel.level == "equal":
        ends = np.geomspace(1e-9, 1, 20) if panel.xscale == "log" else np.array([0.0, 1.0])
        limits = axes.get_xlim(), axes.get_ylim()
        axes.plot(ends, height(ends), **look)
        axes.set_ylim(*limits[1])
    elif panel.level is not None:
        (axes.axvline if panel.kind == "dots" else axes.axhline)(float(panel.level), **look)


# Maps -------------------------------------------------------------------------------------------------------------------


def _map(target: FigureBase, grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    """A cell for each x and y, all panels on one scale: logarithmic and blank at 0, or white at 0 and as far to both sides."""
    values = panel.table[panel.color].to_numpy(float)
    signed = panel.scale != "zero"
    limit = 1.0 if panel.scale == "signed" or not np.isfinite(values).any() else float(np.nanmax(np.abs(values))) or 1.0
    norm: Any = Normalize(-limit, limit) if signed else log_norm(values)
    # As the table has them: the order of rows and columns is the caller's.
    rows, columns = (list(dict.fromkeys(panel.table[name])) for name in (panel.y, panel.x))
    rows, columns = (sorted(each) if _numbers(each) else each for each in (rows, columns))
    image: Any = None
    for axes, facet in zip(grid.flat, facets, strict=False):
        table = _of(panel, facet).pivot_table(index=panel.y, columns=panel.x, values=panel.color, dropna=False)
        cells = table.reindex(index=rows, columns=columns).to_numpy(float)
        # Where there is no value the ground is hatched; an exact zero is white.
        axes.patch.set(hatch="//////", facecolor="#ededed", edgecolor="#a0a0a0", linewidth=0)
        mapped(axes, np.where(np.isnan(cells), np.nan, 1.0), None, ListedColormap(["#ffffff"]))
        image = mapped(
            axes, cells if signed else np.ma.masked_where(~(cells > 0), cells), norm, DIVERGING if signed else CMAP
        )
        room = cells.size <= _WRITTEN
        for (row, column), value in np.ndenumerate(cells) if signed or room else ():
            color = DIVERGING(min(1.0, max(0.0, (value / limit + 1) / 2))) if signed else CMAP(norm(value))
            _written(axes, row, column, value, limit, room, panel.scale == "signed", color)
        if panel.level is not None:
            axes.axvline(columns.index(panel.level) - 0.5, color="#000000", linewidth=1.1, linestyle=(0, (3, 1.5)))
        _ticked(axes.xaxis, columns)
        _ticked(axes.yaxis, rows)
        axes.set_xlabel(panel.xlabel or panel.x.replace("_", " "))
        _titled(axes, panel, facet)
    for row_of_axes in grid:
        for axes in row_of_axes[1:]:
            axes.tick_params(labelleft=False)
        if _numbers(rows):
            row_of_axes[0].set_ylabel(panel.y.replace("_", " "))
    if not signed:
        if (values > 0).any():
            color_bar(target, image, list(grid.flat), panel.label)
        return
    beyond: Any = "both" if (np.abs(values) > limit).any() else "neither"
    bar = target.colorbar(image, ax=list(grid.flat), pad=0.02, aspect=30, extend=beyond)
    if panel.scale == "signed":
        percents(bar.ax.yaxis)
    bar.set_label(broken(panel.label, 20))
    bar.ax.grid(visible=False)


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(each, int | float | np.number) for each in values)


def _ticked(axis: Any, values: Sequence[Any]) -> None:
    if _numbers(values) and len(values) > 16:
        stride = math.ceil(len(values) / 12)
        axis.set_ticks(range(0, len(values), stride), [f"{each:g}" for each in values[::stride]])
    elif _numbers(values):
        axis.set_ticks(range(len(values)), [f"{each:g}" for each in values])
    else:
        turned = {"rotation": 30, "ha": "right"} if axis.axis_name == "x" and max(map(len, map(str, values))) > 4 else {}
        axis.set_ticks(range(len(values)), [broken(str(each), 34) for each in values], fontsize=7.5, **turned)


def _written(axes: Axes, row: int, column: int, value: float, limit: float, room: bool, share: bool, color: Any) -> None:
    """The number in a cell, or where there is no room a sign alone."""
    how: dict[str, Any] = {"ha": "center", "va": "center"}
    if not np.isfinite(value):
        axes.text(column, row, "n/a" if room else "×", fontsize=6, color="#555555", **how)
        return
    text = percent(value) if share else short(value).replace("-", "−")
    shown = text if room else "−" if value < -0.005 * limit else ""
    axes.text(column, row, shown, fontsize=6.5, color=ink_on(color) if value else "#000000", **how)
