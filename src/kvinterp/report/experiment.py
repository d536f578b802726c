"""Makes the page of an experiment that has no page of its own: sentences, figures, tables, choices
and provenance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from kvinterp._version import __version__
from kvinterp.common.numbers import counted, models_of, number
from kvinterp.common.result import Result
from kvinterp.common.vocabulary import PROTOCOLS
from kvinterp.findings import in_words, labels_of, lines_of
from kvinterp.report.page import Column, Drawing, Table, as_text, filled_columns, render

_ROWS = 40
"""The number of rows that the page shows of a table; the file has them all."""

OPEN = 12
"""The number of findings that are visible; the others are folded."""


def page_of(
    experiment: Any, result: Result, pictures: Sequence[Drawing], beside: Sequence[str]
) -> str:
    """The page of a result; without findings the first table takes their place.

    Args:
        experiment: What was asked.
        result: What was found.
        pictures: Its figures.
        beside: The files beside the page.
    """
    heading, _, explanation = experiment.question().partition("\n\n")
    tables, provenances = dict(result.tables), result.provenances()
    findings = tables.pop("findings", None)
    folded = [table_of(name, table) for name, table in tables.items() if len(table)]
    if findings is not None:
        # A page leads with a sentence: the study's own, or else its first finding.
        lines, found = (
            experiment.headline(result) or lines_of(findings)[:1],
            [findings_table(findings)],
        )
    else:
        lines, found = experiment.sentences(result), folded[:1]
        found, folded = (
            [dataclasses.replace(table, folded="", caption=table.folded) for table in found],
            folded[1:],
        )
    shared, differing = made_with(provenances)
    return render(
        f"kvinterp: {heading}",
        experiment.page_parts(result),
        "experiment",
        heading=heading,
        kicker=kicker_of(provenances),
        lines=list(filter(None, lines)),
        found=found,
        pictures=pictures,
        tables=folded,
        explanation=explanation,
        protocols=PROTOCOLS,
        choices=result.choices or {},
        shared=shared,
        differing=differing,
        files=[name for name in beside if name != "report.html"],
    )


def kicker_of(provenances: Mapping[str, Mapping[str, Any]]) -> str:
    """The line above a heading: version, models, precision and machine."""
    return " · ".join(filter(None, (f"kvinterp {__version__}", models_of(provenances.values()))))


def made_with(provenances: Mapping[str, Mapping[str, Any]]) -> tuple[Table, Table]:
    """A table of the values that the provenances of some models share, and one of those in which
    they differ.
    """
    made = (
        pd.json_normalize(list(map(dict, provenances.values())))
        .set_axis(list(provenances))
        .map(as_text)
    )
    common = made.nunique() == 1
    shared, differing = made.loc[:, common], made.loc[:, ~common]
    head = [Column("model"), *map(Column, differing)]
    rows = list(differing.itertuples()) if len(head) > 1 else []
    return Table([Column("what"), Column("value")], list(shared.head(1).T.itertuples())), Table(
        head, rows
    )


def table_of(name: str, table: pd.DataFrame) -> Table:
    """The beginning of a table, folded, under the name ``table-NAME``."""
    first = table.head(_ROWS)
    counts = f"{counted(len(table), 'row')} of {counted(first.shape[1], 'column')}"
    rest = f", the first {_ROWS} here, all in {name}.parquet" if len(table) > _ROWS else ""
    forms = [
        number if is_numeric_dtype(dtype) and not is_bool_dtype(dtype) else as_text
        for dtype in first.dtypes
    ]
    head = [
        Column(str(column), "number" * (form is number))
        for column, form in zip(first, forms, strict=True)
    ]
    rows = [
        [form(cell) for form, cell in zip(forms, row, strict=True)]
        for row in first.itertuples(index=False)
    ]
    return Table(head, rows, folded=f"{name}: {counts}{rest}", name=f"table-{name}")


# Findings -----------------------------------------------------------------------------------------


def findings_table(table: pd.DataFrame) -> Table:
    """The table of findings, without columns that are empty in every row and labels that all rows
    share.

    Args:
        table: Findings, as :func:`kvinterp.findings.findings_of` makes them.
    """
    alike = [
        label
        for label in labels_of(table)
        if len(table) > 1 and table[label].nunique(dropna=False) == 1
    ]
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
