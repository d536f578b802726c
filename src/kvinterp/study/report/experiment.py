"""Makes the page of an experiment that has no page of its own: sentences, figures, tables, choices and provenance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from kvinterp._version import __version__
from kvinterp.common.numbers import counted, models_of, number, sentence
from kvinterp.common.result import Result
from kvinterp.common.vocabulary import PROTOCOLS
from kvinterp.findings.rows import in_words, labels_of
from kvinterp.study.report.page import (
    Answer,
    Column,
    Folded,
    Links,
    Pairs,
    Parts,
    Picture,
    Table,
    Text,
    as_text,
    filled_columns,
    pairs_of,
    render,
)

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


def page_of(experiment: Any, result: Result, pictures: Sequence[Picture], beside: Sequence[str]) -> str:
    """The page of a result: a few sentences, one picture and the findings; everything else is folded.

    Without findings the first table takes their place.

    Args:
        experiment: What was asked.
        result: What was found.
        pictures: Its figures.
        beside: The files beside the page.
    """
    heading, _, explanation = experiment.question().partition("\n")
    tables, provenances, lead = dict(result.tables), result.provenances(), experiment.page_parts(result)
    findings = tables.pop("findings", None)
    folded = [table_of(name, table) for name, table in tables.items() if len(table)]
    lines = list(filter(None, experiment.sentences(result) if findings is None else experiment.headline(result)))
    parts: Parts = [Answer(lines[:SENTENCES]), *pictures[:1]]
    if findings is None:
        parts += [dataclasses.replace(table, folded="", caption=table.folded) for table in folded[:1]]
        folded = folded[1:]
    elif len(findings):
        parts.append(findings_table(findings))
    parts += [
        Folded(counted(len(lines) - SENTENCES, "more sentence"), [Text(line) for line in lines[SENTENCES:]]),
        *lead,
        Folded(counted(len(pictures) - 1, "more figure"), pictures[1:], "figures"),
        Folded(counted(len(folded), "table"), folded, "tables"),
        Folded("What was asked", [Text(text) for text in explanation.strip().split("\n\n")]),
        Folded("How to read this", [Pairs(GLOSSARY)]),
        Folded("What was chosen", [pairs_of(result.choices or {})]),
        Folded("What this was made with", made_with(provenances)),
        Links(files={name: name for name in beside if name != "report.html"}, label="Beside this page:"),
    ]
    return render(f"kvinterp: {heading}", parts, heading, kicker_of(provenances))


def kicker_of(provenances: Mapping[str, Mapping[str, Any]]) -> str:
    """The line above a heading: version, models, precision and machine."""
    return " · ".join(filter(None, (f"kvinterp {__version__}", models_of(provenances.values()))))


def made_with(several: Mapping[str, Mapping[str, Any]]) -> Parts:
    """A table of the values that the provenances of some models share, and one of those in which they differ."""
    made = pd.json_normalize(list(map(dict, several.values()))).set_axis(list(several)).map(as_text)
    if made.empty:
        return []
    common = made.nunique() == 1
    shared, differing = made.iloc[0][common], made.loc[:, ~common]
    parts: Parts = [
        Text("The same on every line of the tables and in every figure:"),
        Table([Column("what"), Column("value")], list(shared.items())),
    ]
    if len(differing.columns):
        head = [Column("model"), *map(Column, differing)]
        parts += [Text("And what differs:"), Table(head, list(differing.itertuples()))]
    return parts


def table_of(name: str, table: pd.DataFrame) -> Table:
    """The beginning of a table, folded, under the name ``table-NAME``."""
    first = table.head(_ROWS)
    counts = f"{counted(len(table), 'row')} of {counted(first.shape[1], 'column')}"
    rest = f", the first {_ROWS} here, all in {name}.parquet" if len(table) > _ROWS else ""
    forms = [number if is_numeric_dtype(dtype) and not is_bool_dtype(dtype) else as_text for dtype in first.dtypes]
    head = [Column(str(column), "number" * (form is number)) for column, form in zip(first, forms, strict=True)]
    rows = [[form(cell) for form, cell in zip(forms, row, strict=True)] for row in first.itertuples(index=False)]
    return Table(head, rows, folded=f"{name}: {counts}{rest}", name=f"table-{name}")


# Findings --------------------------------------------------------------------------------------------------------------


def findings_table(table: pd.DataFrame) -> Table:
    """The table of findings, without columns that are empty in every row and labels that all rows share.

    Args:
        table: Findings, as :func:`kvinterp.findings.findings_of` makes them.
    """
    alike = [label for label in labels_of(table) if len(table) > 1 and table[label].nunique(dropna=False) == 1]
    rows = []
    for row in table.drop(columns=alike).to_dict("records"):
        words = in_words(row)
        interval = f" ({words['interval']})" if words["interval"] else ""
        notes = "; ".join(filter(None, (row["verdict"], row["note"], words["null"], words["test"])))
        if pd.isna(row["estimate"]):
            notes = notes or "nothing that it could be of"
        rows.append([row["finding"], words["of"], words["estimate"] + interval, words["n"], notes])
    head = [
        Column("finding", "text"),
        Column("of", "text"),
        Column("estimate (95% interval)"),
        Column("n"),
        Column("note", "text"),
    ]
    return filled_columns(head, rows, name="findings", look="cards findings", visible=OPEN)
