"""Draws charts that are data (:mod:`kvinterp.findings.charts`): one place for each kind of panel."""

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
from kvinterp.study.report.style import CMAP, DIVERGING, ink_on, line_of, of_models, series_of, sheet

_GREY = {"color": "#808080", "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 1}
_WRITTEN = 96
"""So many cells of a map have their numbers written."""
_SHARE = (-0.03, 1.03)
_EDGE = 1.12
_NARROW = 4.6
"""Inches that a phone shows without scrolling."""
_ON_WHITE = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.6, "pad": 0.8}
_PERCENT = FuncFormatter(lambda value, _: percent(value))


def drawn(chart: Chart, provenances: Sequence[Mapping[str, Any]], wide: float = 7.2) -> Figure:
    """The figure of a chart, signed with the models that it is of; its ``narrow()`` draws the same for a phone.

    Args:
        chart: What is drawn.
        provenances: Those of the models.
        wide: Inches that it is wide, at least.
    """
    grids = [(panel, *_grid(panel)) for panel in chart.panels]
    heights = [rows * _height(panel) + _below(panel) for panel, _, rows, _ in grids]
    widest = max(2.6 * columns + 1.9 * (panel.kind == "dots") for panel, _, _, columns in grids)
    with sheet(max(wide, widest), 0.9 + sum(heights)) as figure:
        # Within a part of the sheet, so that the small print has a place of its own.
        inner: Any = figure.subfigures(1, 1)
        told: list[str] = []
        parts = inner.subfigures(len(grids), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (panel, facets, rows, columns) in zip(parts, grids, strict=True):
            grid = part.subplots(rows, columns, squeeze=False, sharey=panel.kind != "map")
            for axes in grid.flat[len(facets) :]:
                axes.set_visible(False)
            (_map if panel.kind == "map" else _series)(part, grid, panel, facets)
            labels = grid.flat[0].get_legend_handles_labels()[1]
            if len(labels) > 1 and labels != told:
                across = 2 if max(map(len, labels)) > 24 else 4
                legend_outside(part, grid.flat[0], across // (2 if wide <= _NARROW else 1))
            told = labels
        title = broken(chart.title, int(figure.get_figwidth() * 11))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
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
        lines = sum(broken(str(each)).count("\n") + 1 for each in panel.table[panel.y].unique())
        return 0.7 + 0.2 * lines
    return 0.9 + min(2.4, max(0.6, 0.24 * panel.table[panel.y].nunique())) if panel.kind == "map" else 2.5


def _below(panel: Panel) -> float:
    """Inches for the legend of a row."""
    told = panel.color and panel.kind != "map"
    return 0.3 + 0.1 * len(panel.names or (panel.table[panel.color].unique() if told else ()))


def _facet(axes: Axes, panel: Panel, facet: Any, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a panel, which gets its title."""
    if not panel.facet:
        return table
    axes.set_title(broken(panel.titles.get(facet, str(facet).removeprefix("zoo:")), 28), fontsize=9)
    return table[table[panel.facet] == facet]


def broken(text: str, width: int = 34) -> str:
    """A label in lines of so many characters, so that no name pushes the axes out of their figure."""
    return "\n".join(textwrap.wrap(text, width))


def legend_outside(target: FigureBase, axes: Axes, columns: int = 5, side: str = "lower") -> None:
    """A legend of the axes under all axes of a figure, or above them where its small print stands below."""
    handles, labels = axes.get_legend_handles_labels()
    place: Any = f"outside {side} center"
    target.legend(handles, [broken(label, 44) for label in labels], loc=place, ncols=min(len(labels), columns))


# Lines, points, steps and dots ------------------------------------------------------------------------------------------


def _series(target: FigureBase, grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    table, names = panel.table, dict(panel.names) or {None: ""}
    if panel.color:
        names = dict(panel.names) or {each: str(each) for each in table[panel.color].unique()}
        table = table[table[panel.color].isin(names)]
    if panel.ends == "none":
        table = table.drop(columns=["low", "high"], errors="ignore")
    sideways = panel.kind == "dots"
    value = panel.x if sideways else panel.y
    numbers = [value, *(name for name in ("low", "high") if name in table)]
    drawn = table.assign(size=table[value])
    if panel.scale == "signed":
        drawn[numbers] = drawn[numbers].clip(-1.05, 1.05)
    lines = list(table[panel.y].unique())[::-1] if sideways else []
    apart = sideways or (panel.xscale == "whole" and panel.ends == "bars")
    for axes, facet in zip(grid.flat, facets, strict=False):
        _scaled(axes, panel, table[numbers].to_numpy(float))
        mine = _facet(axes, panel, facet, drawn)
        for index, (each, name) in enumerate(names.items()):
            shift = (index - (len(names) - 1) / 2) * min(0.08, 0.4 / len(names)) * apart
            own = mine[mine[panel.color] == each] if panel.color else mine
            if sideways:
                _dots(axes, own, panel, index, name, np.array([lines.index(line) for line in own[panel.y]]) - 2.5 * shift)
            else:
                _line(axes, own.dropna(subset=[value]), panel, index, name, shift)
        if panel.level == "equal":
            ends, limit = np.geomspace(1e-9, 1, 20) if panel.xscale == "log" else (0.0, 1.0), axes.get_ylim()
            axes.plot(ends, ends, **_GREY)
            axes.set_ylim(*limit)
        elif panel.level is not None:
            (axes.axvline if sideways else axes.axhline)(float(panel.level), **_GREY)
        axes.set_xlabel(broken(panel.label if sideways else panel.xlabel or panel.x, 36 if len(facets) > 1 else 80))
        if sideways:
            axes.grid(visible=True, axis="x")
            axes.grid(visible=False, axis="y")
        else:
            _along(axes, panel, table[panel.x].to_numpy(float))
    if sideways:
        grid.flat[0].set_yticks(range(len(lines)), [broken(str(each)) for each in lines], fontsize=7.5)
        grid.flat[0].set_ylim(-0.6, len(lines) - 0.4)
        return
    for first, *others in grid:
        first.set_ylabel(panel.label)
        for axes in others:
            axes.tick_params(labelleft=False)


def _line(axes: Axes, table: pd.DataFrame, panel: Panel, index: int, name: str, shift: float) -> None:
    look = line_of(index)
    if panel.kind == "medians":
        faint = {"markersize": 2.6, "alpha": 0.35, "markeredgewidth": 0, "color": look["color"]}
        axes.plot(table[panel.x] + shift, table[panel.y], series_of(index).marker, **faint)
        column, told = panel.mark
        if column and table[column].any():
            crossed, known = table[table[column]], axes.get_legend_handles_labels()[1]
            cross: dict[str, Any] = {"linestyle": "none", "marker": "X", "color": "#000000", "markersize": 6, "zorder": 5}
            axes.plot(crossed[panel.x] + shift, crossed[panel.y], label="" if told in known else told, **cross)
        table = table.groupby(panel.x)[[panel.y, "size"]].median().reset_index()
    x = table[panel.x].to_numpy(float) + shift
    if "low" in table and panel.ends == "band":
        step: Any = "post" if panel.kind == "step" else None
        axes.fill_between(x, table["low"], table["high"], step=step, color=look["color"], alpha=0.15, linewidth=0)
    elif "low" in table:
        axes.vlines(x, table["low"], table["high"], color=look["color"], linewidth=1.2)
    if panel.kind == "step":
        look |= {"marker": "", "drawstyle": "steps-post"}
    elif panel.kind == "points":
        look |= {"linestyle": "none", "alpha": 0.75}
    elif len(table) > 40:
        look |= {"markevery": max(1, len(table) // 20)}
    axes.plot(x, table[panel.y], **look, label=name)
    _beyond(axes, panel, x, table["size"])


def _dots(axes: Axes, table: pd.DataFrame, panel: Panel, index: int, name: str, y: np.ndarray) -> None:
    look = line_of(index, linestyle="none", markersize=4.5)
    if "low" in table:
        axes.hlines(y, table["low"], table["high"], color=look["color"], linewidth=1.4)
    axes.plot(table[panel.x], y, **look, label=name)
    _beyond(axes, panel, y, table["size"])


def _beyond(axes: Axes, panel: Panel, places: np.ndarray, values: pd.Series) -> None:
    """The numbers of what lies beyond a signed scale, at its edge."""
    for place, value in zip(places, values, strict=True) if panel.scale == "signed" else ():
        if abs(value) > 1:
            text = f"{'▲' if value > 0 else '▼'} {percent(value)}"
            at = (0.86 * np.sign(value), place) if panel.kind == "dots" else (place, 0.92 * np.sign(value))
            axes.annotate(text, at, ha="center", va="center", fontsize=6.5, zorder=5, bbox=_ON_WHITE)


# Scales ----------------------------------------------------------------------------------------------------------------


def _scaled(axes: Axes, panel: Panel, values: np.ndarray) -> None:
    """Scales the axis of values."""
    along = "x" if panel.kind == "dots" else "y"
    axis = axes.xaxis if along == "x" else axes.yaxis
    scale, limits = getattr(axes, f"set_{along}scale"), getattr(axes, f"set_{along}lim")
    if panel.scale == "zero":
        zero_aware(axes, values, along)
    elif panel.scale == "share":
        limits(*_SHARE)
    elif panel.scale == "signed":
        limits(-_EDGE, _EDGE)
        axis.set_major_formatter(_PERCENT)
    elif panel.scale == "log":
        scale("log")
        log_ticks(axis)
    elif panel.scale == "counts":
        # Linear up to 1, so that 0 has a place; marks at 0 are seen whole.
        scale("symlog", linthresh=1)
        log_ticks(axis)
        limits(-0.15, 1.3 * max(1.0, np.nanmax(values, initial=1.0)))


def zero_aware(axes: Axes, values: np.ndarray, along: str = "y") -> None:
    """A logarithmic axis on which exact zeros have a place of their own: a grey strip under the smallest decade.

    Args:
        axes: The axes.
        values: All the numbers that will be drawn; NaN is ignored.
        along: Which axis: ``"x"`` or ``"y"``.
    """
    upright = along == "y"
    axis, span, line = (axes.yaxis, axes.axhspan, axes.axhline) if upright else (axes.xaxis, axes.axvspan, axes.axvline)
    scale, limits = getattr(axes, f"set_{along}scale"), getattr(axes, f"set_{along}lim")
    positive, zero = values[np.isfinite(values) & (values > 0)], bool((values == 0).any())
    ends = np.log10([positive.min(), positive.max()]) if positive.size else np.zeros(2)
    low, decades = np.floor(ends[0]), max(1.0, np.ceil(ends[1]) - np.floor(ends[0]))
    least, bottom = 10.0**low, 10 ** (low - 0.04 * decades)
    ticks = list(10 ** np.arange(low, low + decades + 1, max(1, math.ceil(decades / 6)))) if positive.size else []
    if zero or not positive.size:
        # Linear below the smallest decade, where nothing but zeros is.
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
    """A logarithmic axis whose ticks are plain numbers: text is not parsed for mathematics."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _along(axes: Axes, panel: Panel, x: np.ndarray) -> None:
    """Scales the horizontal axis of lines and points."""
    if panel.xscale == "doubling":
        places = sorted({int(each) for each in x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
    elif panel.xscale == "log":
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
    elif panel.xscale == "share":
        axes.set_xlim(*_SHARE)
    elif panel.xscale == "whole":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        if len(x):
            axes.set_xlim(x.min() - 0.5, x.max() + 0.5)


# Maps -------------------------------------------------------------------------------------------------------------------


def _map(target: FigureBase, grid: Any, panel: Panel, facets: Sequence[Any]) -> None:
    """A cell for each x and y, all panels on one scale: logarithmic and blank at 0, or white at 0 and as far to both sides."""
    values = panel.table[panel.color].to_numpy(float)
    known, positive = values[np.isfinite(values)], values[values > 0]
    signed, limit = panel.scale != "zero", 1.0
    if panel.scale == "linear":
        limit = float(np.abs(known).max(initial=0.0)) or 1.0
    low, high = (positive.min(), positive.max()) if positive.size else (1e-9, 1e-8)
    norm: Any = Normalize(-limit, limit) if signed else LogNorm(low, high if high > low else low * 10)
    # As the table has them: the order of rows and columns is the caller's.
    rows, columns = (list(panel.table[name].unique()) for name in (panel.y, panel.x))
    rows, columns = (sorted(each) if _numbers(each) else each for each in (rows, columns))
    how: Any = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
    for axes, facet in zip(grid.flat, facets, strict=False):
        table = _facet(axes, panel, facet, panel.table)
        table = table.pivot_table(index=panel.y, columns=panel.x, values=panel.color, dropna=False)
        cells = table.reindex(index=rows, columns=columns).to_numpy(float)
        axes.grid(visible=False)
        # Where there is no value the ground is hatched; an exact zero is white.
        axes.patch.set(hatch="//////", facecolor="#ededed", edgecolor="#a0a0a0", linewidth=0)
        axes.imshow(np.where(np.isnan(cells), np.nan, 1.0), cmap=ListedColormap(["#ffffff"]), **how)
        shown, colors = (cells, DIVERGING) if signed else (np.ma.masked_where(~(cells > 0), cells), CMAP)
        image = axes.imshow(shown, norm=norm, cmap=colors, **how)
        room = cells.size <= _WRITTEN
        for (row, column), value in np.ndenumerate(cells) if signed or room else ():
            _written(axes, row, column, value, limit, room, panel.scale == "signed", colors(norm(value)))
        if panel.level is not None:
            axes.axvline(columns.index(panel.level) - 0.5, color="#000000", linewidth=1.1, linestyle=(0, (3, 1.5)))
        _ticked(axes.xaxis, columns)
        _ticked(axes.yaxis, rows)
        axes.set_xlabel(panel.xlabel or panel.x.replace("_", " "))
    for first, *others in grid:
        for axes in others:
            axes.tick_params(labelleft=False)
        if _numbers(rows):
            first.set_ylabel(panel.y.replace("_", " "))
    bar: dict[str, Any] = {"extend": "both" if (np.abs(known) > limit).any() else "neither"}
    if panel.scale == "signed":
        bar["format"] = _PERCENT
    elif not signed:
        tens = [10.0**exponent for exponent in np.arange(np.ceil(np.log10(norm.vmin)), np.floor(np.log10(norm.vmax)) + 1)]
        few = len(tens) < 2
        form = FuncFormatter(lambda value, _: f"{value:.1e}" if few else power(value))
        bar = {"ticks": [norm.vmin, norm.vmax] if few else tens, "format": form}
    if signed or positive.size:
        drawn = target.colorbar(image, ax=list(grid.flat), pad=0.02, aspect=30, **bar)
        drawn.set_label(broken(panel.label, 20))
        drawn.ax.grid(visible=False)
        drawn.minorticks_off()


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(each, int | float | np.number) for each in values)


def _ticked(axis: Any, values: Sequence[Any]) -> None:
    if _numbers(values):
        stride = math.ceil(len(values) / 12) if len(values) > 16 else 1
        axis.set_ticks(range(0, len(values), stride), [f"{each:g}" for each in values[::stride]])
    else:
        turned = {"rotation": 30, "ha": "right"} if axis.axis_name == "x" and max(map(len, map(str, values))) > 4 else {}
        axis.set_ticks(range(len(values)), [broken(str(each)) for each in values], fontsize=7.5, **turned)


def _written(axes: Axes, row: int, column: int, value: float, limit: float, room: bool, share: bool, color: Any) -> None:
    """The number in a cell, or where there is no room a sign alone."""
    how: dict[str, Any]
    if not np.isfinite(value):
        text, how = "n/a" if room else "×", {"fontsize": 6, "color": "#555555"}
    else:
        said = percent(value) if share else short(value).replace("-", "−")
        text = said if room else "−" if value < -0.005 * limit else ""
        how = {"fontsize": 6.5, "color": ink_on(color) if value else "#000000"}
    axes.text(column, row, text, ha="center", va="center", **how)
