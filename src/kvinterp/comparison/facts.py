"""Numbers of a comparison that findings, tables and figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvinterp.metrics.statistics import mean_error

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison


def decoded(comparison: Comparison, table: str, first: int = 1) -> pd.DataFrame:
    """The rows of a table, from a step on, at which both paths hold the same text.

    Args:
        comparison: The comparison.
        table: The table's name. Tables summed over steps leave out step 0, which is the prefill on
            both paths.
        first: The first step.
    """
    rows = comparison.same_text(getattr(comparison, table))
    return rows[rows["step"] >= first] if "step" in rows else rows


def means_of(
    comparison: Comparison, table: str, keys: Sequence[str], value: str, first: int = 1
) -> pd.Series:
    """The mean of a column over the rows of :func:`decoded`, weighted as in :func:`mean_error`."""
    return mean_error(decoded(comparison, table, first), keys, value)


def evicted_rows(comparison: Comparison) -> list[tuple[str, int, int]]:
    """For each path whose policy evicts: its side, how many rows were evicted by the last step, and
    of how many.
    """
    steps = comparison.kv_steps
    last = steps[steps["step"] == steps.groupby("example")["step"].transform("max")]
    last = last[last["tensor"] == last["tensor"].min()]
    context = (
        last["example"].map(comparison.examples.set_index("example")["prompt_tokens"])
        + last["step"]
    )
    sides = comparison.provenance.get("lets_go", ()) if len(last) else ()
    return [(side, int(last[f"let_go_{side}"].sum()), int(context.sum())) for side in sides]


def site_of(comparison: Comparison) -> str:
    """The site whose drift is reported: resid_post, or else the first recorded; empty if none
    was.
    """
    sites = comparison.layers["site"].unique().tolist()
    return "resid_post" if "resid_post" in sites else str(sites[0]) if sites else ""
