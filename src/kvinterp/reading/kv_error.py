"""What is said of the error that policies make in keys and values, and of what it does to behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvinterp.behaviour.scores import AGAIN, METRICS
from kvinterp.reading.numbers import counted, ends_said, listed, machine_of, number, upper

_SIGNIFICANT = 0.05


# Equivalent noise ------------------------------------------------------------------------------------------------------


def said_of_equivalent_noise(summary: Mapping[str, Any]) -> list[str]:
    """The errors of policies, smallest first; ``summary`` is that of the experiment ``equivalent-noise``."""
    provenance = summary["provenance"]
    by_policy: dict[str, dict[str, Any]] = {}
    for row in summary["policies"]:
        by_policy.setdefault(row["policy"], {})[row["tensor"]] = row
    order = sorted(by_policy.items(), key=lambda item: max(row["relative_rms"] for row in item[1].values()))
    return [
        f"The error of each policy on K and V of {_model(provenance)}: {counted(summary['prompts'], 'prompt')}, "
        f"{counted(summary['max_new_tokens'], 'token')} decoded behind each, on {machine_of(provenance)}. Sizes are root mean "
        "squares relative to that of K or V, with 95% intervals over prompts; bits are those of an element as stored.",
        *(_error_said(name, of) for name, of in order),
    ]


def _error_said(name: str, of: Mapping[str, Mapping[str, Any]]) -> str:
    bits = sorted({row["bits"] for row in of.values()})
    said = f"{name}, {' and '.join(map(number, bits))} bits: "
    if all(row["relative_rms"] == 0 for row in of.values()):
        kept = min(row["share_kept"] for row in of.values())
        return f"{said}exactly no error{f' in the {_share(kept)} of rows that are kept' if kept < 1 else ''}."
    parts = [
        f"{tensor} {number(row['relative_rms'])}{ends_said(row['low'], row['high'])}{_shape(row)}"
        for tensor, row in of.items()
    ]
    return f"{said}{'; '.join(parts)}."


def _shape(row: Mapping[str, Any]) -> str:
    """What a size alone does not say."""
    said = []
    if abs(row["bias"]) > 0.05 * row["relative_rms"]:
        said.append(f"bias {number(row['bias'])}")
    if row["sign_flips"] > 0:
        said.append(f"{_share(row['sign_flips'])} of signs flipped")
    if row["zeroed"] > 0:
        said.append(f"{_share(row['zeroed'])} made 0")
    if row["share_kept"] < 1:
        said.append(f"of the {_share(row['share_kept'])} of rows kept")
    return f", {listed(said)}" if said else ""


def _share(value: float) -> str:
    return f"{100 * value:.2g}%" if value < 0.995 else f"{100 * value:.3g}%"


# Behaviour -------------------------------------------------------------------------------------------------------------


def said_of_kv_error(summary: Mapping[str, Any]) -> list[str]:
    """What errors in the cache do to behaviour, score by score; ``summary`` is that of the experiment ``kv-error``."""
    provenance, scores = summary["provenance"], summary["scores"]
    lines = [
        f"{_model(provenance)} on {machine_of(provenance)}, {counted(summary['repeats'], 'repeat')}, at "
        f"most {counted(summary['max_new_tokens'], 'new token')}, {summary['strategy']}. Scores are percent of control with 95% "
        "intervals over prompts, each the mean of its repeats."
    ]
    lines += _floor([row for row in scores if row["policy"] == AGAIN])
    readings = list(dict.fromkeys(row["reading"] for row in scores if row["policy"] != AGAIN))
    for reading in readings:
        for metric in METRICS:
            of = [r for r in scores if (r["reading"], r["metric"]) == (reading, metric) and r["policy"] != AGAIN]
            lines += [_scores_said(metric, reading, of)] if of else []
    lines += _contrasts_said(summary["contrasts"])
    if summary["failed"]:
        lines.append(f"{counted(summary['failed'], 'run')} of a prompt gave NaN or Inf logits and counts as wrong.")
    return lines


def _model(provenance: Mapping[str, Any]) -> str:
    return f"{provenance['model']} ({provenance['kind']}, {provenance['dtype']})"


def _floor(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    said = [f"{METRICS[row['metric']].meaning} {_percent(row)}" for row in rows if row["percent"] is not None]
    said += [
        f"{METRICS[row['metric']].meaning} {number(row['value'])} beside {number(row['control'])}"
        for row in rows
        if row["percent"] is None
    ]
    return [f"Floor, control against control with other draws of the sampling: {'; '.join(said)}."] if said else []


def _percent(row: Mapping[str, Any]) -> str:
    # Perplexities lie close together where answers do not.
    form = ".1f" if row["metric"] == "perplexity" else ".0f"
    text = f"{row['percent']:{form}}%"
    if row["percent_low"] is not None and abs(row["percent_high"] - row["percent_low"]) < 1e-9:
        # Resampling prompts that are all alike says nothing about others.
        return f"{text} (every prompt alike)"
    if row["percent_low"] is None or not np.isfinite(row["percent_low"]):
        return f"{text} (no interval)"
    return f"{text} ({row['percent_low']:{form}} to {row['percent_high']:{form}})"


def _scores_said(metric: str, reading: str, rows: Sequence[Mapping[str, Any]]) -> str:
    control, prompts = rows[0]["control"], rows[0]["prompts"]
    head = f"{upper(METRICS[metric].meaning)}, prefill={reading}, {counted(prompts, 'prompt')}, control {number(control)}: "
    if rows[0]["percent"] is None or metric in ("loops", "outside"):
        said = [f"{row['policy']} {number(row['value'])}{_star(row)}" for row in rows]
    else:
        said = [f"{row['policy']} {_percent(row)}{_star(row)}" for row in rows]
    starred = any(_star(row) for row in rows)
    note = f" * differs from control at a false discovery rate of {_SIGNIFICANT:.0%}." if starred else ""
    return f"{head}{'; '.join(said)}.{note}"


def _star(row: Mapping[str, Any]) -> str:
    return "*" if row["q"] is not None and row["q"] < _SIGNIFICANT else ""


def _contrasts_said(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The contrasts of the designs in problems, instructions and perplexity; those of the readings are in the table."""
    lines = []
    for name in dict.fromkeys(row["contrast"] for row in rows if ": stored against" not in row["contrast"]):
        of = {row["metric"]: row for row in rows if row["contrast"] == name}
        said = [f"{METRICS[m].meaning} {_difference(of[m], '+.2g')}" for m in ("instructions", "problems") if m in of]
        if "perplexity" in of:
            row = dict(of["perplexity"])
            row |= {key: row[key] if row[key] is None else np.exp(row[key]) for key in ("difference", "low", "high")}
            said.append(f"perplexity times {_difference(row, '.3g')}")
        lines.append(f"Contrast, {name}: {'; '.join(said)}.")
    return lines


def _difference(row: Mapping[str, Any], form: str) -> str:
    if row["low"] is None:
        return f"{row['difference']:{form}} (one prompt, no interval)"
    return f"{row['difference']:{form}} ({row['low']:{form}} to {row['high']:{form}}, p {number(row['p'])})"
