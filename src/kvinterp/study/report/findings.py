"""Findings on a page: a row each, with its estimate, interval and null drawn on the scale of the rows that say the same."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from kvinterp.common.numbers import ends_said
from kvinterp.study.findings.rows import bare, labels_of, of_how_many, place, tested, value
from kvinterp.study.report.page import Column, Interval, Table

OPEN = 12
"""So many findings are seen before one unfolds the others."""
_DRAWN = ("low", "estimate", "high", "null")
_WIDE = 100
"""Above this ratio of the largest to the smallest a scale is logarithmic."""


def findings_table(table: pd.DataFrame, name: str = "findings") -> Table:
    """The table of findings; what no row says, and what all are of, is left out.

    Args:
        table: Findings, as :func:`kvinterp.study.findings.findings_of` makes them.
        name: By which a link finds it.
    """
    alike = [label for label in labels_of(table) if len(table) > 1 and table[label].nunique(dropna=False) == 1]
    rows: list[list[str | Interval]] = []
    for drawn, found in zip(scaled(table), table.drop(columns=alike).to_dict("records"), strict=True):
        ends = ends_said(found["low"], found["high"], " ({})", functools.partial(bare, found))
        null = "" if pd.isna(found["null"]) else f"null {bare(found, found['null'])}"
        said = [str(found["verdict"]), str(found["note"]), null, tested(found)]
        said += ["nothing that it could be of"] * (pd.isna(found["estimate"]) and not any(said))
        cells = (value(found, found["estimate"]) + ends, drawn, of_how_many(found), "; ".join(filter(None, said)))
        rows.append([str(found["finding"]), place(found), *cells])
    names = ("finding", "of", "estimate (95% interval)", "drawn", "n", "note")
    kept = [at for at in range(len(names)) if any(row[at] for row in rows)]
    head = [Column(names[at], "text" if names[at] in ("finding", "of", "note") else "") for at in kept]
    return Table(head, [[row[at] for at in kept] for row in rows], name=name, look="cards findings")


def scaled(table: pd.DataFrame) -> list[Interval]:
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
