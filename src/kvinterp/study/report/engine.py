"""Makes the page about another engine's log-probs: verdict, tokens shaded by their difference, checks, causes ruled out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.auditing.verdict import Verdict
from kvinterp.common.numbers import counted, number, upper
from kvinterp.errors import in_one_line, visible
from kvinterp.study.report.page import (
    Answer,
    Folded,
    Links,
    Pairs,
    Parts,
    Shaded,
    Text,
    fragment,
    pairs_of,
    render,
    table_of_rows,
)

BOUNDS = (1, 3, 10, 30, 100)
"""The differences at which the next shade begins, in units of rounding; from the last on a difference is off the scale."""
SHOWN = ("sequence", "tokens", "k1", "k3", "rollout_is_seq_mean", "rollout_is_max", "token_mult_prob_error", "ppl_ratio")
"""The statistics of a sequence that the page has."""
OPEN, TOKENS, LARGEST = 4, 2**16, 10
"""The number of sequences that are visible, the most tokens on the page, and the rows in the table of the largest."""

_SAID = {
    "equal": "The engine gave the bits that we compute.",
    "rounding": "The engine differs from us by no more than rounding.",
    "kernel": "The engine differs from us by one of its kernels, which adds in another order or precision; that is no fault.",
    "policy": "The engine differs from us by a cache that holds keys and values in fewer bits.",
    "misaligned": "The log-probs are of other tokens than the file says: shifted, or with another beginning.",
    "processed": "The log-probs are those after temperature or truncation, not the model's own.",
    "wrong-dtype": "The engine computes in a coarser precision than was declared.",
    "overflow": "NaN or Inf appeared.",
    "bug": "The engine computes something other than this model: with the same fault we give the same log-probs.",
    "unexplained": "The engine differs from us by more than rounding, and by none of the causes that were tried.",
    "cannot-tell": "These log-probs do not tell rounding from a fault.",
}
_RL = (
    "Under the names of verl, NeMo-RL, TRL and prime-rl; the verdict does not rest on them. k1 and k3 estimate a KL only "
    "where the tokens were sampled from the engine without truncation: on a fixed text they are statistics of the difference."
)
_TRIED = (
    "Each cause put into our own float64. Left: which share of the difference it leaves over n tokens. What is accepted is "
    "decided on held-out tokens."
)


def texts_of(verdict: Verdict) -> dict[str, str]:
    """Page and verdict by the names of their files."""
    return {"report.html": page(verdict), "verdict.json": verdict.to_json()}


def page(verdict: Verdict) -> str:
    """The self-contained page; all text of the file is escaped."""
    summary: Mapping[str, Any] = verdict.given
    steps = [{"step": check.name, "status": check.status, "what it showed": check.detail} for check in verdict.checks]
    parts = [
        *_answer(verdict),
        *_token_parts(verdict),
        Text("Step by step", look="h2"),
        table_of_rows(steps, text="what it showed"),
    ]
    if summary["rungs"]:
        note = (
            "The distance to our float64 over that of our own precision; low, high: 99.8% of resampled means; null: the furthest "
            "of our own ways to compute the same, measured in this run."
        )
        parts += [Text("Distances", look="h2"), Text(note, look="note"), table_of_rows(summary["rungs"])]
    if summary["tried"]:
        cause = summary.get("named")
        tried = [{**row, "ruled out": "no, it is named" if row["cause"] == cause else "yes"} for row in summary["tried"]]
        tried.sort(key=lambda row: row["left"])
        parts.append(
            Folded(counted(len(tried), "cause") + " that were tried", [Text(_TRIED, look="note"), table_of_rows(tried)])
        )
    if "statistics" in summary:
        ratios = summary["statistics"]
        rows = [{name: row[name] for name in SHOWN} for row in ratios["by_sequence"][:200]]
        content = [
            Text(f"{_RL} Trainer: {ratios['trainer']}.", look="note"),
            Pairs({name: f"{value:.4g}" for name, value in ratios["all"].items()}, look="beside"),
            table_of_rows(rows, folded=f"By sequence: {len(rows)} of {len(ratios['by_sequence'])}"),
        ]
        parts.append(Folded("What reinforcement learning libraries print", content))
    files = ["verdict.json", *([] if verdict.tokens is None else ["given.parquet"])]
    parts += [
        Folded("What this was made with", [pairs_of(verdict.provenance)]),
        Links(files={name: name for name in files}, label="Beside this page:"),
    ]
    return render(f"Another engine against {verdict.provenance['model']}", parts, look="audit")


def engine_fragment(verdict: Verdict) -> str:
    """The verdict and the shaded tokens for a notebook, as a self-contained page in a frame."""
    parts, title = [*_answer(verdict), *_token_parts(verdict)], f"Another engine against {verdict.provenance['model']}"
    note = Text("In short; .report() writes the whole page.", look="note")
    return fragment(note, Text(render(title, parts), look="frame"))


def _answer(verdict: Verdict) -> Parts:
    first, why, *_ = verdict.reading.splitlines()
    head = f"{first}."
    if "sides" not in verdict.given:
        code = "CANNOT TELL" if first.startswith("CANNOT") else first.split()[0]
        head = f"{code}: {verdict.verdict}. {_SAID[verdict.verdict]}"
    return [Answer([head, upper(why.strip())], {0: "good", 3: "unsure"}.get(verdict.exit_code, "bad"))]


def _token_parts(verdict: Verdict) -> Parts:
    if verdict.tokens is None:
        return []
    summary, table = verdict.given, verdict.tokens
    if summary.get("side") == "the trainer":
        table = table.assign(engine=table["trainer"], difference=table["trainer_difference"])
    size = summary.get("our_mean_distance")
    return shaded(table, (size, f"our own mean rounding in {summary['beside']}") if size else None, summary["begins"])


def shaded(table: pd.DataFrame, unit: tuple[float, str] | None = None, begins: int | None = None) -> Parts:
    """The texts with their tokens shaded by engine less ours, the sequences of the largest mean difference first.

    Args:
        table: For each token ``sequence``, ``position``, ``token``, ``engine``, ``ours``, ``difference``, and where known
            ``text`` and ``part``.
        unit: The unit of the differences in nats, and its name (default: their mean).
        begins: The position at which they begin to differ.
    """
    gap = table["difference"].abs()
    mean = float(gap.mean())
    size, what = unit or (mean if mean > 0 else 1.0, "the mean difference")
    table = table.assign(units=table["difference"] / size)
    groups = table.assign(gap=gap).groupby("sequence", observed=True)
    order = (
        groups["gap"].agg(["mean", "max", "count"]).sort_values("mean", ascending=False, na_position="last", kind="stable")
    )
    parts: Parts = [Text("Token by token", look="h2"), *_where(table, begins), *_scale(table, size, what, begins)]
    room, hidden = TOKENS, 0
    for place, (name, mean, largest, count) in enumerate(order.itertuples()):
        if room <= 0:
            hidden += 1
            continue
        rows = groups.get_group(name)
        heading = (
            f"{in_one_line(name)}: mean {number(mean)} nats, largest {number(largest)} (n = {count:,} of "
            f"{len(rows):,} tokens)"
        )
        content: Parts = [Shaded(_looks(rows.head(room), begins))]
        if len(rows) > room:
            content.append(Text(f"The first {room:,} of its tokens; all are in given.parquet.", look="note"))
        parts += [Text(heading, look="h3"), *content] if place < OPEN else [Folded(heading, content)]
        room -= len(rows)
    if hidden:
        parts.append(Text(f"{counted(hidden, 'more sequence')} in given.parquet.", look="note"))
    return [*parts, *_largest(table, what)]


def _where(table: pd.DataFrame, begins: int | None) -> Parts:
    if begins is None:
        return [Text("No position was found at which the difference begins.")]
    behind = (table["position"] >= begins) & table["difference"].notna()
    first, later = (number(table["units"].abs()[mask].median()) for mask in (~behind, behind))
    return [
        Text(
            f"It seems to begin at position {begins}, marked in red: from there the median is {later} units, before it {first} "
            f"(n = {int(behind.sum()):,} tokens from there on)."
        )
    ]


def _scale(table: pd.DataFrame, size: float, what: str, begins: int | None) -> Parts:
    """The legend of the shades."""
    steps = [*(f"{low} to {high}" for low, high in itertools.pairwise(BOUNDS)), f"{BOUNDS[-1]} and more, off the scale"]
    below, above = (
        [(f"{side}{n}", f"{word} by {step}") for n, step in enumerate(steps, 1)]
        for side, word in (("b", "below"), ("a", "above"))
    )
    others = {
        ("n", "not given"): table["engine"].isna().any() or _gaps(table).any(),
        ("p", "of the prompt"): "prompt" in set(table.get("part", [])),
        ("s", f"position {begins}"): begins is not None,
    }
    legend = [*below[::-1], ("", f"less than {BOUNDS[0]}"), *above, *(look for look, shown in others.items() if shown)]
    off = counted(int((table["units"].abs() >= BOUNDS[-1]).sum()), "token")
    return [
        Text(f"Shaded is engine less ours, in units of {what}, {number(size)} nats; {off} off the scale."),
        Shaded((), legend),
    ]


def _gaps(table: pd.DataFrame) -> np.ndarray:
    """The number of missing positions before each row, in the order of the table."""
    return np.maximum(table.groupby("sequence", observed=True)["position"].diff().fillna(1).to_numpy() - 1, 0)


def _looks(rows: pd.DataFrame, begins: int | None) -> list[tuple[str, str, str]]:
    looks, gaps = [], _gaps(rows)
    texts = rows.get("text", rows["token"].map("{} ".format))
    prompt = rows["part"] == "prompt" if "part" in rows else np.zeros(len(rows), bool)
    columns = (rows[name] for name in ("position", "engine", "ours", "difference", "units"))
    for text, of_prompt, gap, at, engine, ours, difference, units in zip(texts, prompt, gaps, *columns, strict=True):
        if gap:
            looks.append((" … ", "n", f"{int(gap)} not given"))
        level = int(np.searchsorted(BOUNDS, abs(units), "right")) if units == units else 0
        look = "n" if engine != engine and at else f"{'ab'[units < 0]}{level}" if level else ""
        look = " ".join(filter(None, (look, "p" * bool(of_prompt), "s" * (at == begins))))
        note = (
            f"{at}: not given"
            if engine != engine
            else f"{at}: engine {engine:.4g}, ours {ours:.4g}, less ours {difference:+.2g} ({units:+.3g})"
        )
        looks.append((visible(text).replace("\n", "↵\n"), look, note))
    return looks


def _largest(table: pd.DataFrame, what: str) -> Parts:
    top = table.loc[table["difference"].abs().nlargest(LARGEST).index]
    names = [
        name for name in ("sequence", "position", "text", "token", "engine", "ours", "difference", "units") if name in top
    ]
    rows = [
        {name: in_one_line(v) if isinstance(v, str) else v for name, v in row.items()}
        for row in top[names].to_dict("records")
    ]
    note = f"Engine, ours and difference (engine less ours) in nats; units of {what}."
    return [Text("The largest", look="h3"), Text(note, look="note"), table_of_rows(rows)] if rows else []
