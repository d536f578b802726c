"""Makes the files of an audit: verdict.json, one self-contained page, and its tables as Parquet."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvinterp.auditing.checks import NOT_RUN
from kvinterp.auditing.hints import HINT
from kvinterp.auditing.ladder import EMBEDDING, NORMED, dtype_name, part_named
from kvinterp.auditing.programs.outcome import PLAIN, REFUSED, RIGHT, WRONG
from kvinterp.auditing.reading import IN_PYTHON
from kvinterp.common.numbers import upper
from kvinterp.common.wings import taken
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Panel
from kvinterp.models.adapter import DTYPES
from kvinterp.report.experiment import kicker_of
from kvinterp.report.page import Column, Table, filled_columns, render, table_of_rows
from kvinterp.report.panels import drawing

if TYPE_CHECKING:
    from kvinterp.auditing.ladder import PrecisionRun
    from kvinterp.auditing.own_dtype import Distance
    from kvinterp.auditing.verdict import Audit, Check, Verdict

Row = Mapping[str, Any]
"""Names and values of one row."""


def files_of(result: Any) -> tuple[dict[str, str], dict[str, pd.DataFrame]]:
    """The texts and tables to write for an :class:`Audit`, or for its :class:`Verdict` alone.

    Raises:
        InputError: It was made by a version that recorded no provenance.
    """
    if not result.provenance:
        raise InputError("this verdict does not say what it was made with: make the audit again.")
    if isinstance(result.verdict, str):
        audit, verdict, tables = (
            None,
            result,
            {} if result.tokens is None else {"given": result.tokens},
        )
    else:
        audit, verdict, tables = result, result.verdict, result.written()[0]
    html = (
        taken("judges", "page", "this page")(verdict)
        if verdict.given
        else page(verdict, [f"{name}.parquet" for name in tables], audit)
    )
    return {"report.html": html, "verdict.json": verdict.to_json()}, tables


def page(verdict: Verdict, files: Sequence[str] = (), measured: Audit | None = None) -> str:
    """The self-contained page of a verdict; all text of the model is escaped.

    Args:
        verdict: The verdict.
        files: The tables beside the page.
        measured: The audit, whose blocks the page shows too.
    """
    first, why, exercised = verdict.parts
    # The first line says so of what was asked for and is off, though the cache passes.
    off = any(check.status == PLAIN and check.asked for check in verdict.checks)
    chart = ladder_chart(verdict.evidence)
    # The distances stand in a table of their own.
    figures = {one.said for one in verdict.distances}
    why = [line for line in why if line not in figures]
    said = why[: why.index(IN_PYTHON)] if IN_PYTHON in why else why
    return render(
        f"Audit of {verdict.provenance['model']}",
        template="audit",
        sheet="audit",
        kicker=kicker_of({"": verdict.provenance}),
        verdict=verdict,
        first=first,
        likely=[upper(line.removeprefix(HINT)) for line in said if line.startswith(HINT)],
        why=[line for line in said if not line.startswith(HINT)],
        distances=distance_table(verdict.distances),
        exercised=exercised,
        mark={0: "unsure" if off else "good", 3: "unsure"}.get(verdict.exit_code, "bad"),
        program=next(
            (check.lines for check in verdict.checks if check.status == WRONG and check.lines), ""
        ),
        program_title=IN_PYTHON,
        pictures=[drawing(chart)] if chart else [],
        **_uses(verdict),
        layer_name=_layer_name,
        measured=measured,
        **(_blocks(measured) if measured else {}),
        # Audits of earlier versions recorded no times.
        seconds=table_of_rows(pd.DataFrame(verdict.seconds).to_dict("records")),
        files=[*files, "verdict.json"],
    )


# The verdict and what was exercised ---------------------------------------------------------------


def distance_table(distances: Sequence[Distance]) -> Table:
    """How far each program that was asked for moves logits in the model's own dtype, a row each;
    the distance and its null stand first, since a phone shows these alone until a row is opened.
    """
    rows = []
    for one in distances:
        ended = "" if one.word == RIGHT else f"{one.word}: {one.why.rstrip('.')}. "
        sizes = (
            [f"{one.logits:.2g}", f"{one.null:.2g}", f"{one.changed} of {one.tokens:,} tokens"]
            if one.tokens
            else ["nothing was compared", "", ""]
        )
        named = f"{ended}{one.program if one.name else ''}"
        rows.append([one.name or one.program, *sizes, named])
    head = (
        Column("asked for", "text"),
        Column("largest logit difference"),
        Column("of two recomputations"),
        Column("another token first"),
        Column("program", "text"),
    )
    return filled_columns(head, rows, look="cards")


def _uses(verdict: Verdict) -> dict[str, list[Check]]:
    """The uses that are wrong, that were not run and that are right."""
    uses: dict[str, list[Check]] = {"wrong": [], "idle": [], "right": []}
    for check in verdict.checks:
        uses[{RIGHT: "right", NOT_RUN: "idle", REFUSED: "idle"}.get(check.status, "wrong")].append(
            check
        )
    return uses


# The ladder ---------------------------------------------------------------------------------------


_LINES = {
    "unit_roundoff": "unit roundoff",
    "relative_logit": "logits, free-running (relative)",
    "block_error": "largest block error given equal inputs (relative)",
}


def ladder_chart(evidence: Mapping[str, Row]) -> Chart | None:
    """The differences by precision beside the unit roundoff, which rounding follows; None
    where no precision was run.
    """
    names = sorted(
        DTYPES.keys() & evidence.keys(), key=lambda name: -evidence[name]["unit_roundoff"]
    )
    sizes = pd.DataFrame(
        {
            label: {name: evidence[name][column] for name in names}
            for column, label in _LINES.items()
        }
    )
    rows = (
        sizes.astype(float)
        .rename_axis("dtype")
        .reset_index()
        .melt("dtype", var_name="line", value_name="size")
    )
    panel = Panel(
        rows[np.isfinite(rows["size"])],
        "size",
        "dtype",
        "dots",
        color="line",
        label="relative difference",
    )
    return Chart("Does the difference fall with precision?", [panel]) if names else None


def _layer_name(layer: int | None, tensor: str) -> str | None:
    return (
        None
        if layer is None
        else part_named(layer, tensor).removeprefix("the ").removeprefix("layer ")
    )


# Blocks -------------------------------------------------------------------------------------------


def _blocks(audit: Audit) -> dict[str, Any]:
    """What the page shows of every block: the largest errors given equal inputs, and the tables of
    transformers issue 46190.
    """
    verdict, dtype, blocks = audit.verdict, audit.provenance["dtype"], {}
    marked = verdict.first_layer if verdict.exit_code else None
    for order, title in (
        ("native", "With the machine's own kernels"),
        ("fixed", "With a fixed order of additions"),
    ):
        sides = {rung.name: rung if order == "native" else rung.fixed for rung in audit.rungs}
        # Each block's largest error given equal inputs, in unit roundoffs.
        errors = {
            name: side.every_error.groupby("layer")["error"].max() / side.unit
            for name, side in sides.items()
            if side is not None and len(side.every_error)
        }
        if not errors:
            continue
        table = pd.DataFrame(errors).rename_axis("layer").reset_index()
        # The embedding comes before the first block and the head after the last, where they were
        # compared.
        names = {EMBEDDING: "embedding", table["layer"].max(): "head"}
        table["layer"] = [names.get(layer, str(layer)) for layer in table["layer"]]
        blocks[title] = table_of_rows(table.to_dict("records"), here=names.get(marked, str(marked)))
    rung = audit.rung(dtype)
    issue, title = issue_tables(rung) if rung is not None and len(rung.layers) else ([], "")
    return {"blocks": blocks, "issue": issue, "issue_title": title}


def issue_tables(rung: PrecisionRun) -> tuple[list[Table], str]:
    """The tables of transformers issue 46190 as its script prints them: the logits, five of them,
    and each layer; and a title.
    """
    # A step that differs, where there is one.
    position, prefill = rung.layers[["position", "prefill"]].iloc[0]
    title = f"One token, free-running, in {dtype_name(rung.dtype)}: position {position}, fed after a prompt of {prefill} tokens"
    *layers, logits = rung.layers.to_dict("records")
    sides = distinguished([*zip(rung.top["recompute"], rung.top["cached"], strict=True)])
    top = [
        {
            "Index": str(row["index"]),
            "Full Forward": full,
            "Prefill+Decode": cached,
            "Abs Diff": f"{row['difference']:.6e}",
        }
        | ({"Token": repr(row["token"])} if "token" in row else {})
        for row, (full, cached) in zip(rung.top.to_dict("records"), sides, strict=True)
    ]
    tables = {
        "The logits, full forward against prefill and decode": [
            {**_gap(logits), "Equal": str(logits["max_abs"] == 0)}
        ],
        "Those that differ most": top,
        "Hidden states": [
            {"Layer": str(row["layer"] + (row["part"] != NORMED)), **_gap(row), "Tensor": name}
            for row, name in zip(layers, _hidden_states(layers), strict=True)
        ],
    }
    return [
        dataclasses.replace(table_of_rows(rows), caption=caption)
        for caption, rows in tables.items()
    ], title


def _gap(row: Row) -> dict[str, str]:
    return {"Max Abs Diff": f"{row['max_abs']:.6e}", "Mean Abs Diff": f"{row['mean_abs']:.6e}"}


def _hidden_states(layers: Sequence[Row]) -> Iterator[str]:
    """Which of transformers' ``hidden_states`` each row is; what the last block returned is none of
    them.
    """
    runs = collections.Counter(row["layer"] for row in layers if row["part"] != NORMED)
    seen = collections.Counter[int]()
    for row in layers:
        layer = row["layer"]
        seen[layer] += 1
        if row["part"] == NORMED:
            yield "hidden_states[-1]: after the final norm"
        elif layer == EMBEDDING:
            yield "hidden_states[0]: the embedding"
        elif max(runs.values()) > 1:
            # Which of them is which hidden state is the model's own affair.
            yield f"block {layer}'s output, run {seen[layer]} of {runs[layer]}"
        else:
            last = layer == max(runs)
            yield (
                "the last block's output, before the final norm"
                if last
                else f"hidden_states[{layer + 1}]"
            )


def distinguished(pairs: Sequence[tuple[float, float]]) -> list[tuple[str, str]]:
    """Pairs of numbers with as many digits, six at least, as it takes for two that differ to look
    different.
    """
    for digits in range(6, 18):
        # Plus 0, so that a zero has no sign.
        written = [(f"{a + 0:.{digits}g}", f"{b + 0:.{digits}g}") for a, b in pairs]
        if all(
            (a == b) == (left == right)
            for (a, b), (left, right) in zip(pairs, written, strict=True)
        ):
            break
    return written
