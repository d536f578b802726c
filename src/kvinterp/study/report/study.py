"""The report of a study as page, Markdown and LaTeX: the claims first, each with links to its figure, table and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp._version import __version__
from kvinterp.common.numbers import counted, number, sentence, upper
from kvinterp.common.store import write_whole
from kvinterp.study.report.experiment import last_parts, said, shown
from kvinterp.study.report.findings import findings_table
from kvinterp.study.report.latex import latex_of, markdown_of
from kvinterp.study.report.page import Answer, Bullets, Column, Links, Table, Text, render
from kvinterp.study.report.svg import picture

TITLE = "What of the FP16 paper's claims holds here"
_PRINTED = 60
"""Rows of a table that is set in LaTeX too."""


def write_study(folder: Path, outcome: Any, drawn: Mapping[Any, Sequence[Path]], chosen: Mapping[str, Any]) -> list[Path]:
    """Writes ``report.html``, ``study.md`` and ``tables.tex`` of a study, of whose experiments ``drawn`` holds the PNGs."""
    page = _page(outcome, drawn, chosen)
    texts = {"study.md": _markdown(outcome, drawn), "tables.tex": _latex(outcome.tables), "report.html": page}
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


# The page --------------------------------------------------------------------------------------------------------------


def _page(outcome: Any, drawn: Mapping[Any, Sequence[Path]], chosen: Mapping[str, Any]) -> str:
    tables, summary = outcome.tables, outcome.summary
    parts: list[Any] = [Answer(summary["reading"])]
    if "claims" in tables:
        parts += [Text("The claims", look="h2", name="claims"), _claims(tables["claims"], outcome, drawn)]
    shown_already = {"claims", "findings", "cells"}
    for part, found in outcome.result.items():
        findings = found.tables.get("findings")
        lines = [line for line in found.summary["reading" if findings is None else "headline"] if line]
        own = {name: tables[name] for name in part.experiment.TABLES if name in found.tables and name not in shown_already}
        shown_already |= set(own)
        parts += [Text(upper(part.label.replace("-", " ")), look="h2", name=_anchor(part.label)), Bullets(lines)]
        parts += [picture(path, _caption(path), f"figure-{path.stem}") for path in drawn[part]]
        parts += [] if findings is None else [findings_table(findings, f"findings-{_anchor(part.label)}")]
        parts += [shown(name, table) for name, table in own.items()]
        parts.append(_cells(part, tables["cells"]))
    beside = (
        "every table as .parquet, the figures as PNG, SVG and PDF, study.md, tables.tex, prompts.jsonl, "
        "and what was said and chosen in summary.json."
    )
    parts += last_parts(chosen, summary["provenance"], beside)
    kicker = f"kvinterp {__version__} · {', '.join(summary['provenance'])}"
    return render("report", f"kvinterp: {TITLE}", parts, TITLE, kicker)


def _claims(claims: pd.DataFrame, outcome: Any, drawn: Mapping[Any, Sequence[Path]]) -> Table:
    head = [
        *(Column("claim"), Column("what it says"), Column("the paper's")),
        *(Column("here, its protocol", "number"), Column("here, matched", "number"), Column("n", "number")),
        *(Column("95% interval"), Column("verdict"), Column("see"), Column("why")),
    ]
    rows: list[list[Any]] = [
        [
            str(claim["id"]),
            f"{claim['claim']} ({claim['source']}, {claim['section']})\nThe numbers: {claim['measure']}.",
            said(claim["paper_value"]) or "–",
            *(number(claim[name]) for name in ("paper_protocol", "matched")),
            number(claim["n"]) if claim["n"] else "–",
            f"{number(claim['low'])} to {number(claim['high'])}" if pd.notna(claim["low"]) else "–",
            str(claim["verdict"]),
            Links(_links(str(claim["table"]), outcome, drawn)),
            "\n".join(
                sentence(text)
                for text in (
                    claim["why"],
                    f"rule: {claim['rule']}",
                    claim["construction"] and f"decided by construction: {claim['construction']}",
                    f"to settle it: {claim['settles']}",
                )
                if text
            ),
        ]
        for claim in claims.to_dict("records")
    ]
    return Table(head, rows, name="claims-table", look="cards")


def _links(table: str, outcome: Any, drawn: Mapping[Any, Sequence[Path]]) -> dict[str, str]:
    """Where the figure, the table and the cells are that a claim rests on."""
    for part, found in outcome.result.items():
        if table in found.tables:
            figure = [path for path in drawn[part] if table in path.stem] or list(drawn[part])
            to = {"figure": f"figure-{figure[0].stem}"} if figure else {}
            return {**to, "table": f"table-{table}", "cells": f"cells-{_anchor(part.label)}"}
    return {}


def _cells(part: Any, cells: pd.DataFrame) -> Table:
    own = cells[(cells["experiment"] == part.name) & (cells["kind"] == part.kind)]
    groups = own.groupby(["function", "settings"], sort=False)["key"].agg(["first", "size"]).reset_index()
    rows = [[row.first, str(row.size), row.function, row.settings] for row in groups.itertuples(index=False, name="Row")]
    head = [Column("first of"), Column("cells", "number"), Column("function", "code"), Column("called with", "pre")]
    folded = f"what was computed: {counted(len(own), 'cell')}, all in cells.parquet"
    return Table(head, rows[:40], folded=folded, name=f"cells-{_anchor(part.label)}")


def _anchor(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label.lower()).replace("--", "-").strip("-")


def _caption(path: Path) -> str:
    return path.stem.replace("_", " ")


# Texts -----------------------------------------------------------------------------------------------------------------


def _markdown(outcome: Any, drawn: Mapping[Any, Sequence[Path]]) -> str:
    lines = [f"# {TITLE}", "", *(f"{line}\n" for line in outcome.summary["reading"])]
    if "claims" in outcome.tables:
        lines += ["## The claims", "", markdown_of(outcome.tables["claims"])]
    for part, found in outcome.result.items():
        lines += [f"## {upper(part.label.replace('-', ' '))}", ""]
        lines += [f"- {line}" for line in found.summary["reading"] if line]
        lines += ["", *(f"![{_caption(path)}](figures/{path.name})\n" for path in drawn[part])]
    return "\n".join(lines).rstrip() + "\n"


def _latex(tables: Mapping[str, pd.DataFrame]) -> str:
    head = "% In the preamble: \\usepackage{booktabs,longtable}. Every table of at most " + f"{_PRINTED} rows.\n\n"
    short = {name: table for name, table in tables.items() if len(table) <= _PRINTED and name != "cells"}
    return head + "\n".join(latex_of(name, table, name.replace("_", " ")) for name, table in short.items())
