"""The page of an experiment that has none of its own: its sentences, figures and tables, what was chosen, what made it."""

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
"""Rows of a table that the page shows; the file has them all."""

OPEN = 12
"""So many findings are seen before one unfolds the others."""
SENTENCES = 3
"""So many sentences are above the figure; of more the others are folded below."""


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
    beside: Sequence[str] = (),
) -> Path:
    """Writes ``report.html``: what was found in a sentence, one picture, the findings; all else is folded.

    Args:
        folder: The folder of the result.
        question: What was asked; its first line is the heading.
        sentences: What was found, the most important first.
        tables: The tables by name.
        figures: Their PNGs; drawn as SVG where they were saved within :func:`kvinterp.study.report.style.keeping`.
        chosen: The choices.
        provenance: The provenance: of one model, or of each by its name.
        lead: Parts that stand behind the findings.
        findings: What was found, row by row; without them the first table stands in their place.
        beside: The files that lie beside it.

    Returns:
        The page's path.
    """
    heading, _, more = question.partition("\n")
    several = (
        provenance if provenance and all(isinstance(one, Mapping) for one in provenance.values()) else {"": provenance}
    )
    drawn = [path for path in figures if path.suffix == ".png"]
    pictures = [picture(path, path.stem.replace("_", " "), narrow=path == drawn[0]) for path in drawn]
    rest = {name: table for name, table in tables.items() if name != "findings"}
    shown = list(rest)[:1] if findings is None else []
    lines = list(filter(None, sentences))
    parts: Parts = [Answer(lines[:SENTENCES]), *pictures[:1]]
    first = [table_of(name, rest.pop(name)) for name in shown]
    parts += [dataclasses.replace(table, folded="", caption=table.folded) for table in first]
    if findings is not None and len(findings):
        parts += opened(findings_table(findings), OPEN, "finding" if len(findings) == OPEN + 1 else "findings")
    folded = [table_of(name, table) for name, table in rest.items() if len(table)]
    parts += [
        Folded(counted(len(lines) - SENTENCES, "more sentence"), [Text(each) for each in lines[SENTENCES:]]),
        *lead,
        Folded(counted(len(pictures) - 1, "more figure"), pictures[1:], "figures"),
        Folded(counted(len(folded), "table"), folded, "tables"),
        Folded("What was asked", [Text(text) for text in more.strip().split("\n\n")]),
        *last_parts(chosen, several, beside),
    ]
    more_of = {"scripts": SCRIPTS, "sheets": (*SHEETS, "shaded")} if lead else {}
    path = folder / "report.html"
    write_whole(path, render("report", f"kvinterp: {heading}", parts, heading, kicker_of(several), **more_of))
    return path


def kicker_of(several: Mapping[str, Mapping[str, Any]]) -> str:
    """The line above a heading: version, models, precision and machine, each once."""
    models = [str(each.get("model", name)) for name, each in several.items()]
    made = [each for each in several.values() if "device" in each and "threads" in each]
    kinds = [str(each[name]) for name in ("kind", "dtype") for each in several.values() if name in each]
    said = (
        f"kvinterp {__version__}",
        listed(list(dict.fromkeys(filter(None, models)))),
        *dict.fromkeys(kinds),
        machines_of(made) if made else "",
    )
    return " · ".join(filter(None, said))


def last_parts(chosen: Mapping[str, Any], several: Mapping[str, Mapping[str, Any]], files: Sequence[str]) -> Parts:
    """How a page of experiments ends: how to read it, what was chosen, what made it, and the files beside it."""
    return [
        Folded("How to read this", [Pairs(GLOSSARY)]),
        Folded("What was chosen", [Pairs({name: said(value) for name, value in chosen.items()}, "beside")]),
        *made_with_parts(several, "model"),
        Links(files={name: name for name in files}, label="Beside this page:"),
    ]


def made_with_parts(several: Mapping[str, Mapping[str, Any]], what: str) -> Parts:
    """What some things were made with, by their provenances: what they share, and what differs."""
    rows = {name: flattened(one) for name, one in several.items()}
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
    """Nested values by dotted keys, as text."""
    rows: dict[str, str] = {}
    for key, held in provenance.items():
        nested = isinstance(held, Mapping)
        rows |= flattened(held, f"{prefix}{key}.") if nested else {f"{prefix}{key}": str(held)}
    return rows


def table_of(name: str, table: pd.DataFrame) -> Table:
    """The beginning of a table, folded, under the name ``table-NAME``."""
    first = table.head(_ROWS)
    counts = f"{counted(len(table), 'row')} of {counted(first.shape[1], 'column')}"
    more = f", the first {_ROWS} here, all in {name}.parquet" if len(table) > _ROWS else ""
    head = [Column(column, "number" if is_number else "") for column, is_number in numeric(first).items()]
    return Table(head, cells_of(first), folded=f"{name}: {counts}{more}", name=f"table-{name}")


def numeric(table: pd.DataFrame) -> dict[str, bool]:
    """Says for each column whether it holds numbers."""
    return {str(name): is_numeric_dtype(column) and not is_bool_dtype(column) for name, column in table.items()}


def cells_of(table: pd.DataFrame) -> list[list[str]]:
    """The rows of a table as text."""
    forms = [number if is_number else said for is_number in numeric(table).values()]
    return [[form(cell) for form, cell in zip(forms, row, strict=True)] for row in table.itertuples(index=False)]


def said(value: Any) -> str:
    """A choice or a cell as text."""
    if value is None:
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# Findings --------------------------------------------------------------------------------------------------------------


def findings_table(table: pd.DataFrame, name: str = "findings") -> Table:
    """The table of findings; what no row says, and what all are of, is left out.

    Args:
        table: Findings, as :func:`kvinterp.findings.findings_of` makes them.
        name: By which a link finds it.
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
