"""Facts about comparisons that sentences, tables and figures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvinterp.data import JUDGES, score

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison
    from kvinterp.data import Prompt


def judged(prompt: Prompt | None, text: object) -> bool | None:
    """Whether a prompt was answered right; None where it has nothing to judge it by."""
    return None if prompt is None or prompt.task not in JUDGES else score(prompt, str(text))


def decoded(comparison: Comparison, table: str, first: int = 1) -> pd.DataFrame:
    """The rows of a table from a step on at which both paths hold the same text.

    Args:
        comparison: The comparison.
        table: The table's name; what it sums over the steps leaves out step 0, which is the prefill's on both paths.
        first: The step.
    """
    same = comparison.same_text(getattr(comparison, table))
    return same[same["step"] >= first] if "step" in same else same


def means_of(comparison: Comparison, table: str, keys: Sequence[str], value: str, first: int = 1) -> pd.Series:
    """The mean of a column over the rows of :func:`decoded`, where they are of several vectors over those."""
    rows = decoded(comparison, table, first)
    weights = rows["vectors"] if "vectors" in rows else rows[value].notna()
    groups = [rows[key] for key in keys]
    return (rows[value] * weights).groupby(groups).sum() / weights.groupby(groups).sum()


def let_go_of(comparison: Comparison) -> list[tuple[str, int, int]]:
    """How many rows the policy of each path that lets go of some did by the last step, and of how many."""
    steps = comparison.kv_steps
    last = steps[steps["step"] == steps.groupby("example")["step"].transform("max")]
    last = last[last["tensor"] == last["tensor"].min()]
    context = last["example"].map(comparison.examples.set_index("example")["prompt_tokens"]) + last["step"]
    sides = comparison.provenance.get("lets_go", ()) if len(last) else ()
    return [(side, int(last[f"let_go_{side}"].sum()), int(context.sum())) for side in sides]


def site_of(comparison: Comparison) -> str:
    """The site whose drift is told: resid_post, or else the first recorded; empty where none was."""
    sites = comparison.layers["site"].unique().tolist()
    return "resid_post" if "resid_post" in sites else str(sites[0]) if sites else ""
