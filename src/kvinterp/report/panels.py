"""Charts as data that a page draws itself (``static/charts.js``): the numbers of each panel, and no
matplotlib.

:mod:`kvinterp.report.charts` draws the same tables with matplotlib where a PNG is asked for. What a
panel shows is decided here for both.
"""

from __future__ import annotations

import collections
import gzip
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvinterp.common.numbers import listed, percent, short
from kvinterp.errors import visible
from kvinterp.findings import Chart, Panel
from kvinterp.report.page import Drawing

Provenances: TypeAlias = Sequence[Mapping[str, Any]]
"""What each model of a figure was run with."""
WRITTEN = 96
"""A map with more cells than this has no numbers in them."""
DIGITS = 5
"""Digits of a number on a page: a screen has fewer places."""


def drawing(chart: Chart) -> Drawing:
    """A chart for the page's own script; its title is what a reader without pictures is told."""
    data = {
        "title": chart.title,
        "notes": list(chart.notes),
        "panels": [_panel(panel) for panel in chart.panels],
    }
    # The same data always give the same bytes.
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Drawing(chart.title, gzip.compress(text.encode(), mtime=0))


def _panel(panel: Panel) -> dict[str, Any]:
    titles = titles_of(panel)
    many = titles if len(titles) > 1 or panel.facet else dict.fromkeys(titles, "")
    shared = {
        "kind": panel.kind,
        "scale": panel.scale,
        "xscale": panel.xscale,
        "label": _text(panel.label),
        "xlabel": _text(panel.xlabel or panel.x.replace("_", " ")),
        "ylabel": _text(panel.y.replace("_", " ")),
        "ends": panel.ends,
        "columns": panel.columns,
        "mark": _text(panel.mark[1]),
    }
    return shared | (_map if panel.kind == "map" else _series)(panel, many)


def _series(panel: Panel, titles: Mapping[Any, str]) -> dict[str, Any]:
    points, names, labels = points_of(panel)
    facets = []
    for value, title in titles.items():
        here = points[points["facet"] == value]
        lines = []
        for index, color in enumerate(names):
            line = here[here["color"] == color].dropna(subset=["value"])
            drawn: dict[str, Any] = {"line": index, "faint": []}
            if panel.kind == "medians":
                drawn["faint"] = [_numbers(line["tick"]), _numbers(line["drawn"])]
                marked = line[line["mark"].astype(bool)]
                drawn["marked"] = [_numbers(marked["tick"]), _numbers(marked["drawn"])]
                line = medians_of(line)
            drawn |= {
                "at": _numbers(line["tick"]),
                "value": _numbers(line["drawn"]),
                "beyond": [
                    percent(number) if panel.scale == "signed" and abs(number) > 1 else ""
                    for number in line["value"]
                ]
                if panel.scale == "signed"
                else [],
            }
            if not line["low"].isna().all():
                drawn |= {"low": _numbers(line["low"]), "high": _numbers(line["high"])}
            lines.append(drawn)
        said = here[(here["why"] != "") & here["value"].isna()]
        why = dict(zip(said["tick"], said["why"], strict=True))
        if panel.kind == "dots":
            empty = here["value"].isna().groupby(here["tick"]).all()
            why = {tick: text for tick, text in why.items() if empty[tick]}
        else:
            why = dict(list(why.items())[:1]) if here["value"].isna().all() else {}
        facets.append(
            {
                "title": _text(title),
                "lines": lines,
                "why": [[float(tick), _text(text)] for tick, text in why.items()],
            }
        )
    level = panel.level
    return {
        "names": [_text(name) for name in names.values()],
        "labels": [_text(label) for label in labels] if panel.kind == "dots" else [],
        "level": level if level is None or isinstance(level, str) else float(level),
        "facets": facets,
    }


def _map(panel: Panel, titles: Mapping[Any, str]) -> dict[str, Any]:
    table, down, across = cells_of(panel)
    facets, signed = [], panel.scale != "zero"
    values = table["value"].to_numpy(float)
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    for value, title in titles.items():
        cells = grid_of(table, value, down, across)
        fits = cells.size <= WRITTEN
        written = [
            [
                text_of_cell(cell, panel, largest, "yes" if fits else "no")
                if (signed or fits) and np.isfinite(cell)
                else ""
                for cell in row
            ]
            for row in cells
        ]
        facets.append(
            {
                "title": _text(title),
                "cells": [_numbers(row) for row in cells],
                "written": written if any(map(any, written)) else [],
            }
        )
    return {
        "names": [],
        "rows": [_label(label) for label in down],
        "across": [_label(label) for label in across],
        "numbers": [all_numbers(down), all_numbers(across)],
        "level": None if panel.level is None else across.index(panel.level),
        "facets": facets,
    }


def _label(value: Any) -> str:
    return f"{value:g}" if all_numbers([value]) else _text(str(value))


def _text(text: Any) -> str:
    return visible(str(text))


def _numbers(values: Any) -> list[float | None]:
    """Numbers for JSON, short; None for what is none."""
    return [
        float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None
        for number in np.asarray(values, dtype=float)
    ]


# What a panel shows -------------------------------------------------------------------------------


def titles_of(panel: Panel) -> dict[Any, str]:
    """The title of each panel by the value of ``facet``."""
    values = panel.table[panel.facet].unique() if panel.facet else [""]
    titles = {value: title for value, title in panel.titles.items() if value in values}
    return titles or {value: str(value).removeprefix("zoo:") for value in values}


def columns_of(panel: Panel, **columns: str) -> pd.DataFrame:
    """The columns that are drawn, under names of their own, since a table may have columns of any
    name.
    """
    return pd.DataFrame(
        {name: panel.table[column] if column else "" for name, column in columns.items()}
    )


def points_of(panel: Panel) -> tuple[pd.DataFrame, dict[Any, str], list[Any]]:
    """What lines, points, steps and dots show.

    Returns:
        ``tick``, ``value``, ``drawn`` (the value within the scale), ``low``, ``high``, ``color``,
        ``facet``, ``mark`` and ``why`` of each row; the legend's names by the values of ``color``;
        and the labels of the places from the bottom, where these are no numbers.
    """
    sideways = panel.kind == "dots"
    value, tick = (panel.x, panel.y) if sideways else (panel.y, panel.x)
    columns = {"color": panel.color, "facet": panel.facet, "mark": panel.mark[0], "why": panel.why}
    points = columns_of(panel, tick=tick, value=value, drawn=value, **columns)
    bare = panel.ends == "none" or panel.kind == "medians"
    for end in ("low", "high"):
        points[end] = panel.table[end] if end in panel.table and not bare else np.nan
    names = dict(panel.names) or {key: str(key) for key in points["color"].unique()}
    points = points[points["color"].isin(names)].copy()
    labels = list(points["tick"].unique())[::-1]
    if sideways:
        points["tick"] = points["tick"].map(labels.index)
    if panel.scale == "signed":
        numbers = ["drawn", "low", "high"]
        points[numbers] = points[numbers].clip(-1.05, 1.05)
    return points, names, labels


def medians_of(points: pd.DataFrame) -> pd.DataFrame:
    """The median at each tick."""
    return points.groupby("tick", as_index=False)[["value", "drawn", "low", "high"]].median()


def cells_of(panel: Panel) -> tuple[pd.DataFrame, list[Any], list[Any]]:
    """What a map shows: ``row``, ``column``, ``value`` and ``facet`` of each cell, and the rows and
    the columns in order.
    """
    table = columns_of(panel, row=panel.y, column=panel.x, value=panel.color, facet=panel.facet)
    # Numbers are sorted; other rows and columns are in the order of the table, which is the
    # caller's.
    labels = (list(table[name].unique()) for name in ("row", "column"))
    down, across = (sorted(names) if all_numbers(names) else names for names in labels)
    return table, down, across


def grid_of(
    table: pd.DataFrame, facet: Any, down: Sequence[Any], across: Sequence[Any]
) -> np.ndarray:
    """The cells of one panel of a map, ``[row, column]``; NaN where there is none."""
    cells = table[table["facet"] == facet].pivot_table("value", "row", "column", dropna=False)
    return np.asarray(cells.reindex(index=down, columns=across).to_numpy(float))


def text_of_cell(value: float, panel: Panel, limit: float, fits: str) -> str:
    """What is written in a cell of a map: its number, or where there is no room a sign, which tells
    the colours apart in grey.
    """
    share = panel.scale == "signed"
    if fits == "yes":
        return percent(value) if share else short(value).replace("-", "−")
    return "−" if value < -0.005 * (1.0 if share else limit) else ""


def all_numbers(values: Sequence[Any]) -> bool:
    """Whether labels are numbers, which have an order of their own."""
    return all(isinstance(value, int | float | np.number) for value in values)


# The small print ----------------------------------------------------------------------------------

_MODEL = "{model} {kind} ({attention}) {dtype} weights {weights}"
_VERSIONS = "torch {torch} · transformers {transformers} · TransformerLens {transformer_lens} · kvinterp {kvinterp}"


def small_print(provenances: Provenances, lines: Sequence[str] = (), width: int = 130) -> str:
    """The text below a figure, in lines of a width: further lines, then what the provenances say,
    each text once.
    """
    texts = [*lines]
    # What was computed elsewhere says nothing of a machine.
    for provenance in filter(None, provenances):
        about = collections.defaultdict(lambda: "not given", provenance)
        # A result of several pairs has a list of paths b.
        paths = (
            path if isinstance(path, str) else listed(path)
            for path in provenance.get("paths", {}).values()
        )
        choices = [
            str(about[name]) for name in ("direction", "protocol", "strategy") if name in about
        ]
        choices += [f"seed {about['seed']}"] if "seed" in about else []
        # A result of many models has no model of its own, only a machine.
        model = _MODEL if "model" in about else ""
        texts += [" against ".join(paths), ", ".join(choices)]
        texts += [
            text.format_map(about) for text in (model, _VERSIONS, "{device}, threads: {threads}")
        ]
    return textwrap.fill(" · ".join(dict.fromkeys(filter(None, texts))), width)
