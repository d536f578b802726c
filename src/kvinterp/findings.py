"""Findings and charts as data: rows with estimate, interval and n, and charts that name a table and
its columns.

A finding is one row, with an estimate, its interval, its number of units, and a null or a test. The
columns of :data:`COLUMNS` are always there. Every other column is a label (``model``, ``layer``,
``policy``); a label without a value does not apply to the row. A chart is a title and rows of
panels, each with a table and the columns that are drawn; :func:`kvinterp.report.charts.draw_chart`
draws it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.common.numbers import ends_said, number
from kvinterp.errors import in_one_line

# Findings -----------------------------------------------------------------------------------------

UNKNOWN = (np.nan, np.nan)
"""The ends of an interval that there is not."""
Finding: TypeAlias = dict[str, Any]
"""A row: :data:`COLUMNS` and labels."""
COLUMNS = (
    "finding",
    "estimate",
    "low",
    "high",
    "n",
    "unit",
    "measure",
    "null",
    "test",
    "p",
    "p_corrected",
    "verdict",
    "note",
    "experiment",
)


def finding(
    name: str,
    estimate: float,
    ends: Iterable[float] = UNKNOWN,
    n: float = 0,
    unit: str = "prompts",
    measure: str = "",
    *,
    null: float = np.nan,
    test: str = "",
    p: float = np.nan,
    p_corrected: float = np.nan,
    verdict: str = "",
    note: str = "",
    **labels: Any,
) -> Finding:
    """Makes a finding.

    Args:
        name: The quantity that was estimated, as in ``"median L2 of resid_post"``.
        estimate: The number.
        ends: The two ends of its 95% interval; NaN if there is none.
        n: How many units it rests on.
        unit: The unit of analysis, in the plural.
        measure: The unit of measure: ``"nats"``, ``"times"``, ``"%"`` for a share.
        null: The same number under conditions that should show no effect.
        test: The test that gave p.
        p: Its p-value.
        p_corrected: The p-value, corrected for how many were tested.
        verdict: The verdict of a rule.
        note: A reservation or a reason, in a few words.
        labels: Its labels, such as ``layer=3``.
    """
    low, high = ends
    values = (
        name,
        estimate,
        low,
        high,
        n,
        unit,
        measure,
        null,
        test,
        p,
        p_corrected,
        verdict,
        note,
        "",
    )
    return {**labels, **dict(zip(COLUMNS, values, strict=True))}


def finding_from(
    row: Any, name: str, column: str, by: Iterable[str] = (), **options: Any
) -> Finding:
    """Makes a finding of a number in a table's row.

    Args:
        row: The row, with n; the number's interval is in ``COLUMN_low`` and ``COLUMN_high``, or
            else in ``low`` and ``high``.
        name: The quantity that was estimated.
        column: The column of the number.
        by: The columns that are labels.
        options: Further arguments of :func:`finding`, which win.
    """
    ends = [row.get(f"{column}_{end}", row.get(end, np.nan)) for end in ("low", "high")]
    return finding(
        name,
        row[column],
        **{"ends": ends, "n": row.get("n", 0), **{label: row[label] for label in by}, **options},
    )


def ends_of(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns a table in which ``low`` and ``high`` are the interval of a column, as charts draw
    it.
    """
    return table.rename(columns={f"{column}_low": "low", f"{column}_high": "high"})


def median_of(name: str, values: Any, clusters: Any = None, **options: Any) -> Finding:
    """Makes a finding of the median of some numbers, with its interval by order statistics.

    Args:
        name: The quantity that was estimated.
        values: The numbers; those that are not finite are left out.
        clusters: The cluster of each number, if clusters have several numbers: then the median is
            of their means.
        options: Further arguments of :func:`finding`.
    """
    values = np.asarray(values, dtype=float)
    middle = metrics.typical(np.where(np.isfinite(values), values, np.nan), clusters)
    zeros = f"{middle.zeros} of them exactly 0" if middle.zeros else ""
    return finding(name, middle.median, middle.interval, middle.n, **{"note": zeros, **options})


def share_of(name: str, events: Any, clusters: Any = None, **options: Any) -> Finding:
    """Makes a finding of the share of events, with its interval.

    Args:
        name: The quantity that was estimated.
        events: Whether each event happened.
        clusters: The cluster of each event, if clusters have several.
        options: Further arguments of :func:`finding`.
    """
    events = np.asarray(events, dtype=float)
    rate = (
        metrics.share_of(events)
        if clusters is None
        else metrics.rate_of(events, np.asarray(clusters, dtype=str))
    )
    return finding(name, rate.effect, (rate.low, rate.high), len(events), measure="%", **options)


def findings_of(rows: Iterable[Finding]) -> pd.DataFrame:
    """Makes a table of findings: labels first, then :data:`COLUMNS`."""
    table = pd.DataFrame(list(rows))
    return table.reindex(columns=[*labels_of(table), *COLUMNS])


def labels_of(table: pd.DataFrame) -> list[str]:
    """The columns that are labels."""
    return [name for name in table.columns if name not in COLUMNS]


def lines_of(table: pd.DataFrame) -> list[str]:
    """Writes each finding of a table in one line."""
    return [line(row) for row in table.to_dict("records")]


def line(row: Finding) -> str:
    """Writes a finding in one line: labels, name, estimate, interval, n, null, test, verdict and
    note.
    """
    words = in_words(row)
    amount = "has no number" if pd.isna(row["estimate"]) else words["estimate"]
    interval, n = (
        words["interval"] and f"95% interval {words['interval']}",
        words["n"] and f"n = {words['n']}",
    )
    within = ", ".join(filter(None, (interval, n, words["null"], words["test"])))
    subject = ": ".join(
        filter(None, (words["of"], f"{row['finding']} {amount}{f' ({within})' if within else ''}"))
    )
    ending = "; ".join(filter(None, (row["verdict"], row["note"])))
    return in_one_line(f"{subject}{f': {ending}' if ending else ''}.")


def in_words(row: Finding) -> dict[str, str]:
    """The labels and numbers of a finding as texts: of, estimate, interval, n, null and test; empty
    where there is none.
    """

    def written(amount: float) -> str:
        if row["measure"] != "%" or pd.isna(amount):
            return number(amount)
        return f"{100 * amount:.3g}%" if abs(amount) < 100 else f"{number(100 * amount)}%"

    unit = row["unit"].removesuffix("s") if row["n"] == 1 else row["unit"]
    measure = "" if row["measure"] == "%" else row["measure"]
    test = row["test"]
    if not pd.isna(row["p"]):
        corrected = (
            "" if pd.isna(row["p_corrected"]) else f", corrected {number(row['p_corrected'])}"
        )
        test = f"{test or 'test'} p = {number(row['p'])}{corrected}"
    return {
        "of": label_of(row),
        "estimate": f"{written(row['estimate'])} {measure}".rstrip(),
        "interval": ends_said(row["low"], row["high"], "{}", written),
        "n": f"{row['n']:,.12g} {unit}" if row["n"] else "",
        "null": "" if pd.isna(row["null"]) else f"null {written(row['null'])}",
        "test": test,
    }


def label_of(row: Finding) -> str:
    """The labels of a finding in words: texts as they are, numbers after their label's name."""
    labels = {
        name: label
        for name, label in row.items()
        if name not in COLUMNS and not pd.isna(label) and label != ""
    }
    if {"start", "stop"} <= labels.keys():
        first, last = labels.pop("start"), labels.pop("stop") - 1
        spot = f"position {first:g}" if first == last else f"positions {first:g} to {last:g}"
        labels["spot"] = f"{spot} ({labels.pop('text')!r})" if "text" in labels else spot
    words = (
        label if isinstance(label, str) else f"{name.replace('_', ' ')} {label:g}"
        for name, label in labels.items()
    )
    return ", ".join(words)


def only(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Returns the rows of a table in which each named column has the given value."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table


# Charts -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """A row of panels: one for each value of ``facet``, all drawn alike.

    Attributes:
        table: A tidy table; columns ``low`` and ``high`` are an interval.
        x: The column of the horizontal axis.
        y: The column of the vertical axis.
        kind: ``line``; ``points``; ``step``, a line that changes at once; ``medians``, a faint
            point a row and a line of the medians; ``dots``, a line of the panel for each ``y``;
            ``map``, a cell for each x and y.
        color: The column that tells lines apart; in a map, the column of the cells' values.
        names: The legend's names for the values of ``color``; values without a name are left out.
            By default all values.
        facet: The column that tells panels apart.
        titles: The titles of the panels by the values of ``facet``; values without a title are left
            out.
        label: The label of the axis of values (in a map, of its bar).
        xlabel: The label of the horizontal axis; by default the column's name. With dots, use
            ``label``.
        ends: How the interval is drawn: ``bars``, ``band`` or ``none``.
        scale: The scale of the values: ``zero``, logarithmic with a place for exact zeros;
            ``linear``; ``share``, 0 to 1; ``signed``, -1 to 1 with values beyond at the edge;
            ``log``.
        xscale: The scale of the horizontal axis: ``whole`` numbers, ``linear``, ``log``,
            ``doubling`` or ``share``.
        level: The place of a grey line: a value, in a map one of x, or ``equal``, where both axes
            have the same value.
        mark: The column that marks rows with a cross, and the cross's name in the legend.
        columns: Most panels in a row.
        why: The column that says why a row has no value: written at its line of dots, or in a panel
            with nothing to draw.
    """

    table: pd.DataFrame
    x: str
    y: str
    kind: str = "line"
    color: str = ""
    names: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    facet: str = ""
    titles: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    label: str = ""
    xlabel: str = ""
    ends: str = "bars"
    scale: str = "zero"
    xscale: str = "whole"
    level: float | str | None = None
    mark: tuple[str, str] = ("", "")
    columns: int = 6
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure.

    Attributes:
        title: The title.
        panels: The rows of panels, from the top.
        notes: Small print besides models, versions and machine.
    """

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = ()
