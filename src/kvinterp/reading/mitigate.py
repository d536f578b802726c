"""What mitigations leave and cost, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import counted, ends_said, machine_of, number

__all__ = ["said_of_mitigate"]


def said_of_mitigate(summary: Mapping[str, Any]) -> list[str]:
    """A line a mitigation, a line a policy; ``summary`` is that of :class:`kvinterp.experiments.mitigate.Mitigate`."""
    rows = summary["mitigations"]
    least = min(rows, key=lambda row: (row["mean_kl"], row["rows_a_token"], row["bytes_a_token"]))
    alike = sum(row["mean_kl"] == least["mean_kl"] for row in rows)
    left = f"least of the divergence from their own recompute path, KL {number(least['mean_kl'])} nats"
    of = f"({counted(summary['prompts'], 'prompt')})"
    who = f"{least['path']} leaves" if alike == 1 else f"{least['path']} and {counted(alike - 1, 'other')} leave"
    lines = [f"Of {len(rows)} paths, {who} {left} {of}." if len(rows) > 1 else f"One path, on {of[1:-1]}:"]
    lines += [f"  {_mitigation(row)}" for row in rows]
    lines.append("Rows count what is computed, not how long a kernel takes for it; bytes are those of K and V.")
    lines += [_interaction(row) for row in summary["interactions"]]
    return [*lines, f"Measured on {machine_of(summary['provenance'])}."]


def _mitigation(row: Mapping[str, Any]) -> str:
    front = "; no other is better in one and as good in all" if row["pareto"] else ""
    typical = f" (median {number(row['typical_kl'])}, 95% interval {{}})"
    left = (
        f"KL {number(row['mean_kl'])}{ends_said(row['low'], row['high'], typical)}"
        if row["differ"]
        else "nothing, bit for bit"
    )
    return (
        f"{row['path']}: {left}, {row['flips']} flips of {row['steps']} steps; from float64 {number(row['truth_kl'])}; "
        f"rows a token: {number(row['rows_a_token'])}, bytes a token: {number(row['bytes_a_token'])}{front}."
    )


def _interaction(row: Mapping[str, Any]) -> str:
    parts = f"{number(row['policy_alone'])} alone and {number(row['path_alone'])} of the path"
    said = f"{row['policy']} with the cached path: mean squared logit error {number(row['both'])}, {parts}"
    # NaN where it was measured, null where it is read again.
    if pd.isna(row["low"]):
        return f"{said}; too few prompts tell whether they add up."
    interval = number(row["contrast"]) + ends_said(row["low"], row["high"], ", 95% interval {}")
    if row["low"] > 0:
        return f"{said}: more than their sum (in the median prompt by {interval}), so one makes the other larger."
    if row["high"] < 0:
        return f"{said}: less than their sum (in the median prompt by {interval}), so one hides the other in part."
    return f"{said}: not told apart from their sum (in the median prompt {interval} more)."
