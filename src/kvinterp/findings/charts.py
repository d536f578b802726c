"""Charts as data: a title and rows of panels, each a table, what of it is drawn, and by what lines and panels differ.

:func:`kvinterp.study.report.charts.drawn` draws them.
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
        table: Tidy. Where it has columns ``low`` and ``high`` they are an interval.
        x: The column of the horizontal axis.
        y: The column of the vertical axis.
        kind: ``line``; ``points``; ``step``, a line that changes at once; ``medians``, a faint point a row and a line of the
            medians; ``dots``, a line of the panel for each ``y``; ``map``, a cell for each x and y.
        color: The column that tells lines apart; of a map, the column of what its cells show.
        names: What the legend calls each value of ``color``; those not named are left out. All, as they are, unless given.
        facet: The column that tells panels apart.
        titles: What stands over the panel of each value of ``facet``; those not named are left out.
        label: What the axis of values (of a map, its bar) says.
        xlabel: What the horizontal axis says; the column's name unless given. Of dots, use ``label``.
        ends: How the interval is drawn: ``bars``, ``band`` or ``none``.
        scale: Of the values: ``zero``, logarithmic with a place for exact zeros; ``linear``; ``share``, 0 to 1; ``signed``,
            -1 to 1 with what is beyond at the edge; ``log``; ``counts``, logarithmic above 1.
        xscale: Of the horizontal axis: ``whole`` numbers, ``linear``, ``log``, ``doubling`` or ``share``.
        level: Where a grey line is: a value, of a map one of x, or ``equal``, where both axes say the same.
        mark: The column that says which rows get a cross, and the cross's name in the legend.
        columns: So many panels stand beside each other at most.
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
        title: What is to be seen.
        panels: Its rows, from above.
        notes: What the small print says besides models, versions and machine.
    """

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = ()
