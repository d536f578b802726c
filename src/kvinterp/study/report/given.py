"""The page of another engine's log-probs: the verdict, each step, the distances, what was tried, and what others print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvinterp.auditing.verdict import Verdict
from kvinterp.study.report.page import Answer, Column, Links, Pairs, Table, Text, render

_RL = (
    "Under the names of verl, NeMo-RL, TRL and prime-rl; the verdict does not rest on them. k1 and k3 estimate a KL only "
    "where the tokens were sampled from the engine without truncation: on a fixed text they are statistics of the difference."
)


def texts_of(verdict: Verdict) -> dict[str, str]:
    """Page and verdict by the names of their files."""
    return {"report.html": page(verdict), "verdict.json": verdict.to_json()}


def page(verdict: Verdict) -> str:
    """The page, self-contained; whatever comes from the file is escaped."""
    found: Mapping[str, Any] = verdict.given
    steps = [{"step": each.name, "status": each.status, "what it showed": each.detail} for each in verdict.checks]
    parts: list[Any] = [
        Answer(verdict.reading.splitlines()[:2], {0: "good", 3: "unsure"}.get(verdict.exit_code, "bad")),
        Text("Step by step", look="h2"),
        _table(steps, text="what it showed"),
    ]
    if found["rungs"]:
        note = (
            "The engine's distance to our float64 over that of each of our precisions; low, high: 95% of resampled means."
        )
        parts += [Text("Distances", look="h2"), Text(note, look="note"), _table(found["rungs"])]
    if found["tried"]:
        tried = sorted(found["tried"], key=lambda row: row["left"])
        note = "Each cause put into our own float64: which share of the difference it leaves, and how much of it is there."
        parts += [Text("Causes that were tried", look="h2"), Text(note, look="note"), _table(tried)]
    if "statistics" in found:
        said = found["statistics"]
        names = ("sequence", "tokens", "k1", "k3", "rollout_is_max", "token_mult_prob_error", "ppl_ratio")
        rows = [{name: row[name] for name in names} for row in said["by_sequence"][:200]]
        parts += [
            Text("What reinforcement learning libraries print", look="h2"),
            Text(f"{_RL} Trainer: {said['trainer']}.", look="note"),
            Pairs({name: f"{value:.4g}" for name, value in said["all"].items()}, look="beside"),
            _table(rows),
        ]
    made = {name: str(value) for name, value in verdict.provenance.items()}
    parts += [
        Text("Made with", look="h2"),
        Pairs(made, look="beside"),
        Links(files={"verdict.json": "verdict.json"}, label="Beside this page:"),
    ]
    return render("audit", f"Another engine against {verdict.provenance['model']}", parts)


def _table(rows: Sequence[Mapping[str, Any]], text: str = "") -> Table:
    head = [Column(name.replace("_", " "), "text" if name == text else "") for name in rows[0]]
    cells = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return Table(head, cells, look="cards" if text else "")
