"""The page of an experiment that has none of its own: its sentences, figures and tables, what was chosen, what made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp._version import __version__
from kvinterp.common.numbers import counted, number
from kvinterp.common.store import write_whole
from kvinterp.study.report.findings import findings_table
from kvinterp.study.report.latex import numeric
from kvinterp.study.report.page import Answer, Column, Folded, Pairs, Table, Text, render
from kvinterp.study.report.svg import picture
from kvinterp.study.report.tokens import SCRIPTS, SHEETS

_ROWS = 40
"""Rows of a table that the page shows; the file has them all."""


def write_experiment(
    folder: Path,
    question: str,
    sentences: Sequence[str],
    tables: Mapping[str, pd.DataFrame],
    figures: Sequence[Path],
    chosen: Mapping[str, Any],
    provenance: Mapping[str, Any],
    lead: Sequence[Any] = (),
    findings: pd.DataFrame | None = None,
) -> Path:
    """Writes ``report.html``.

    Args:
        folder: The folder of the result.
        question: What was asked; its first line is the heading.
        sentences: What was found, the most important first.
        tables: The tables by name.
        figures: Their PNGs; drawn as SVG where they were saved within :func:`kvinterp.study.report.style.keeping`.
        chosen: The choices.
        provenance: The provenance: of one model, or of each by its name.
        lead: Parts that stand right behind what was found.
        findings: What was found, row by row.

    Returns:
        The page's path.
    """
    heading, _, more = question.partition("\n")
    lines = [line for line in sentences if line]
    several = (
        provenance if provenance and all(isinstance(one, Mapping) for one in provenance.values()) else {"": provenance}
    )
    models = dict.fromkeys(str(each.get("model", name)) for name, each in several.items())
    parts: list[Any] = [*([Answer(lines)] if lines else []), *lead]
    pictures = [picture(path, path.stem.replace("_", " ")) for path in figures if path.suffix == ".png"]
    parts += pictures if findings is None else [*pictures[:1], findings_table(findings), *pictures[1:]]
    if more.strip():
        parts.append(Folded("What was asked", [Text(text) for text in more.strip().split("\n\n")]))
    parts += [shown(name, table) for name, table in tables.items() if name != "findings"]
    parts += last_parts(chosen, several, "every table as .parquet, the figures, and all of it in summary.json.")
    kicker = " · ".join([f"kvinterp {__version__}", ", ".join(filter(None, models))])
    path = folder / "report.html"
    more_of = {"scripts": SCRIPTS, "sheets": SHEETS} if lead else {}
    write_whole(path, render("report", f"kvinterp: {heading}", parts, heading, kicker, **more_of))
    return path


def last_parts(chosen: Mapping[str, Any], several: Mapping[str, Mapping[str, Any]], beside: str) -> list[Any]:
    """How a page of experiments ends: what was chosen, what made it, and what lies beside it."""
    return [
        Folded("What was chosen", [Pairs({name: said(value) for name, value in chosen.items()}, "beside")]),
        *made_with_parts(several, "model"),
        Text(f"Beside this page: {beside}", look="note"),
    ]


def made_with_parts(several: Mapping[str, Mapping[str, Any]], what: str) -> list[Any]:
    """What some things were made with, by their provenances: what they share, and what differs."""
    rows = {name: flattened(one) for name, one in several.items()}
    if not any(rows.values()):
        return []
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    varying = [key for key in keys if len({row.get(key) for row in rows.values()}) > 1]
    (first, *_) = rows.values()
    common = [[key, first[key]] for key in keys if key not in varying]
    parts: list[Any] = [
        Text("The same on every line of the tables and in every figure:"),
        Table([Column("what"), Column("value")], common),
    ]
    if varying:
        cells = [[name, *[row.get(key, "") for key in varying]] for name, row in rows.items()]
        parts += [Text("And what differs:"), Table([Column(what), *map(Column, varying)], cells)]
    return [Folded("What this was made with", parts)]


def flattened(provenance: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values by dotted keys, as text."""
    rows: dict[str, str] = {}
    for key, value in provenance.items():
        nested = isinstance(value, Mapping)
        rows |= flattened(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": str(value)}
    return rows


def shown(name: str, table: pd.DataFrame) -> Table:
    """The beginning of a table, folded, under the name ``table-NAME``."""
    counts = f"{counted(len(table), 'row')} of {counted(table.shape[1], 'column')}"
    more = f", the first {_ROWS} here, all in {name}.parquet" if len(table) > _ROWS else ""
    numbers = numeric(table)
    head = [Column(column, "number" if is_number else "") for column, is_number in numbers.items()]
    rows = [
        [number(cell) if is_number else said(cell) for cell, is_number in zip(row, numbers.values(), strict=True)]
        for row in table.head(_ROWS).itertuples(index=False)
    ]
    return Table(head, rows, folded=f"{name}: {counts}{more}", name=f"table-{name}", file=f"{name}.parquet")


def said(value: Any) -> str:
    """A choice or a cell as text."""
    if value is None:
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
