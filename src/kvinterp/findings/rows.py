"""Findings: one row each, with an estimate, its interval, how many it is of, and what it is held against.

The columns of :data:`COLUMNS` are always there. Every other column is a label that says what a row is of (``model``, ``layer``,
``policy``); one without a value does not apply to the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.common.numbers import ends_said, number
from kvinterp.errors import in_one_line

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
    what: str,
    estimate: float,
    ends: Iterable[float] = (np.nan, np.nan),
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
    **of: Any,
) -> Finding:
    """A finding.

    Args:
        what: What was estimated, as in ``"median L2 of resid_post"``.
        estimate: The number.
        ends: The two ends of its 95% interval; NaN where there is none.
        n: How many units it rests on.
        unit: The unit of analysis, in the plural.
        measure: The unit of measure: ``"nats"``, ``"times"``, ``"%"`` for a share.
        null: The same number where nothing should be found.
        test: The test that gave p.
        p: Its p-value.
        p_corrected: The p-value, corrected for how many were tested.
        verdict: What a rule says of it.
        note: A reservation or a reason, in a few words.
        of: Labels that say what it is of.
    """
    low, high = ends
    values = (what, estimate, low, high, n, unit, measure, null, test, p, p_corrected, verdict, note, "")
    return {**of, **dict(zip(COLUMNS, values, strict=True))}


def median_of(what: str, values: Any, clusters: Any = None, **more: Any) -> Finding:
    """A finding that is the median of some numbers, with its interval by order statistics.

    Args:
        what: What was estimated.
        values: The numbers; what is not finite is left out.
        clusters: What each number belongs to, where there are several for each: then the median is of their means.
        more: As for :func:`finding`.
    """
    values = np.asarray(values, dtype=float)
    known = np.isfinite(values)
    middle = metrics.typical(values[known], None if clusters is None else np.asarray(clusters, dtype=str)[known])
    zeros = f"{middle.zeros} of them exactly 0" if middle.zeros else ""
    return finding(what, middle.median, middle.interval, middle.n, **{"note": zeros, **more})


def share_of(what: str, events: Any, clusters: Any = None, of: Any = None, **more: Any) -> Finding:
    """A finding that is the share of events, with its interval.

    Args:
        what: What was estimated.
        events: Whether each happened, or how often.
        clusters: What each belongs to, where there are several for each.
        of: Out of how many each is, where not of one.
        more: As for :func:`finding`.
    """
    events = np.asarray(events, dtype=float)
    rate = metrics.share_of(events) if clusters is None else metrics.rate_of(events, np.asarray(clusters, dtype=str), of)
    n = len(events) if of is None else int(np.sum(of))
    return finding(what, rate.effect, (rate.low, rate.high), n, measure="%", **more)


def findings_of(rows: Iterable[Finding]) -> pd.DataFrame:
    """Findings as a table: labels first, then :data:`COLUMNS`."""
    table = pd.DataFrame(list(rows))
    labels = [name for name in table.columns if name not in COLUMNS]
    return table.reindex(columns=[*labels, *COLUMNS])


def labels_of(table: pd.DataFrame) -> list[str]:
    """The columns that say what a finding is of."""
    return [name for name in table.columns if name not in COLUMNS]


def lines_of(table: pd.DataFrame) -> list[str]:
    """A line a finding."""
    return [line(each) for each in table.to_dict("records")]


def line(found: Finding) -> str:
    """A finding in one line: of what, what, how much, its interval and n, and what it is held against."""
    of = place(found)
    amount = "has no number" if pd.isna(found["estimate"]) else value(found, found["estimate"])
    said = f"{f'{of}: ' if of else ''}{found['finding']} {amount}"
    interval = ends_said(found["low"], found["high"], "95% interval {}", lambda end: bare(found, end))
    n = f"n = {of_how_many(found)}" if found["n"] else ""
    null = "" if pd.isna(found["null"]) else f"null {bare(found, found['null'])}"
    within = ", ".join(filter(None, (interval, n, null, tested(found))))
    ending = "; ".join(filter(None, (found["verdict"], found["note"])))
    return in_one_line(f"{said}{f' ({within})' if within else ''}{f': {ending}' if ending else ''}.")


def place(found: Finding) -> str:
    """What a finding is of, by its labels: texts as they are, numbers behind their label's name."""
    known = {name: of for name, of in found.items() if name not in COLUMNS and not pd.isna(of) and of != ""}
    if {"start", "stop"} <= known.keys():
        first, last = known.pop("start"), known.pop("stop") - 1
        spot = f"position {first:g}" if first == last else f"positions {first:g} to {last:g}"
        known["spot"] = f"{spot} ({known.pop('text')!r})" if "text" in known else spot
    return ", ".join(of if isinstance(of, str) else f"{name.replace('_', ' ')} {of:g}" for name, of in known.items())


def of_how_many(found: Finding) -> str:
    """How many units a finding rests on."""
    unit = found["unit"].removesuffix("s") if found["n"] == 1 else found["unit"]
    return f"{found['n']:,g} {unit}" if found["n"] else ""


def value(found: Finding, given: float) -> str:
    """A number with the finding's unit of measure."""
    return bare(found, given) if found["measure"] == "%" else f"{number(given)} {found['measure']}".rstrip()


def bare(found: Finding, given: float) -> str:
    """A number without its unit, which stands beside it already; a share in percent."""
    if found["measure"] != "%" or pd.isna(given):
        return number(given)
    return f"{100 * given:.3g}%" if abs(given) < 100 else f"{number(100 * given)}%"


def tested(found: Finding) -> str:
    """The test of a finding and its p-values; nothing where nothing was tested."""
    if pd.isna(found["p"]):
        return str(found["test"])
    corrected = "" if pd.isna(found["p_corrected"]) else f", corrected {number(found['p_corrected'])}"
    return f"{found['test'] or 'test'} p = {number(found['p'])}{corrected}"


def only(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The rows of a table in which each of these columns holds that value."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table
