"""Makes the files of an audit: verdict.json, one self-contained page, and its tables as Parquet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.auditing.checks import NOT_RUN
from kvinterp.auditing.ladder import EMBEDDING, part_named
from kvinterp.auditing.reading import IN_PYTHON
from kvinterp.common.numbers import counted
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Panel
from kvinterp.models.adapter import DTYPES
from kvinterp.programs.running import PLAIN, REFUSED, RIGHT, WRONG
from kvinterp.study.report import engine
from kvinterp.study.report.charts import draw_chart
from kvinterp.study.report.experiment import kicker_of
from kvinterp.study.report.page import (
    Answer,
    Column,
    Folded,
    Links,
    Pairs,
    Parts,
    Table,
    Text,
    pairs_of,
    render,
    table_of_rows,
)
from kvinterp.study.report.svg import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvinterp.auditing.ladder import PrecisionRun
    from kvinterp.auditing.verdict import Audit, Verdict

Row = Mapping[str, Any]
"""Names and values of one row."""

_LADDER = (
    "Free-running: the logits of tokens fed one by one against those of the same prefix recomputed. The null "
    "control is the same row recomputed among more rows. Given equal inputs: every block was handed the rows that the "
    "recomputation handed it, so that its error is its own. With a fixed order of additions what is left has another reason "
    "than the order of additions."
)
_FIRST_TENSORS = (
    "Of each precision the first tensor that nothing takes away, or else the first that differs. Errors in "
    "unit roundoffs; left is what remains once the cause is taken away."
)
_BLOCKS = (
    "The largest error of each block in any row that was checked, in unit roundoffs of each precision. A "
    "large one is no verdict by itself: what takes it away is."
)
_BLOCKS_ELSEWHERE = (
    "This page was made of the verdict alone. What every block showed is on the page of kvinterp audit, and in "
    "kv.audit(model, detail='everything')."
)
_CHECKS = (
    "Error: the largest difference of the logits beside one forward without a cache over a row's own tokens, relative to the "
    "largest logit. The limit is the root of how far that forward is from itself."
)


def texts_of(audit: Audit) -> dict[str, str]:
    """Page and verdict by the names of their files."""
    return {"report.html": page(audit), "verdict.json": audit.verdict.to_json()}


def files_of(result: Any) -> tuple[dict[str, str], dict[str, pd.DataFrame]]:
    """The texts and tables to write for an :class:`Audit`, or for its :class:`Verdict` alone.

    Raises:
        InputError: It was made by a version that recorded no provenance.
    """
    if not result.provenance:
        raise InputError("this verdict does not say what it was made with: make the audit again.")
    if not isinstance(result.verdict, str):
        return texts_of(result), result.written()[0]
    if result.given:
        return engine.texts_of(result), {} if result.tokens is None else {"given": result.tokens}
    return {"report.html": page_of(result, [Text(_BLOCKS_ELSEWHERE)]), "verdict.json": result.to_json()}, {}


def page(audit: Audit) -> str:
    """The self-contained page of an audit; all text of the model is escaped."""
    verdict, dtype = audit.verdict, audit.provenance["dtype"]
    blocks = [
        Text(_BLOCKS, look="note"),
        *_block_tables(audit, verdict.first_layer if verdict.exit_code else None),
        *_issue_tables(audit.rung(dtype), dtype),
    ]
    return page_of(verdict, blocks, [f"{name}.parquet" for name in audit.written()[0]])


def page_of(verdict: Verdict, blocks: Sequence[Any], files: Sequence[str] = ()) -> str:
    """The page of a verdict: the word and its reason, the ladder, and the checks that did not pass; all else is folded.

    Args:
        verdict: The verdict.
        blocks: The parts of the page about every block.
        files: The tables beside the page.
    """
    first, why, _ = verdict.parts
    program = next((check.lines for check in verdict.checks if check.status == WRONG and check.lines), "")
    why = why[: why.index(IN_PYTHON)] if IN_PYTHON in why else why
    # What a model that passes showed in each precision stands with the ladder.
    passes = verdict.exit_code == 0 and bool(verdict.evidence)
    why, more = why[:1], [*map(Text, why[1:])]
    figure, off = ladder_figure(verdict.evidence), any(check.status == PLAIN and check.asked for check in verdict.checks)
    rungs = table_of_rows([_rung_row(name, rung) for name, rung in verdict.evidence.items()])
    ladder = [
        Folded("The ladder, precision by precision", [*(more if passes else []), Text(_LADDER, look="note"), rungs]),
        Folded("The first tensor that differs, given equal inputs", _first_tensors(verdict)),
        Folded("Block by block, given equal inputs", blocks),
    ]
    parts = [
        # Of what was asked for and is off the first line says so, though the cache passes.
        Answer([first, *why], {0: "unsure" if off else "good", 3: "unsure"}.get(verdict.exit_code, "bad")),
        *([] if passes else [Folded(f"{counted(len(more), 'more sentence')} on why", more)] * bool(more)),
        *([Table([Column(IN_PYTHON.rstrip(":"), "pre")], [[program]])] if program else []),
        *([_first_place(verdict)] if verdict.exit_code == 1 else []),
        *([] if figure is None else [picture(figure, "The precision ladder", narrow=True)]),
        *_use_parts(verdict),
        *(ladder if verdict.evidence else []),
        # Audits of earlier versions recorded no times.
        Folded("What took how long", [table_of_rows(pd.DataFrame(verdict.seconds).to_dict("records"))]),
        Folded("What this was made with", [pairs_of(verdict.provenance)]),
        Links(files={name: name for name in (*files, "verdict.json")}, label="Beside this page:"),
    ]
    return render(
        f"Audit of {verdict.provenance['model']}", parts, kicker=kicker_of({"": verdict.provenance}), look="audit"
    )


# The verdict and what was exercised ------------------------------------------------------------------------------------


def _first_place(verdict: Verdict) -> Pairs:
    values = (_layer_name(verdict.first_layer, verdict.tensor), verdict.first_position, verdict.tensor, verdict.module)
    places = zip(("layer", "position", "tensor", "module"), values, strict=True)
    return pairs_of({f"first wrong: {name}": value for name, value in places if value not in (None, "")})


def _use_parts(verdict: Verdict) -> Parts:
    """What is wrong, and the names of what is right; what was not run, the numbers of what is right, and notes, folded."""
    detail = "what it showed, or why it was not run"
    rows: dict[str, list[Row]] = {"wrong": [], NOT_RUN: [], RIGHT: []}
    for check in verdict.checks:
        group = {RIGHT: RIGHT, NOT_RUN: NOT_RUN, REFUSED: NOT_RUN}.get(check.status, "wrong")
        rows[group].append({
            "use": check.name,
            "status": check.status,
            "programs": check.tried or None,
            "error": check.error,
            "limit": check.null,
            detail: check.detail + (f" Hint: {check.hint}" if check.hint else ""),
        })  # fmt: skip
    passed = [
        Text(verdict.parts[2]),
        Text(_CHECKS if rows[RIGHT] else "", look="note"),
        table_of_rows(rows[RIGHT], text=detail),
        Text("" if verdict.checks else "Nothing else was asked for: the audit was made without further checks."),
    ]
    right, idle = ([row["use"] for row in rows[group]] for group in (RIGHT, NOT_RUN))
    return [
        table_of_rows(rows["wrong"], text=detail),
        Text(f"Right: {'; '.join(right)}." if right else ""),
        Folded(
            f"Not run, or refused by the library: {counted(len(idle), 'use')}" * bool(idle),
            [table_of_rows(rows[NOT_RUN], text=detail)],
        ),
        Folded(f"What was exercised: {counted(len(right), 'use')} right", passed),
        Folded("Notes", [*map(Text, verdict.notes)]),
    ]


# The ladder ------------------------------------------------------------------------------------------------------------


_LINES = {
    "unit_roundoff": "unit roundoff",
    "relative_logit": "logits, free-running (relative)",
    "block_error": "largest block error given equal inputs (relative)",
}


def ladder_figure(evidence: Mapping[str, Row]) -> Figure | None:
    """Draws the differences by precision beside the unit roundoff, which rounding follows; None where no precision was run."""
    dtypes = sorted(DTYPES.keys() & evidence.keys(), key=lambda name: -evidence[name]["unit_roundoff"])
    rows = [
        {"line": line, "dtype": name, "size": size}
        for column, line in _LINES.items()
        for name in dtypes
        if (size := evidence[name][column]) is not None and math.isfinite(size)
    ]
    panel = Panel(pd.DataFrame(rows), "size", "dtype", "dots", color="line", label="relative difference")
    return draw_chart(Chart("Does the difference fall with precision?", [panel]), []) if rows else None


def _rung_row(name: str, rung: Row) -> dict[str, Any]:
    left = rung["fixed_order_block_error"]
    checked = f"{rung['fixed_order_bitwise_equal']} of {rung['fixed_order_checks']}"
    return {
        "rung": name,
        "unit roundoff": rung["unit_roundoff"],
        "bitwise equal steps": f"{rung['bitwise_equal_steps']} of {rung['steps']}",
        "largest logit difference": rung["max_abs_logit"],
        "null control": rung["null_max_abs_logit"],
        "largest KL (nats)": rung["max_kl"],
        "worst block, unit roundoffs": rung["block_error_in_unit_roundoffs"],
        "its prompt's rows": rung["prompt_rows_error_in_unit_roundoffs"],
        "fixed order: equal checks": "not run" if left is None else checked,
        "fixed order: worst block": None if left is None else left / rung["unit_roundoff"],
        "fixed order: largest logit difference": rung["fixed_order_max_abs_logit"],
        "NaN or Inf": rung["nonfinite"].get("module", ""),
    }


def _first_tensors(verdict: Verdict) -> Parts:
    rows = []
    for name, evidence in verdict.evidence.items():
        if (first := evidence.get("first_tensor")) is None:
            continue
        away = first["taken_away_by"] in ("order", "cast", "choice", "kernel")
        apart = "one side sees what the other does not" if math.isinf(first["error"]) else first["error_in_unit_roundoffs"]
        rows.append(
            {
                "rung": name,
                "layer": _layer_name(first["layer"], first["tensor"]),
                **{column: first[column] for column in ("tensor", "position")},
                "error": apart,
                "left": first["left"] / evidence["unit_roundoff"] if away else None,
                "what takes it away": _cause_in_words(first),
            }
        )
    if not rows:
        return [Text("Given equal inputs no tensor differs in any precision.")]
    return [Text(_FIRST_TENSORS, look="note"), table_of_rows(rows, text="what takes it away")]


def _layer_name(layer: int | None, tensor: str) -> str | None:
    return None if layer is None else part_named(layer, tensor).removeprefix("the ").removeprefix("layer ")


def _cause_in_words(first: Row) -> str:
    """Says what removes the error of a first tensor; see :class:`kvinterp.auditing.verdict.Verdict`."""
    word, detail = first["taken_away_by"], first["detail"]
    plain = {
        "order": "a fixed order of additions",
        "kernel": "a fixed order of additions, but it is larger than rounding: a kernel is coarse there",
        "choice": "a fixed order of additions: rounding tips the choice between nearly equal experts",
        "cast": f"leaving out the cast to {first['cast_to']}",
        "unknown": f"that could not be tried: {detail}",
        "": f"nothing: it is {detail}" if detail else "nothing",
    }
    return plain.get(word, f"it is {detail}")


# Blocks ----------------------------------------------------------------------------------------------------------------


def _block_tables(audit: Audit, marked: int | None) -> Parts:
    parts: Parts = []
    for order, title in (("native", "With the machine's own kernels"), ("fixed", "With a fixed order of additions")):
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
        # The embedding comes before the first block and the head after the last, where they were compared.
        names = {EMBEDDING: "embedding", table["layer"].max(): "head"}
        table["layer"] = [names.get(layer, str(layer)) for layer in table["layer"]]
        here = None if marked is None else names.get(marked, str(marked))
        parts += [Text(title, look="h3"), table_of_rows(table.to_dict("records"), here=here)]
    return parts + [
        Text(f"{rung.name}: no fixed order, since {rung.unfixed}.", look="note") for rung in audit.rungs if rung.unfixed
    ]


def _issue_tables(rung: PrecisionRun | None, dtype: str) -> Parts:
    """The tables in the format of transformers issue 46190, for a step that differs where there is one."""
    if rung is None or rung.layers.empty:
        return []
    position, prefill = rung.layers[["position", "prefill"]].iloc[0]
    heading = f"One token, free-running, in {dtype}: position {position}, fed after a prompt of {prefill} tokens"
    layers = rung.layers.assign(layer=rung.layers["layer"] + 1)
    return [
        Text(f"{heading}. Layer n is hidden_states[n].", look="h3"),
        *(
            table_of_rows(table[list(names)].rename(columns=names).to_dict("records"))
            for table, names in ((layers, _ISSUE_LAYERS), (rung.top, _ISSUE_TOP))
        ),
    ]


_ISSUE_LAYERS = {"layer": "Layer", "max_abs": "Max Abs Diff", "mean_abs": "Mean Abs Diff"}
_ISSUE_TOP = {"index": "Index", "recompute": "Full Forward", "cached": "Prefill+Decode", "difference": "Abs Diff"}
