"""Charts as data: a title and rows of panels, each with a table and the columns that are drawn.

:func:`kvinterp.study.report.charts.draw_chart` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd


@dataclasses.dataclass(frozen=True)
class Panel:
    """A row of panels: one for each value of ``facet``, all drawn alike.

    Attributes:
        table: A tidy table; columns ``low`` and ``high`` are an interval.
        x: The column of the horizontal axis.
        y: The column of the vertical axis.
        kind: ``line``; ``points``; ``step``, a line that changes at once; ``medians``, a faint point a row and a line of the
            medians; ``dots``, a line of the panel for each ``y``; ``map``, a cell for each x and y.
        color: The column that tells lines apart; in a map, the column of the cells' values.
        names: The legend's names for the values of ``color``; values without a name are left out. By default all values.
        facet: The column that tells panels apart.
        titles: The titles of the panels by the values of ``facet``; values without a title are left out.
        label: The label of the axis of values (in a map, of its bar).
        xlabel: The label of the horizontal axis; by default the column's name. With dots, use ``label``.
        ends: How the interval is drawn: ``bars``, ``band`` or ``none``.
        scale: The scale of the values: ``zero``, logarithmic with a place for exact zeros; ``linear``; ``share``, 0 to 1;
            ``signed``, -1 to 1 with values beyond at the edge; ``log``.
        xscale: The scale of the horizontal axis: ``whole`` numbers, ``linear``, ``log``, ``doubling`` or ``share``.
        level: The place of a grey line: a value, in a map one of x, or ``equal``, where both axes have the same value.
        mark: The column that marks rows with a cross, and the cross's name in the legend.
        columns: Most panels in a row.
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
