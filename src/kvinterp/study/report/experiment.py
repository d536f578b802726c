"""Makes the page of an experiment that has no page of its own: sentences, figures, tables, choices and provenance."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from kvinterp._version import __version__
from kvinterp.common.numbers import counted, ends_said, listed, machines_of, number, sentence
from kvinterp.common.store import write_whole
from kvinterp.common.vocabulary import PROTOCOLS
from kvinterp.findings.rows import bare, labels_of, p_values_of, place, units, value
from kvinterp.study.report.page import Answer, Column, Folded, Links, Pairs, Parts, Table, Text, opened, render
from kvinterp.study.report.svg import picture
from kvinterp.study.report.tokens import SCRIPTS, SHEETS

GLOSSARY = {
    "path": "How next-token logits are computed: from a KV cache, one new token a step, or from the whole prefix again.",
    "step": "Step 0 is the token the prefill decides; step 1 is the first that a cached path computes from one token.",
    "matched": sentence(PROTOCOLS["matched"]),
    "free": sentence(f"{PROTOCOLS['free']}, and KL from there on measures two texts instead of rounding"),
    "KL (nats)": "0 for equal distributions. A logit difference a hundred times smaller gives a KL ten thousand times smaller.",
    "exactly 0": "The same to the bit; a KL can also be too small for float64. Figures give zeros a place of their own.",
    "margin": "How many logits the most likely token is ahead of the next. A greedy choice can flip only where the largest "
    "logit difference is at least half of it.",
    "unit in the last place": "The distance from a number to the next one that its dtype can hold.",
    "95% interval": "Of a median by order statistics, from six prompts on; of a share Clopper and Pearson's; prompts are drawn "
    "whole. A dash says that there is none.",
    "null": "The same number where nothing should be found.",
    "machine": "The kernels of other processors add in other orders: there paths can be equal where they differ here.",
}
_ROWS = 40
"""The number of rows that the page shows of a table; the file has them all."""

OPEN = 12
"""The number of findings that are visible; the others are folded."""
SENTENCES = 3
"""The number of sentences above the figure; the others are folded below."""


def write_experiment(
    folder: Path,
    question: str,
    sentences: Sequence[str],
    tables: Mapping[str, pd.DataFrame],
    figures: Sequence[Path],
    choices: Mapping[str, Any],
    provenance: Mapping[str, Any],
    lead: Sequence[Any] = (),
    findings: pd.DataFrame | None = None,
    beside: Sequence[str] = (),
) -> Path:
    """Writes ``report.html``: a few sentences, one picture and the findings; everything else is folded.

    Args:
        folder: The folder of the result.
        question: The question; its first line is the heading.
        sentences: The answers in sentences, the most important first.
        tables: The tables by name.
        figures: Their PNGs; drawn as SVG where they were saved within :func:`kvinterp.study.report.style.keeping`.
        choices: The user's choices.
        provenance: The provenance of one model, or of each model by its name.
        lead: Parts that follow the findings.
        findings: The findings, one in a row; without them the first table takes their place.
        beside: The files beside the page.

    Returns:
        The page's path.
    """
    heading, _, explanation = question.partition("\n")
    several = (
        provenance if provenance and all(isinstance(part, Mapping) for part in provenance.values()) else {"": provenance}
    )
    pngs = [path for path in figures if path.suffix == ".png"]
    pictures = [picture(path, path.stem.replace("_", " "), narrow=path == pngs[0]) for path in pngs]
    rest = {name: table for name, table in tables.items() if name != "findings"}
    leading = list(rest)[:1] if findings is None else []
    lines = list(filter(None, sentences))
    parts: Parts = [Answer(lines[:SENTENCES]), *pictures[:1]]
    first = [table_of(name, rest.pop(name)) for name in leading]
    parts += [dataclasses.replace(table, folded="", caption=table.folded) for table in first]
    if findings is not None and len(findings):
        parts += opened(findings_table(findings), OPEN, "finding" if len(findings) == OPEN + 1 else "findings")
    folded = [table_of(name, table) for name, table in rest.items() if len(table)]
    parts += [
        Folded(counted(len(lines) - SENTENCES, "more sentence"), [Text(line) for line in lines[SENTENCES:]]),
        *lead,
        Folded(counted(len(pictures) - 1, "more figure"), pictures[1:], "figures"),
        Folded(counted(len(folded), "table"), folded, "tables"),
        Folded("What was asked", [Text(text) for text in explanation.strip().split("\n\n")]),
        *last_parts(choices, several, beside),
    ]
    more_of = {"scripts": SCRIPTS, "sheets": (*SHEETS, "shaded")} if lead else {}
    path = folder / "report.html"
    write_whole(path, render("report", f"kvinterp: {heading}", parts, heading, kicker_of(several), **more_of))
    return path


def kicker_of(several: Mapping[str, Mapping[str, Any]]) -> str:
    """The line above a heading: version, models, precision and machine, each once."""
    models = [str(about.get("model", name)) for name, about in several.items()]
    measured = [about for about in several.values() if "device" in about and "threads" in about]
    kinds = [str(about[name]) for name in ("kind", "dtype") for about in several.values() if name in about]
    items = (
        f"kvinterp {__version__}",
        listed(list(dict.fromkeys(filter(None, models)))),
        *dict.fromkeys(kinds),
        machines_of(measured) if measured else "",
    )
    return " · ".join(filter(None, items))


def last_parts(choices: Mapping[str, Any], several: Mapping[str, Mapping[str, Any]], files: Sequence[str]) -> Parts:
    """The last parts of a page: how to read it, the choices, the provenance, and the files beside it."""
    return [
        Folded("How to read this", [Pairs(GLOSSARY)]),
        Folded("What was chosen", [Pairs({name: as_text(value) for name, value in choices.items()}, "beside")]),
        *made_with_parts(several, "model"),
        Links(files={name: name for name in files}, label="Beside this page:"),
    ]


def made_with_parts(several: Mapping[str, Mapping[str, Any]], what: str) -> Parts:
    """A table of the values that some provenances share, and one of those in which they differ."""
    rows = {name: flattened(about) for name, about in several.items()}
    if not any(rows.values()):
        return []
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    varying = [key for key in keys if len({row.get(key) for row in rows.values()}) > 1]
    (first, *_) = rows.values()
    common = [[key, first[key]] for key in keys if key not in varying]
    parts: Parts = [
        Text("The same on every line of the tables and in every figure:"),
        Table([Column("what"), Column("value")], common),
    ]
    if varying:
        cells = [[name, *[row.get(key, "") for key in varying]] for name, row in rows.items()]
        parts += [Text("And what differs:"), Table([Column(what), *map(Column, varying)], cells)]
    return [Folded("What this was made with", parts)]


def flattened(provenance: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested values to dotted keys, as text."""
    rows: dict[str, str] = {}
    for key, inner in provenance.items():
        nested = isinstance(inner, Mapping)
        rows |= flattened(inner, f"{prefix}{key}.") if nested else {f"{prefix}{key}": str(inner)}
    return rows


def table_of(name: str, table: pd.DataFrame) -> Table:
    """The beginning of a table, folded, under the name ``table-NAME``."""
    first = table.head(_ROWS)
    counts = f"{counted(len(table), 'row')} of {counted(first.shape[1], 'column')}"
    rest = f", the first {_ROWS} here, all in {name}.parquet" if len(table) > _ROWS else ""
    head = [Column(column, "number" if is_number else "") for column, is_number in numeric(first).items()]
    return Table(head, cells_of(first), folded=f"{name}: {counts}{rest}", name=f"table-{name}")


def numeric(table: pd.DataFrame) -> dict[str, bool]:
    """Whether each column holds numbers, by name."""
    return {str(name): is_numeric_dtype(column) and not is_bool_dtype(column) for name, column in table.items()}


def cells_of(table: pd.DataFrame) -> list[list[str]]:
    """The rows of a table as text."""
    forms = [number if is_number else as_text for is_number in numeric(table).values()]
    return [[form(cell) for form, cell in zip(forms, row, strict=True)] for row in table.itertuples(index=False)]


def as_text(value: Any) -> str:
    """A choice or a cell as text."""
    if value is None:
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# Findings --------------------------------------------------------------------------------------------------------------


def findings_table(table: pd.DataFrame, name: str = "findings") -> Table:
    """The table of findings, without columns that are empty in every row and labels that all rows share.

    Args:
        table: Findings, as :func:`kvinterp.findings.findings_of` makes them.
        name: The name for links.
    """
    alike = [label for label in labels_of(table) if len(table) > 1 and table[label].nunique(dropna=False) == 1]
    rows: list[list[str]] = []
    for row in table.drop(columns=alike).to_dict("records"):
        ends = ends_said(row["low"], row["high"], " ({})", functools.partial(bare, row))
        null = "" if pd.isna(row["null"]) else f"null {bare(row, row['null'])}"
        notes = [str(row["verdict"]), str(row["note"]), null, p_values_of(row)]
        notes += ["nothing that it could be of"] * (pd.isna(row["estimate"]) and not any(notes))
        cells = (value(row, row["estimate"]) + ends, units(row), "; ".join(filter(None, notes)))
        rows.append([str(row["finding"]), place(row), *cells])
    names = ("finding", "of", "estimate (95% interval)", "n", "note")
    columns = [at for at in range(len(names)) if any(row[at] for row in rows)]
    head = [Column(names[at], "text" if names[at] in ("finding", "of", "note") else "") for at in columns]
    return Table(head, [[row[at] for at in columns] for row in rows], name=name, look="cards findings")
