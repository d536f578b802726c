"""Findings on a page: a row each, with its estimate, interval and null drawn on the scale of the rows that say the same."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from kvinterp.common.numbers import ends_said, number
from kvinterp.study.findings.rows import bare, place, value
from kvinterp.study.report.page import Column, Interval, Table

_DRAWN = ("low", "estimate", "high", "null")
_WIDE = 100
"""Above this ratio of the largest to the smallest a scale is logarithmic."""


def findings_table(table: pd.DataFrame, name: str = "findings", file: str = "findings.parquet") -> Table:
    """The table of findings; columns in which no row says anything are left out.

    Args:
        table: Findings, as :func:`kvinterp.study.findings.findings_of` makes them.
        name: By which a link finds it.
        file: Where all of it is kept; empty where it is not.
    """
    told = [name for name in ("test", "verdict", "note") if (table[name] != "").any()]
    numbers = [name for name in ("null", "p", "p_corrected") if table[name].notna().any()]
    several = any(place(found) for found in table.to_dict("records"))
    head = [
        Column("finding", "text"),
        *([Column("of", "text")] if several else []),
        *(Column("estimate (95% interval)"), Column("drawn"), Column("n")),
        *(Column(name.replace("p_", "p "), "number") for name in numbers),
        *(Column(name, "text") for name in told),
    ]
    rows: list[list[str | Interval]] = []
    for drawn, found in zip(_scaled(table), table.to_dict("records"), strict=True):
        ends = ends_said(found["low"], found["high"], " ({})", functools.partial(bare, found))
        rows.append(
            [
                str(found["finding"]),
                *([place(found)] if several else []),
                *(value(found, found["estimate"]) + ends, drawn, f"{number(found['n'])} {found['unit']}"),
                *(bare(found, found[name]) if name == "null" else number(found[name]) for name in numbers),
                *(str(found[name]) for name in told),
            ]
        )
    return Table(head, rows, name=name, look="cards findings", file=file)


def _scaled(table: pd.DataFrame) -> list[Interval]:
    """Where each row's numbers are, from 0 to 1, between the smallest and the largest of the same finding."""
    values = table[list(_DRAWN)].to_numpy(float, copy=True)
    for _, places in table.reset_index(drop=True).groupby(["finding", "measure"], sort=False).groups.items():
        own = values[places]
        known = own[np.isfinite(own)]
        if not known.size:
            continue
        if known.min() > 0 and known.max() > _WIDE * known.min():
            own, known = np.log(own), np.log(known)
        low, high = known.min(), known.max()
        # A number that stands alone has no place on a scale.
        values[places] = (own - low) / (high - low) if high > low else np.nan
    return [Interval(*(None if not np.isfinite(each) else round(float(each), 3) for each in row)) for row in values]
