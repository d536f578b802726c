"""What an audit writes: verdict.json, one page that needs nothing else, and its tables as CSV."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.files import Record, refuse_foreign, write_whole

if TYPE_CHECKING:
    from kvinterp.auditing.entry import Audit
    from kvinterp.auditing.ladder import Rung
    from kvinterp.auditing.verdict import Verdict

__all__ = ["layer_table", "page", "write"]

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
.good { --mark: var(--fine); } .bad { --mark: var(--fault); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem; margin: 1rem 0 0; font-size: 0.95rem; }
dt { color: var(--soft); } dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom; }
td { white-space: nowrap; } th { line-height: 1.3; color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr.here td { font-weight: 700; background: var(--card); }
svg { display: block; width: 100%; max-width: 42rem; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); } .axis { stroke: var(--line); }
.note { color: var(--soft); font-size: 0.9rem; }
"""


def write(audit: Audit, folder: Path) -> Path:
    """Writes the folder; each file is complete or not there at all.

    Raises:
        InputError: It cannot be written, or a file that kvinterp did not write has one of the names.
    """
    texts = {"audit.html": page(audit)}
    for name in ("steps", "local", "sweep"):
        frames = [getattr(rung, name).assign(rung=rung.name) for rung in audit.rungs if len(getattr(rung, name))]
        if frames:
            texts[f"{name}.csv"] = pd.concat(frames, ignore_index=True).to_csv(index=False)
    # The verdict last: where it is, everything is.
    texts["verdict.json"] = audit.verdict.to_json()
    record = Record(folder)
    refuse_foreign(record, texts)
    record.open()
    for name, text in texts.items():
        write_whole(folder / name, text)
    return folder


def layer_table(audit: Audit) -> pd.DataFrame:
    """Each block's largest error given equal inputs, in unit roundoffs, a column a rung; -1 is the embedding."""
    columns = {rung.name: rung.worst_by_layer() / rung.unit for rung in audit.rungs if len(rung.local)}
    return pd.DataFrame(columns).rename_axis("layer")


def page(audit: Audit) -> str:
    """The page, self-contained; whatever comes from the model is escaped."""
    verdict, own = audit.verdict, audit.about["dtype"]
    rung = audit.rung(own)
    place = {
        "first layer": verdict.first_layer,
        "first position": verdict.first_position,
        "tensor": verdict.tensor,
        "module": verdict.module,
        "confidence": f"{verdict.confidence:.2f}, the share of the checks that point to this verdict",
    }
    mark = "bad" if verdict.exit_code else "good"
    reading = verdict.reading.split(f": {verdict.verdict}. ", 1)[-1]
    sections = [
        f'<div class="answer {mark}"><strong>{_e(verdict.verdict)}</strong><p>{_e(reading)}</p></div>',
        _pairs(place),
        "<h2>The ladder</h2>",
        _ladder(audit.rungs),
        _table(_rung_rows(audit.rungs)),
        "<h3>First tensor that differs, given equal inputs</h3>",
        "<p class='note'>Its own relative error, and what rounding alone explains, both in unit roundoffs of the rung.</p>",
        _table(_first_rows(verdict)),
        "<h2>Block by block, given equal inputs</h2>",
        "<p class='note'>Every block was handed the rows that the recomputation handed it; the error of the newest row, fed "
        "alone against the cache, is then the block's own. In unit roundoffs of each precision; what rounds stays within a few "
        "tens. The prompt's rows, which a prefill computes among other numbers of rows, are in the ladder's table.</p>",
        _table(_layer_rows(layer_table(audit)), verdict.first_layer if verdict.exit_code else None),
    ]
    if rung is not None and len(rung.layers):
        sections += [
            "<h2>Last token, free-running</h2>",
            f"<p class='note'>The report format of transformers issue 46190, in {_e(own)}: layer n is "
            "<code>hidden_states[n]</code>, what block n - 1 returned.</p>",
            _table(_issue_layers(rung)),
            "<h3>Top-5 largest differences</h3>",
            _table(_issue_top(rung)),
        ]
    sections += ["<h2>Made with</h2>", _pairs(audit.about)]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    title = f"Audit of {audit.about['model']}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><meta http-equiv="Content-Security-Policy" content="{policy}"><title>{_e(title)}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>{_e(title)}</h1>{''.join(sections)}</main></body></html>\n"
    )


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


def _table(frame: pd.DataFrame, marked: int | None = None) -> str:
    """A table; the row whose first cell is the layer ``marked`` stands out."""
    head = "".join(f"<th>{_e(name)}</th>" for name in frame.columns)
    rows = (
        ('<tr class="here">' if str(row[0]) == str(marked) else "<tr>")
        + "".join(f"<td>{_e(_number(v))}</td>" for v in row)
        + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _rung_rows(rungs: Sequence[Rung]) -> pd.DataFrame:
    rows = []
    for rung in rungs:
        found = rung.summary()
        rows.append(
            {
                "rung": rung.name,
                "unit roundoff": found["unit_roundoff"],
                "bitwise equal steps": f"{found['bitwise_equal_steps']} of {found['steps']}",
                "largest logit difference": found["max_abs_logit"],
                "relative, unit roundoffs": found["relative_logit_in_unit_roundoffs"],
                "null control": found["null_max_abs_logit"],
                "largest KL (nats)": found["max_kl"],
                "worst block, unit roundoffs": found["block_error_in_unit_roundoffs"],
                "its prompt's rows": found["prompt_rows_error_in_unit_roundoffs"],
                "NaN or Inf": found["nonfinite"].get("module", ""),
            }
        )
    return pd.DataFrame(rows)


def _first_rows(verdict: Verdict) -> pd.DataFrame:
    rows = []
    for name, evidence in verdict.evidence.items():
        found = evidence.get("first_tensor")
        if found is None:
            continue
        others = {
            f"a cast to {found['explained_by_cast_to']}": bool(found["explained_by_cast_to"]),
            "a kernel: gone with fixed orders": found["gone_with_fixed_order"],
            "numbering: gone when told positions": found["gone_when_told_positions"],
        }
        beyond = found["block_beyond_band"] and found["error"] > found["band"]
        why = [text for text, holds in others.items() if holds] if beyond else ["rounding"]
        rows.append(
            {
                "rung": name,
                "layer": found["layer"],
                "tensor": found["tensor"],
                "position": found["position"],
                "error": found["error_in_unit_roundoffs"],
                "rounding explains": found["band"] / evidence["unit_roundoff"],
                "explained by": "; ".join(why) or "nothing",
            }
        )
    columns = ["rung", "layer", "tensor", "position", "error", "rounding explains", "explained by"]
    return pd.DataFrame(rows, columns=columns)


def _layer_rows(table: pd.DataFrame) -> pd.DataFrame:
    count = int(table.index.max()) if len(table) else 0
    names = {-1: "embedding", count: "head"}
    return table.reset_index().assign(layer=[names.get(int(n), str(int(n))) for n in table.index])


def _issue_layers(rung: Rung) -> pd.DataFrame:
    frame = rung.layers
    return pd.DataFrame(
        {
            "Layer": (frame["layer"] + 1).astype(int).astype(str),
            "Max Abs Diff": [f"{v:.6e}" for v in frame["max_abs"]],
            "Mean Abs Diff": [f"{v:.6e}" for v in frame["mean_abs"]],
        }
    )


def _issue_top(rung: Rung) -> pd.DataFrame:
    frame = rung.top
    return pd.DataFrame(
        {
            "Index": frame["index"].astype(str),
            "Full Forward": [f"{v:.6f}" for v in frame["recompute"]],
            "Prefill+Decode": [f"{v:.6f}" for v in frame["cached"]],
            "Abs Diff": [f"{v:.6e}" for v in frame["difference"]],
        }
    )


# The ladder plot -------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 480, 290, 70, 60, 16
_LOW, _HIGH = -18, 2
"""Powers of ten the vertical axis spans; what is exactly 0 is drawn on the line under it."""


def _ladder(rungs: Sequence[Rung]) -> str:
    """Differences against unit roundoff on logarithmic axes; rounding lies along the diagonal."""
    native = sorted((r for r in rungs if r.name == str(r.dtype).removeprefix("torch.")), key=lambda r: -r.unit)
    if not native:
        return ""
    places = {r.name: _LEFT + 45 + i * (_WIDTH - _LEFT - 90) / max(len(native) - 1, 1) for i, r in enumerate(native)}
    found = {r.name: r.summary() for r in native}
    series: list[tuple[str, str, Callable[[str], float | None]]] = [
        ("free", "logits, free-running (relative)", lambda n: found[n]["relative_logit"]),
        ("local", "largest block error given equal inputs (relative)", lambda n: found[n]["block_error"]),
    ]
    parts = [_axis(places), _line("null", [(places[r.name], _height(r.unit)) for r in native], "4 4")]
    for name, _, value in series:
        points = [(places[r.name], _height(v)) for r in native if (v := value(r.name)) is not None]
        parts.append(_line(name, points, ""))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--{name})"/>' for x, y in points]
    keys = [("null", "one unit roundoff"), *((name, label) for name, label, _ in series)]
    for index, (name, label) in enumerate(keys):
        y = _HEIGHT + 14 + 18 * index
        parts.append(f'<rect x="{_LEFT}" y="{y - 9}" width="12" height="10" fill="var(--{name})"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y}">{_e(label)}</text>')
    total = _HEIGHT + 20 + 18 * len(keys)
    return f'<svg viewBox="0 0 {_WIDTH} {total}" role="img" aria-label="The precision ladder">{"".join(parts)}</svg>'


def _height(value: float) -> float:
    bottom = _HEIGHT - _BOTTOM
    if not value > 0:
        return bottom + 18
    power = min(max(math.log10(value) if math.isfinite(value) else _HIGH, _LOW), _HIGH)
    return bottom - (power - _LOW) / (_HIGH - _LOW) * (bottom - _TOP)


def _axis(places: dict[str, float]) -> str:
    marks = []
    for power in range(_LOW, _HIGH + 1, 4):
        y = _height(10.0**power)
        marks.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    zero = _height(0.0)
    marks.append(f'<text x="{_LEFT - 8}" y="{zero + 4:.1f}" text-anchor="end">exactly 0</text>')
    names = (f'<text x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{_e(n)}</text>' for n, x in places.items())
    return "".join([*marks, *names])


def _line(name: str, points: Iterable[tuple[float, float]], dashes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="var(--{name})" stroke-width="2"{dash}/>'
