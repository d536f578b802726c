"""What flips and margins say, a sentence each, with how many it is of and its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.behaviour import condition, p_said
from kvinterp.reading.numbers import counted, ends_said, models_on, number
from kvinterp.reading.results import only

__all__ = ["said_of_boundary"]

_OF = {
    "mean_kl": "the free mean KL",
    "mean_kl_before_flip": "the KL up to the flip",
    "matched_mean_kl": "the matched mean KL",
}


def said_of_boundary(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[str]:
    """What :class:`kvinterp.experiments.boundary.Boundary` found, from its tables and the provenance of each model."""
    flips = len(tables["boundary_flips"])
    lines = [
        f"{models_on(provenance)}: {counted(flips, 'decode')} flip a token. Intervals "
        "are 95%, from resampling whole prompts. After a flip the free KL is of two texts, and an early flip leaves more such "
        "steps: a negative correlation of flip step and free KL follows from counting alone."
    ]
    for row in tables["prediction"].to_dict("records"):
        lines += [*_correlations(tables, row), _predicted(row, tables["hazard"])]
    return lines


def _chosen(table: pd.DataFrame, row: Mapping[str, Any]) -> pd.DataFrame:
    return only(table, model=row["model"], strategy=row["strategy"])


def _correlations(tables: Mapping[str, pd.DataFrame], row: Mapping[str, Any]) -> Iterator[str]:
    found = _chosen(tables["boundary"], row).set_index(["quantity", "method"])
    if found.empty:
        return
    count = int(found.loc[("mean_kl", "pearson"), "n"])
    why = found.loc[[(quantity, "pearson") for quantity in _OF], "why"]
    if (why != "").all():
        told = f"whether early flips have a higher KL is not told, since {why.iloc[0]}"
        yield f"{condition(row)}, {counted(count, 'flip')}: {told}."
        return
    said = []
    for quantity, name in _OF.items():
        pearson, partial = (found.loc[quantity, method] for method in ("pearson", "partial"))
        if pd.isna(pearson["value"]):
            said.append(f"with {name} not known, since {pearson['why']}")
            continue
        text = f"with {name} {pearson['value']:+.2f}{_signed(pearson)}, {p_said(pearson['p'])}"
        if not pd.isna(partial["value"]):
            text += f", and {partial['value']:+.2f}{_signed(partial)} with the smallest margin held constant"
        said.append(text)
    yield f"{condition(row)}, {counted(count, 'flip')}: Pearson's correlation of the flip step {'; '.join(said)}."
    thirds = _chosen(tables["terciles"], row).set_index("quantity")
    known = [f"{name} {number(thirds.loc[q, 'ratio'])}{ends_said(*thirds.loc[q, ['low', 'high']])}" for q, name in _OF.items()
             if not pd.isna(thirds.loc[q, "ratio"])]  # fmt: skip
    if known:
        yield f"  The earliest third of these flips against the latest, as a ratio of means: {'; '.join(known)}."


def _signed(row: Mapping[str, Any]) -> str:
    if pd.isna(row["low"]):
        return ""
    return f" ({row['low']:+.2f} to {row['high']:+.2f}{', which 0 is in' if row['low'] <= 0 <= row['high'] else ''})"


def _predicted(row: Mapping[str, Any], hazard: pd.DataFrame) -> str:
    said = f"{condition(row)}, {counted(row['steps'], 'step')} of {counted(row['n'], 'example')}: "
    if not row["flips"]:
        return f"{said}no token flips, so that no margin tells anything of flips."
    said += f"{counted(row['flips'], 'first flip')} at a margin of {number(row['margin_at_flip'])} logits (median), "
    said += f"{number(row['margin_elsewhere'])} elsewhere; a smaller margin tells a flip from another step "
    said += f"with an area under the curve of {row['auc']:.3f}{ends_said(row['auc_low'], row['auc_high'])}"
    step = _chosen(hazard, row).set_index("margin").loc["of the step"]
    if not pd.isna(step["hr"]):
        said += f"; a logit more multiplies the odds of a flip by {number(step['hr'])}"
        said += ends_said(step["low"], step["high"])
    # Of drawn tokens another boundary decides than that of the two highest logits.
    if row["strategy"] == "greedy" and not pd.isna(row["skill"]):
        said += f"; predicted from margin and logit noise, skill {number(row['skill'])}"
        said += ends_said(row["skill_low"], row["skill_high"])
        said += ", 1 would be perfect and 0 no better than the rate"
    return f"{said}."
