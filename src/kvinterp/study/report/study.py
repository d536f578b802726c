"""The report of a study as page, Markdown and LaTeX: the claims first, each with links to its figure, table and cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.common.numbers import counted, ends_said, number, upper
from kvinterp.common.store import write_whole
from kvinterp.study.claims.base import FAILS, HOLDS, OPEN
from kvinterp.study.claims.said import how_decided
from kvinterp.study.report.experiment import findings_table, kicker_of, last_parts, scaled, table_of
from kvinterp.study.report.latex import latex_of, markdown_of
from kvinterp.study.report.page import Answer, Bullets, Column, Fold, Folded, Links, Parts, Table, Text, render
from kvinterp.study.report.svg import picture

TITLE = "What of the FP16 paper's claims holds here"
TEXTS = ("study.md", "tables.tex")
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
    contents = {"The claims": "claims"} if "claims" in tables else {}
    contents |= {upper(part.label.replace("-", " ")): _anchor(part.label) for part in outcome.members}
    parts: Parts = [Answer(summary["reading"]), Links(contents, label="On this page:")]
    if "claims" in tables:
        links = {claim: _links(str(table), outcome, drawn) for claim, table in tables["claims"][["id", "table"]].to_numpy()}
        parts += [Text("The claims", look="h2", name="claims"), *claims_tables(tables["claims"], links)]
    shown_already = {"claims", "findings", "cells"}
    for part, found in outcome.members.items():
        findings = found.tables.get("findings")
        lines = [line for line in found.summary["reading" if findings is None else "headline"] if line]
        own = {name: tables[name] for name in part.experiment.TABLES if name in found.tables and name not in shown_already}
        shown_already |= set(own)
        figures = [picture(path, _caption(path), f"figure-{path.stem}") for path in drawn[part]]
        parts += [
            Text(upper(part.label.replace("-", " ")), look="h2", name=_anchor(part.label)),
            Bullets(lines),
            *figures[:1],
            Folded(counted(len(figures) - 1, "more figure"), figures[1:]),
        ]
        if findings is not None:
            folded = counted(len(findings), "finding")
            parts.append(dataclasses.replace(findings_table(findings, f"findings-{_anchor(part.label)}"), folded=folded))
        parts += [table_of(name, table) for name, table in own.items()]
        parts.append(_cells(part, tables["cells"]))
    parts += [Folded("How claims are decided", [Text(how_decided(tables["claims"]))])] if "claims" in tables else []
    parts += last_parts(chosen, summary["provenance"], [*(f"{name}.parquet" for name in tables), *TEXTS, "summary.json"])
    return render("report", f"kvinterp: {TITLE}", parts, TITLE, kicker_of(summary["provenance"]))


def claims_tables(claims: pd.DataFrame, links: Mapping[str, tuple[Links, str]]) -> list[Table]:
    """The claims that were decided, and folded those that were not; each by what it says, the rest of it folded.

    Args:
        claims: As :func:`kvinterp.study.claims.claims_of` gives them.
        links: Of each claim, where there are, links to what it rests on, and the experiment that decided it.
    """
    head = [
        *(Column("verdict", "filter"), Column("claim", "text"), Column("source", "filter"), Column("decided by", "filter")),
        *(Column("the paper's"), Column("here, its protocol", "number"), Column("here, matched (95% interval)")),
        *(Column("drawn"), Column("n", "number"), Column("see")),
    ]
    rows: dict[bool, list[list[Any]]] = {False: [], True: []}
    claims = claims.sort_values("verdict", key=lambda each: each.map(_ORDER), kind="stable")
    # The interval under the control beside the number under the source's protocol.
    ends = claims.rename(columns=_ENDS).assign(finding=claims["id"], measure="")
    for claim, drawn in zip(claims.to_dict("records"), scaled(ends), strict=True):
        see, by = links.get(claim["id"], ("", ""))
        more = {
            "source": f"{claim['source']}, {claim['section']}",
            "numbers": claim["measure"],
            "why": claim["why"],
            "rule": claim["rule"],
            "by construction": claim["construction"],
            "to settle it": claim["settles"],
            "p, corrected": f"{number(claim['p'])}, {number(claim['p_corrected'])}" if pd.notna(claim["p"]) else "",
        }
        rows[claim["verdict"] == OPEN].append([
            *(str(claim["verdict"]), Fold(str(claim["claim"]), {name: text for name, text in more.items() if text})),
            *(str(claim["source"]), by, str(claim["paper_value"] or "–"), number(claim["paper_protocol"])),
            number(claim["matched"]) + ends_said(claim["low"], claim["high"]),
            drawn,
            *(number(claim["n"]) if claim["n"] else "–", see),
        ])  # fmt: skip
    names = ("claims-table", "claims-open")
    made = [Table(head, each, name=name, look="cards claims") for name, each in zip(names, rows.values(), strict=True)]
    folded = dataclasses.replace(made[1], folded=f"{counted(len(rows[True]), 'claim')} {OPEN}")
    return [table for table in (made[0], folded) if table.rows]


_ORDER = {HOLDS: 0, FAILS: 1, OPEN: 2}
_ENDS = {"matched": "estimate", "paper_protocol": "null"}


def _links(table: str, outcome: Any, drawn: Mapping[Any, Sequence[Path]]) -> tuple[Links, str]:
    """Where the figure, the table and the cells are that a claim rests on, and of which experiment they are."""
    for part, found in outcome.members.items():
        if table in found.tables:
            figure = [path for path in drawn[part] if table in path.stem] or list(drawn[part])
            to = {"figure": f"figure-{figure[0].stem}"} if figure else {}
            return Links({**to, "table": f"table-{table}", "cells": f"cells-{_anchor(part.label)}"}), part.name
    return Links(), ""


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
        claims = outcome.tables["claims"]
        lines += ["## The claims", "", how_decided(claims), "", markdown_of(claims)]
    for part, found in outcome.members.items():
        lines += [f"## {upper(part.label.replace('-', ' '))}", ""]
        lines += [f"- {line}" for line in found.summary["reading"] if line]
        lines += ["", *(f"![{_caption(path)}](figures/{path.name})\n" for path in drawn[part])]
    return "\n".join(lines).rstrip() + "\n"


def _latex(tables: Mapping[str, pd.DataFrame]) -> str:
    head = "% In the preamble: \\usepackage{booktabs,longtable}. Every table of at most " + f"{_PRINTED} rows.\n\n"
    short = {name: table for name, table in tables.items() if len(table) <= _PRINTED and name != "cells"}
    return head + "\n".join(latex_of(name, table, name.replace("_", " ")) for name, table in short.items())
