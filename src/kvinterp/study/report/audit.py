"""What an audit writes: verdict.json, one page that needs nothing else, and its tables as Parquet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.auditing.folder import put, tables_of
from kvinterp.comparison.vocabulary import EMBEDDING
from kvinterp.errors import InputError
from kvinterp.models.adapter import DTYPES
from kvinterp.study.findings import Chart, Panel
from kvinterp.study.findings.of_comparison import ladder_chart
from kvinterp.study.report.charts import drawn
from kvinterp.study.report.page import Answer, Bullets, Column, Links, Pairs, Picture, Table, Text, render
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
    "Error: the largest difference of the logits, cached against recomputed, relative to the largest logit. "
    "Beside it the same between two recomputations without a cache."
)


def texts_of(audit: Audit, said: Sequence[str] = ()) -> dict[str, str]:
    """Page and verdict by the names of their files; ``said`` stands on the page too."""
    return {"report.html": page(audit, said), "verdict.json": audit.verdict.to_json()}


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


def save_verdict(verdict: Verdict, folder: Path) -> Path:
    """Writes verdict and page alone, over an earlier audit's.

    Raises:
        InputError: It cannot be written, or it is of a version that did not say what it was made with.
    """
    if not verdict.provenance:
        raise InputError("this verdict does not say what it was made with: make the audit again.")
    return put({"report.html": page_of(verdict, [Text(_BLOCKS_ELSEWHERE)]), "verdict.json": verdict.to_json()}, folder)


def page(audit: Audit, said: Sequence[str] = ()) -> str:
    """The page, self-contained; whatever comes from the model is escaped."""
    verdict, own = audit.verdict, audit.provenance["dtype"]
    blocks = [
        Text(_BLOCKS, look="note"),
        *_layers(audit, verdict.first_layer if verdict.exit_code else None),
        *_last_token(audit.rung(own), own),
        *([Text("What was claimed elsewhere", look="h2"), Bullets(said)] if said else []),
    ]
    return page_of(verdict, blocks, [f"{name}.parquet" for name in tables_of(audit)])


def page_of(verdict: Verdict, blocks: Sequence[Any], files: Sequence[str] = ()) -> str:
    """The page of a verdict.

    Args:
        verdict: The verdict.
        blocks: What is shown of every block: parts of a page.
        files: The tables that are written beside it.
    """
    first, why, _ = verdict.parts
    figure = ladder_figure(verdict.evidence)
    parts = [
        Answer([first, *why], {0: "good", 3: "unsure"}.get(verdict.exit_code, "bad")),
        *_place(verdict),
        Text("What was exercised, and what not", look="h2"),
        *_exercised(verdict),
        Text("The ladder", look="h2"),
        *([] if figure is None else [Picture("The precision ladder", png(figure), svg=inline(figure, "ladder"))]),
        Text(_LADDER, look="note"),
        _table([_rung_row(name, found) for name, found in verdict.evidence.items()]),
        Text("First tensor that differs, given equal inputs", look="h3"),
        *_first_tensors(verdict),
        Text("Block by block, given equal inputs", look="h2"),
        *blocks,
        *_seconds(pd.DataFrame(verdict.seconds)),
        Text("Made with", look="h2"),
        _pairs(verdict.provenance),
        Links(files={name: name for name in (*files, "verdict.json")}, label="Beside this page:"),
    ]
    return render("audit", f"Audit of {verdict.provenance['model']}", parts)


# The verdict and what was exercised ------------------------------------------------------------------------------------


def _place(verdict: Verdict) -> list[Pairs]:
    found = (_layer_name(verdict.first_layer), verdict.first_position, verdict.tensor, verdict.module)
    what = "first wrong" if verdict.exit_code == 1 else "first that differs"
    named = zip(("layer", "position", "tensor", "module"), found, strict=True)
    known = {f"{what}: {name}": value for name, value in named if value not in (None, "")}
    return [_pairs(known)] if known else []


def _exercised(verdict: Verdict) -> list[Any]:
    run = verdict.parts[2]
    parts: list[Any] = [Text(run)] if run else []
    detail = "what it showed, or why it was not run"
    rows = [
        {
            "check": check.name,
            "status": check.status,
            "error": check.error,
            "without a cache": check.null,
            detail: check.detail + (f" Hint: {check.hint}" if check.hint else ""),
        }
        for check in verdict.checks
    ]
    none = Text("Nothing else was asked for: the audit was made without further checks.", look="note")
    parts += [Text(_CHECKS, look="note"), _table(rows, text=detail)] if rows else [none]
    return [*parts, *([Text("Notes", look="h3"), Bullets(verdict.notes)] if verdict.notes else [])]


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}" if value else "0"
    return str(value)


def _pairs(values: Row) -> Pairs:
    return Pairs({name.replace("_", " "): _words(value) for name, value in values.items()}, look="beside")


def _words(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value)


def _table(rows: Sequence[Row], here: str | None = None, text: str = "") -> Table:
    """A table; the row whose first cell is ``here`` stands out, and the column of text is broken into lines; on a phone
    a row with a text is a card.
    """
    head = [Column(name, "text" if name == text else "") for name in (rows[0] if rows else ())]
    return Table(head, [list(map(_number, row.values())) for row in rows], here, look="cards" if text else "")


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


def _first_tensors(verdict: Verdict) -> list[Any]:
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
                "layer": _layer_name(found["layer"]),
                "tensor": found["tensor"],
                "position": found["position"],
                "error": apart,
                "left": found["left"] / evidence["unit_roundoff"] if away else None,
                "what takes it away": _taken_away(found),
            }
        )
    if not rows:
        return [Text("Given equal inputs no tensor differs in any precision.")]
    return [Text(_FIRST_TENSORS, look="note"), _table(rows, text="what takes it away")]


def _layer_name(layer: int | None) -> str | None:
    return "embedding" if layer == EMBEDDING else None if layer is None else str(layer)


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


def _seconds(table: pd.DataFrame) -> list[Any]:
    """What took how long; nothing for an audit that was kept before that was written down."""
    if table.empty:
        return []
    took = table.groupby(["part", "rung"], sort=False)["seconds"].sum().reset_index()
    panel = Panel(took, "seconds", "part", "dots", color="rung", scale="linear", label="seconds")
    figure = drawn(Chart("What took how long", [panel]), [])
    picture = Picture("What took how long", png(figure), svg=inline(figure, "seconds"))
    return [Text("What took how long", look="h2"), picture, _table(table.to_dict("records"))]


# Blocks and one token --------------------------------------------------------------------------------------------------


def _layers(audit: Audit, marked: int | None) -> list[Any]:
    parts: list[Any] = []
    for order, title in (("native", "With the machine's own kernels"), ("fixed", "With a fixed order of additions")):
        table = layer_table(audit, order)
        if table.empty:
            continue
        # The embedding stands before the first block and the head after the last, wherever they were compared.
        names = {EMBEDDING: "embedding", int(table.index.max()): "head"}
        named = table.reset_index().assign(layer=[names.get(int(n), str(int(n))) for n in table.index])
        here = None if marked is None else names.get(marked, str(marked))
        parts += [Text(title, look="h3"), _table(named.to_dict("records"), here)]
    why = {rung.name: rung.unfixed for rung in audit.rungs if rung.unfixed}
    return parts + [Text(f"{name}: no fixed order, since {text}.", look="note") for name, text in why.items()]


def _last_token(rung: PrecisionRun | None, own: str) -> list[Any]:
    """The report format of transformers issue 46190, for a step that differs where there is one."""
    if rung is None or rung.layers.empty:
        return []
    layers, top = rung.layers, rung.top
    position, prefill = int(layers["position"].iloc[0]), int(layers["prefill"].iloc[0])
    where = f"position {position}, fed after a prompt of {prefill} tokens"
    title = Text(f"One token, free-running, in {own}", look="h2")
    differing = top[top["difference"] > 0]
    if not (layers["max_abs"] > 0).any() and differing.empty:
        also = "" if len(rung.differing_steps) else f" So is every logit of all {len(rung.steps)} steps."
        return [title, Text(f"At {where}, every layer's output and every logit is the same on both paths.{also}")]
    return [
        title,
        Text(
            f"At {where}. Layer n is hidden_states[n], what block n - 1 returned; of the last block before the final norm.",
            look="note",
        ),
        _issue(layers.assign(layer=(layers["layer"] + 1).astype(int)), _ISSUE_LAYERS),
        Text("Logits that differ most", look="h3"),
        Text("No logit differs at this position.") if differing.empty else _issue(differing, _ISSUE_TOP),
    ]


_ISSUE_LAYERS = {"Layer": ("layer", "d"), "Max Abs Diff": ("max_abs", ".6e"), "Mean Abs Diff": ("mean_abs", ".6e")}
_ISSUE_TOP = {
    "Index": ("index", "d"),
    "Full Forward": ("recompute", ".6f"),
    "Prefill+Decode": ("cached", ".6f"),
    "Abs Diff": ("difference", ".6e"),
}


def _issue(frame: pd.DataFrame, columns: Mapping[str, tuple[str, str]]) -> Table:
    """A table of the issue's; of each column what it shows, and how."""
    rows = frame.to_dict("records")
    return _table([{name: format(row[shown], spec) for name, (shown, spec) in columns.items()} for row in rows])
