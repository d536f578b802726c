"""What an audit writes: verdict.json, one page that needs nothing else, and its tables as Parquet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.auditing.ladder import EMBEDDING, part_named
from kvinterp.auditing.reading import IN_PYTHON
from kvinterp.common.numbers import counted
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Panel
from kvinterp.models.adapter import DTYPES
from kvinterp.programs.running import RIGHT, WRONG
from kvinterp.study.report import engine
from kvinterp.study.report.charts import drawn
from kvinterp.study.report.experiment import kicker_of
from kvinterp.study.report.page import (
    Answer,
    Bullets,
    Column,
    Folded,
    Links,
    Pairs,
    Parts,
    Picture,
    Table,
    Text,
    pairs_of,
    render,
    table_of_rows,
)
from kvinterp.study.report.style import png
from kvinterp.study.report.svg import inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvinterp.auditing.ladder import PrecisionRun
    from kvinterp.auditing.verdict import Audit, Verdict

Row = Mapping[str, Any]
"""Names and what is shown of each."""

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


def layer_table(audit: Audit, order: str = "native") -> pd.DataFrame:
    """Each block's largest error given equal inputs, in unit roundoffs, a column a rung; -1 is the embedding.

    Args:
        audit: The audit.
        order: ``"native"``: with the machine's own kernels; ``"fixed"``: with a fixed order of additions, where it was run.
    """
    sides = {rung.name: rung if order == "native" else rung.fixed for rung in audit.rungs}
    columns = {
        name: side.every_error.groupby("layer")["error"].max() / side.unit
        for name, side in sides.items()
        if side is not None and len(side.every_error)
    }
    return pd.DataFrame(columns).rename_axis("layer")


def files_of(found: Any) -> tuple[dict[str, str], dict[str, pd.DataFrame]]:
    """The texts and tables that are written of all that an audit measured (:class:`Audit`), or of its :class:`Verdict` alone.

    Raises:
        InputError: It is of a version that did not say what it was made with.
    """
    if not found.provenance:
        raise InputError("this verdict does not say what it was made with: make the audit again.")
    if not isinstance(found.verdict, str):
        return texts_of(found), found.written()[0]
    if found.given:
        return engine.texts_of(found), {} if found.tokens is None else {"given": found.tokens}
    return {"report.html": page_of(found, [Text(_BLOCKS_ELSEWHERE)]), "verdict.json": found.to_json()}, {}


def page(audit: Audit) -> str:
    """The page, self-contained; whatever comes from the model is escaped."""
    verdict, own = audit.verdict, audit.provenance["dtype"]
    blocks = [
        Text(_BLOCKS, look="note"),
        *_layers(audit, verdict.first_layer if verdict.exit_code else None),
        *_last_token(audit.rung(own), own),
    ]
    return page_of(verdict, blocks, [f"{name}.parquet" for name in audit.written()[0]])


def page_of(verdict: Verdict, blocks: Sequence[Any], files: Sequence[str] = ()) -> str:
    """The page of a verdict: word and reason, the ladder, what did not pass; all else is folded.

    Args:
        verdict: The verdict.
        blocks: What is shown of every block: parts of a page.
        files: The tables that are written beside it.
    """
    first, why, _ = verdict.parts
    shown = next((check.lines for check in verdict.checks if check.status == WRONG and check.lines), "")
    why = why[: why.index(IN_PYTHON)] if IN_PYTHON in why else why
    figure = ladder_figure(verdict.evidence)
    rungs = table_of_rows([_rung_row(name, found) for name, found in verdict.evidence.items()])
    ladder = [
        Folded("The ladder, precision by precision", [Text(_LADDER, look="note"), rungs]),
        Folded("The first tensor that differs, given equal inputs", _first_tensors(verdict)),
        Folded("Block by block, given equal inputs", blocks),
    ]
    parts = [
        Answer([first, *why], {0: "good", 3: "unsure"}.get(verdict.exit_code, "bad")),
        *([Table([Column(IN_PYTHON.rstrip(":"), "pre")], [[shown]])] if shown else []),
        _place(verdict),
        *([] if figure is None else [Picture("The precision ladder", png(figure), svg=inline(figure, "ladder"))]),
        *_exercised(verdict),
        *(ladder if verdict.evidence else []),
        # An audit that was kept before that was written down has none.
        Folded("What took how long", [table_of_rows(pd.DataFrame(verdict.seconds).to_dict("records"))]),
        Folded("What this was made with", [pairs_of(verdict.provenance)]),
        Links(files={name: name for name in (*files, "verdict.json")}, label="Beside this page:"),
    ]
    return render("audit", f"Audit of {verdict.provenance['model']}", parts, kicker=kicker_of({"": verdict.provenance}))


# The verdict and what was exercised ------------------------------------------------------------------------------------


def _place(verdict: Verdict) -> Pairs:
    found = (_layer_name(verdict.first_layer, verdict.tensor), verdict.first_position, verdict.tensor, verdict.module)
    what = "first wrong" if verdict.exit_code == 1 else "first that differs"
    named = zip(("layer", "position", "tensor", "module"), found, strict=True)
    return pairs_of({f"{what}: {name}": value for name, value in named if value not in (None, "")})


def _exercised(verdict: Verdict) -> Parts:
    """The checks that did not pass, and folded those that did; what was run, and notes."""
    run = verdict.parts[2]
    detail = "what it showed, or why it was not run"
    rows: dict[bool, list[Row]] = {False: [], True: []}
    for check in verdict.checks:
        rows[check.status == RIGHT].append({
            "use": check.name,
            "status": check.status,
            "programs": check.tried or None,
            "error": check.error,
            "limit": check.null,
            detail: check.detail + (f" Hint: {check.hint}" if check.hint else ""),
        })  # fmt: skip
    passed = [
        Text(run),
        Text(_CHECKS if rows[True] else "", look="note"),
        table_of_rows(rows[True], text=detail),
        Text("" if verdict.checks else "Nothing else was asked for: the audit was made without further checks."),
    ]
    return [
        table_of_rows(rows[False], text=detail),
        Folded(f"What was exercised: {counted(len(rows[True]), 'use')} right", passed),
        Folded("Notes", [Bullets(verdict.notes)]),
    ]


# The ladder ------------------------------------------------------------------------------------------------------------


def ladder_figure(evidence: Mapping[str, Row]) -> Figure | None:
    """Differences by precision beside the unit roundoff of each; rounding falls with it. None where no precision was run."""
    named = {name: found["unit_roundoff"] for name, found in evidence.items() if name in DTYPES}
    units = dict(sorted(named.items(), key=lambda item: -item[1]))
    if not units:
        return None
    shown = {
        "relative_logit": "logits, free-running (relative)",
        "block_error": "largest block error given equal inputs (relative)",
    }
    lines: dict[str, dict[str, float]] = {
        label: {rung: v for rung in units if (v := evidence[rung][name]) is not None and math.isfinite(v)}
        for name, label in shown.items()
    }
    return drawn(ladder_chart({"unit roundoff": units, **lines}, "relative difference"), [])


def ladder_chart(lines: Mapping[str, Mapping[str, float]], label: str) -> Chart:
    """Differences by dtype.

    Args:
        lines: Of each line its difference by dtype; the first has all dtypes, in the order that is drawn.
        label: What differs.
    """
    rows = [{"line": line, "dtype": dtype, "size": size} for line, found in lines.items() for dtype, size in found.items()]
    panel = Panel(pd.DataFrame(rows), "size", "dtype", "dots", color="line", label=label)
    return Chart("Does the difference fall with precision?", [panel])


def _rung_row(name: str, found: Row) -> dict[str, Any]:
    left = found["fixed_order_block_error"]
    checked = f"{found['fixed_order_bitwise_equal']} of {found['fixed_order_checks']}"
    return {
        "rung": name,
        "unit roundoff": found["unit_roundoff"],
        "bitwise equal steps": f"{found['bitwise_equal_steps']} of {found['steps']}",
        "largest logit difference": found["max_abs_logit"],
        "null control": found["null_max_abs_logit"],
        "largest KL (nats)": found["max_kl"],
        "worst block, unit roundoffs": found["block_error_in_unit_roundoffs"],
        "its prompt's rows": found["prompt_rows_error_in_unit_roundoffs"],
        "fixed order: equal checks": "not run" if left is None else checked,
        "fixed order: worst block": None if left is None else left / found["unit_roundoff"],
        "fixed order: largest logit difference": found["fixed_order_max_abs_logit"],
        "NaN or Inf": found["nonfinite"].get("module", ""),
    }


def _first_tensors(verdict: Verdict) -> Parts:
    rows = []
    for name, evidence in verdict.evidence.items():
        found = evidence.get("first_tensor")
        if found is None:
            continue
        away = found["taken_away_by"] in ("order", "cast", "choice", "kernel")
        apart = "one side sees what the other does not" if math.isinf(found["error"]) else found["error_in_unit_roundoffs"]
        rows.append(
            {
                "rung": name,
                "layer": _layer_name(found["layer"], found["tensor"]),
                "tensor": found["tensor"],
                "position": found["position"],
                "error": apart,
                "left": found["left"] / evidence["unit_roundoff"] if away else None,
                "what takes it away": _taken_away(found),
            }
        )
    if not rows:
        return [Text("Given equal inputs no tensor differs in any precision.")]
    return [Text(_FIRST_TENSORS, look="note"), table_of_rows(rows, text="what takes it away")]


def _layer_name(layer: int | None, tensor: str) -> str | None:
    return None if layer is None else part_named(layer, tensor).removeprefix("the ").removeprefix("layer ")


def _taken_away(found: Row) -> str:
    """What takes the error of a first tensor away, see :class:`kvinterp.auditing.verdict.Verdict`."""
    word, detail = found["taken_away_by"], found["detail"]
    plain = {
        "order": "a fixed order of additions",
        "kernel": "a fixed order of additions, but it is larger than rounding: a kernel is coarse there",
        "choice": "a fixed order of additions: rounding tips the choice between nearly equal experts",
        "cast": f"leaving out the cast to {found['cast_to']}",
        "unknown": f"that could not be tried: {detail}",
        "": f"nothing: it is {detail}" if detail else "nothing",
    }
    return plain.get(word, f"it is {detail}")


# Blocks ----------------------------------------------------------------------------------------------------------------


def _layers(audit: Audit, marked: int | None) -> Parts:
    parts: Parts = []
    for order, title in (("native", "With the machine's own kernels"), ("fixed", "With a fixed order of additions")):
        table = layer_table(audit, order)
        if table.empty:
            continue
        # The embedding stands before the first block and the head after the last, wherever they were compared.
        names = {EMBEDDING: "embedding", int(table.index.max()): "head"}
        named = table.reset_index().assign(layer=[names.get(int(n), str(int(n))) for n in table.index])
        here = None if marked is None else names.get(marked, str(marked))
        parts += [Text(title, look="h3"), table_of_rows(named.to_dict("records"), here=here)]
    why = {rung.name: rung.unfixed for rung in audit.rungs if rung.unfixed}
    return parts + [Text(f"{name}: no fixed order, since {text}.", look="note") for name, text in why.items()]


def _last_token(rung: PrecisionRun | None, own: str) -> Parts:
    """The report format of transformers issue 46190, for a step that differs where there is one."""
    if rung is None or rung.layers.empty:
        return []
    position, prefill = (int(rung.layers[name].iloc[0]) for name in ("position", "prefill"))
    said = f"One token, free-running, in {own}: position {position}, fed after a prompt of {prefill} tokens"
    layers = rung.layers.assign(layer=rung.layers["layer"] + 1)
    tables = (
        table[list(names)].rename(columns=names) for table, names in ((layers, _ISSUE_LAYERS), (rung.top, _ISSUE_TOP))
    )
    return [
        Text(f"{said}. Layer n is hidden_states[n].", look="h3"),
        *(table_of_rows(table.to_dict("records")) for table in tables),
    ]


_ISSUE_LAYERS = {"layer": "Layer", "max_abs": "Max Abs Diff", "mean_abs": "Mean Abs Diff"}
_ISSUE_TOP = {"index": "Index", "recompute": "Full Forward", "cached": "Prefill+Decode", "difference": "Abs Diff"}
