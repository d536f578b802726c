"""What an audit writes: verdict.json, one page that needs nothing else, and its tables as CSV."""

from __future__ import annotations

import contextlib
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.auditing.ladder import EMBEDDING
from kvinterp.auditing.ladder_plot import ladder_plot
from kvinterp.errors import InputError
from kvinterp.files import Record, check_writable, refuse_foreign, told, write_whole
from kvinterp.locks import Lock

if TYPE_CHECKING:
    from kvinterp.auditing.entry import Audit
    from kvinterp.auditing.ladder import Rung
    from kvinterp.auditing.verdict import Verdict

__all__ = ["check_own", "layer_table", "page", "put", "reading_parts", "texts_of", "write"]

TABLES = ("steps", "local", "sweep", "chunks")
_ABOUT = {"verb": "audit"}
NAMES = ("audit.html", *(f"{name}.csv" for name in TABLES), "verdict.json")

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5a6069; --line: #d5d9de; --card: #f5f6f8; --page: #ffffff;
  --free: #0a5c96; --local: #b3541e; --null: #6b7280; --fine: #1d6b3a; --fault: #a82020; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a3abb5; --line: #3a4048; --card: #20242a;
  --page: #15181c; --free: #7cc4f5; --local: #f0a070; --null: #9aa3ad; --fine: #7fd6a0; --fault: #ff9a8f; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { margin: 2.2rem 0 0.6rem; } h3 { margin: 1.4rem 0 0.4rem; }
.answer { border-left: 5px solid var(--mark); background: var(--card); padding: 0.9rem 1.1rem; border-radius: 0 6px 6px 0; }
.answer strong { font-size: 1.3rem; color: var(--mark); } .answer p { margin: 0.5rem 0 0; }
.good { --mark: var(--fine); } .bad { --mark: var(--fault); } .unsure { --mark: var(--local); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem; margin: 1rem 0 0; font-size: 0.95rem; }
dt { color: var(--soft); } dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; } td.text { white-space: normal; text-align: left; min-width: 20rem; }
th { vertical-align: bottom; line-height: 1.3; color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr.here td { font-weight: 700; background: var(--card); }
svg { display: block; width: 100%; max-width: 42rem; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); } .axis { stroke: var(--line); }
.note { color: var(--soft); font-size: 0.9rem; }
"""


def check_own(folder: Path) -> None:
    """Raises where an audit cannot be written: asked before anything slow. An earlier audit of the folder is no obstacle.

    Raises:
        InputError: It is no folder or cannot be written, holds an unfinished result of another verb, or a file that
            kvinterp did not write under a name that an audit needs.
    """
    with told(folder):
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # A name that none can have is said now, not after the work.
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file, and an audit writes a folder: choose another with --out.")
        other = (Record(folder).unfinished() or _ABOUT).get("verb")
        if other != "audit":
            raise InputError(
                f"folder {str(folder)!r} holds an unfinished result of {other!r}: choose another folder with --out, or run "
                "that command again."
            )
        refuse_foreign(Record(folder), NAMES)
        check_writable(folder)


def write(audit: Audit, folder: Path) -> Path:
    """Writes the folder, over an earlier audit's; each file is complete or not there at all.

    Raises:
        InputError: It cannot be written, or a file that kvinterp did not write has one of the names.
    """
    return put(texts_of(audit), folder)


def texts_of(audit: Audit) -> dict[str, str]:
    """Page, tables and verdict by the names of their files."""
    texts = {"audit.html": page(audit)}
    for name in TABLES:
        frames = [getattr(rung, name).assign(rung=rung.name) for rung in audit.rungs if len(getattr(rung, name))]
        if frames:
            texts[f"{name}.csv"] = pd.concat(frames, ignore_index=True).to_csv(index=False)
    # The verdict last: where it is, everything is.
    return {**texts, "verdict.json": audit.verdict.to_json()}


def put(texts: Mapping[str, str], folder: Path) -> Path:
    """Writes what :func:`texts_of` gave, over an earlier audit's."""
    with Lock(folder):
        check_own(folder)
        record = Record(folder)
        # Nothing of an earlier audit stays beside this one.
        record.begin(_ABOUT, record.names() & set(NAMES))
        for name, text in texts.items():
            write_whole(folder / name, text)
        record.finish()
    return folder


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


def page(audit: Audit) -> str:
    """The page, self-contained; whatever comes from the model is escaped."""
    verdict, own = audit.verdict, audit.about["dtype"]
    marked = verdict.first_layer if verdict.exit_code else None
    sections = [
        _answer(verdict),
        _place(verdict),
        "<h2>What was exercised, and what not</h2>",
        *_exercised(verdict),
        *_notes(verdict),
        "<h2>The ladder</h2>",
        ladder_plot(audit.rungs),
        "<p class='note'>Free-running: the logits of tokens fed one by one against those of the same prefix recomputed. The null "
        "control is the same row recomputed among more rows. Given equal inputs: every block was handed the rows that the "
        "recomputation handed it, so that its error is its own. With a fixed order of additions what is left has another reason "
        "than the order of additions.</p>",
        _table(_rung_rows(audit.rungs)),
        "<h3>First tensor that differs, given equal inputs</h3>",
        *_first_tensors(verdict),
        "<h2>Block by block, given equal inputs</h2>",
        "<p class='note'>The largest error of each block in any row that was checked, in unit roundoffs of each precision. A "
        "large one is no verdict by itself: what takes it away is.</p>",
        *_layers(audit, marked),
        *_last_token(audit.rung(own), own),
        "<h2>Made with</h2>",
        _pairs(audit.about),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    title = f"Audit of {audit.about['model']}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><meta http-equiv="Content-Security-Policy" content="{policy}"><title>{_e(title)}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>{_e(title)}</h1>{''.join(sections)}</main></body></html>\n"
    )


# The verdict and what was exercised ------------------------------------------------------------------------------------


def reading_parts(verdict: Verdict) -> tuple[str, list[str], str]:
    """The reading's first line, those that say why, and the one on what was run; notes and checks have tables here."""
    first, *rest = verdict.reading.splitlines()
    cut = next((i for i, line in enumerate(rest) if line.startswith("exercised: ")), len(rest))
    return first, rest[:cut], "".join(rest[cut : cut + 1]).removeprefix("exercised: ")


def _answer(verdict: Verdict) -> str:
    first, why, _ = reading_parts(verdict)
    mark = {0: "good", 3: "unsure"}.get(verdict.exit_code, "bad")
    return f'<div class="answer {mark}"><strong>{_e(first)}</strong>{"".join(f"<p>{_e(line)}</p>" for line in why)}</div>'


def _place(verdict: Verdict) -> str:
    found = {
        "layer": _layer_name(verdict.first_layer),
        "position": verdict.first_position,
        "tensor": verdict.tensor,
        "module": verdict.module,
    }
    what = "first wrong" if verdict.exit_code == 1 else "first that differs"
    known = {f"{what}: {k}": v for k, v in found.items() if v not in (None, "")}
    return _pairs(known) if known else ""


def _layer_name(layer: int | None) -> str | None:
    return "embedding" if layer == EMBEDDING else None if layer is None else str(layer)


def _exercised(verdict: Verdict) -> list[str]:
    run = reading_parts(verdict)[2]
    parts = [f"<p>{_e(run)}</p>"] if run else []
    if not verdict.checks:
        return [*parts, "<p class='note'>Nothing else was asked for: the audit was made without further checks.</p>"]
    rows = [
        {
            "check": check.name,
            "status": check.status,
            "error": "" if check.error is None else check.error,
            "without a cache": "" if check.null is None else check.null,
            "what it showed, or why it was not run": check.detail + (f" Hint: {check.hint}" if check.hint else ""),
        }
        for check in verdict.checks
    ]
    note = (
        "<p class='note'>Error: the largest difference of the logits, cached against recomputed, relative to the largest logit. "
        "Beside it the same between two recomputations without a cache.</p>"
    )
    return [*parts, note, _table(pd.DataFrame(rows), text=("what it showed, or why it was not run",))]


def _notes(verdict: Verdict) -> list[str]:
    if not verdict.notes:
        return []
    return ["<h3>Notes</h3><ul>", *(f"<li>{_e(note)}</li>" for note in verdict.notes), "</ul>"]


def _e(value: object) -> str:
    return html.escape(str(value))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}" if value else "0"
    return str(value)


def _pairs(values: Mapping[str, Any]) -> str:
    shown = (f"<dt>{_e(k.replace('_', ' '))}</dt><dd>{_e(_words(v))}</dd>" for k, v in values.items())
    return f"<dl>{''.join(shown)}</dl>"


def _words(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value)


def _table(frame: pd.DataFrame, marked: str | None = None, text: Sequence[str] = ()) -> str:
    """A table; the row whose first cell is ``marked`` stands out, and columns of text are broken into lines."""
    head = "".join(f"<th>{_e(name)}</th>" for name in frame.columns)
    kinds = ['<td class="text">' if name in text else "<td>" for name in frame.columns]
    rows = (
        ('<tr class="here">' if str(row[0]) == marked else "<tr>")
        + "".join(f"{kind}{_e(_number(v))}</td>" for kind, v in zip(kinds, row, strict=True))
        + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


# The tables ------------------------------------------------------------------------------------------------------------


def _rung_rows(rungs: Sequence[Rung]) -> pd.DataFrame:
    rows = []
    for rung in rungs:
        found = rung.summary()
        ran = rung.fixed is not None
        left = found["fixed_order_block_error"]
        rows.append(
            {
                "rung": rung.name,
                "unit roundoff": found["unit_roundoff"],
                "bitwise equal steps": f"{found['bitwise_equal_steps']} of {found['steps']}",
                "largest logit difference": found["max_abs_logit"],
                "null control": found["null_max_abs_logit"],
                "largest KL (nats)": found["max_kl"],
                "worst block, unit roundoffs": found["block_error_in_unit_roundoffs"],
                "its prompt's rows": found["prompt_rows_error_in_unit_roundoffs"] if len(rung.chunks) else "",
                "fixed order: equal checks": f"{found['fixed_order_bitwise_equal']} of {found['fixed_order_checks']}"
                if ran
                else "not run",
                "fixed order: worst block": left / rung.unit if left is not None else "",
                "fixed order: largest logit difference": found["fixed_order_max_abs_logit"],
                "NaN or Inf": found["nonfinite"].get("module", ""),
            }
        )
    return pd.DataFrame(rows).map(lambda value: "" if value is None else value)


def _first_tensors(verdict: Verdict) -> list[str]:
    rows = []
    for name, evidence in verdict.evidence.items():
        found = evidence.get("first_tensor")
        if found is None:
            continue
        unit = evidence["unit_roundoff"]
        rows.append(
            {
                "rung": name,
                "layer": _layer_name(found["layer"]),
                "tensor": found["tensor"],
                "position": found["position"],
                "error": "one side sees what the other does not"
                if math.isinf(found["error"])
                else found["error_in_unit_roundoffs"],
                "left": found["left"] / unit if found["taken_away_by"] in ("order", "cast", "choice", "kernel") else "",
                "what takes it away": _taken_away(found),
            }
        )
    if not rows:
        return ["<p>Given equal inputs no tensor differs in any precision.</p>"]
    note = (
        "<p class='note'>Of each precision the first tensor that nothing takes away, or else the first that differs. Errors in "
        "unit roundoffs; left is what remains once the cause is taken away.</p>"
    )
    return [note, _table(pd.DataFrame(rows), text=("what takes it away",))]


def _taken_away(found: Mapping[str, Any]) -> str:
    word, detail = found["taken_away_by"], found["detail"]
    plain = {
        "order": "a fixed order of additions",
        "kernel": "a fixed order of additions, but it is larger than rounding: a kernel is coarse there",
        "choice": "a fixed order of additions: rounding tips the choice between nearly equal experts",
        "cast": f"leaving out the cast to {found['cast_to']}",
        "rounding": f"it is {detail}",
        "unknown": f"that could not be tried: {detail}",
    }
    return plain.get(word) or ("nothing" + (f": it is {detail}" if detail else ""))


def _layers(audit: Audit, marked: int | None) -> list[str]:
    parts = []
    for order, title in (("native", "With the machine's own kernels"), ("fixed", "With a fixed order of additions")):
        table = layer_table(audit, order)
        if table.empty:
            continue
        # The embedding stands before the first block and the head after the last, wherever they were compared.
        names = {EMBEDDING: "embedding", int(table.index.max()): "head"}
        named = table.reset_index().assign(layer=[names.get(int(n), str(int(n))) for n in table.index])
        shown = None if marked is None else names.get(marked, str(marked))
        parts += [f"<h3>{title}</h3>", _table(named, shown)]
    why = {rung.name: rung.unfixed for rung in audit.rungs if rung.unfixed}
    return parts + [f"<p class='note'>{_e(name)}: no fixed order, since {_e(text)}.</p>" for name, text in why.items()]


def _last_token(rung: Rung | None, own: str) -> list[str]:
    """The report format of transformers issue 46190, for a step that differs where there is one."""
    if rung is None or rung.layers.empty:
        return []
    layers, top = rung.layers, rung.top
    position, prefill = int(layers["position"].iloc[0]), int(layers["prefill"].iloc[0])
    where = f"position {position}, fed after a prompt of {prefill} tokens"
    title = f"<h2>One token, free-running, in {_e(own)}</h2>"
    apart, logits = bool((layers["max_abs"] > 0).any()), bool((top["difference"] > 0).any())
    if not apart and not logits:
        every = not bool((rung.steps["max_abs"] != 0).any())
        also = f" So is every logit of all {len(rung.steps)} steps." if every else ""
        return [title, f"<p>At {_e(where)}, every layer's output and every logit is the same on both paths.{also}</p>"]
    return [
        title,
        f"<p class='note'>At {_e(where)}. Layer n is <code>hidden_states[n]</code>, what block n - 1 returned; of the last block "
        "before the final norm.</p>",
        _table(_issue_layers(layers)),
        "<h3>Logits that differ most</h3>",
        _table(_issue_top(top[top["difference"] > 0])) if logits else "<p>No logit differs at this position.</p>",
    ]


def _issue_layers(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Layer": (frame["layer"] + 1).astype(int).astype(str),
            "Max Abs Diff": [f"{v:.6e}" for v in frame["max_abs"]],
            "Mean Abs Diff": [f"{v:.6e}" for v in frame["mean_abs"]],
        }
    )


def _issue_top(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Index": frame["index"].astype(str),
            "Full Forward": [f"{v:.6f}" for v in frame["recompute"]],
            "Prefill+Decode": [f"{v:.6f}" for v in frame["cached"]],
            "Abs Diff": [f"{v:.6e}" for v in frame["difference"]],
        }
    )
