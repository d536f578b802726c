"""What the report's sentences are made of: facts about results, and numbers a person can read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from kvinterp.comparison import PARTS, Comparison
from kvinterp.data import TASKS, score
from kvinterp.models import dtype_named
from kvinterp.results import Result

__all__ = [
    "between",
    "drift_medians",
    "falls",
    "file_name",
    "flattened",
    "grouped",
    "kind_of",
    "ladder_of",
    "largest_difference",
    "leading",
    "model_of",
    "number",
    "place_of",
    "right_answers",
    "said_of_decomposition",
    "said_of_sweep",
    "unit_roundoff",
    "with_protocol",
]

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """Two or three digits a person can read: 0.0156, or 1.6 × 10⁻⁷; exact zeros as 0, no number as a dash."""
    if pd.isna(value):
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}\u00a0×\u00a010{str(int(exponent)).translate(_SUPERSCRIPT)}"


def between(values: Sequence[float]) -> str:
    """The smallest and the largest of some numbers, or the one where they read the same."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def said_of_sweep(summary: Mapping[str, Any]) -> list[str]:
    """What a sweep found, in a line or two; ``summary`` is :meth:`kvinterp.patching.Sweep.summary`."""
    alike, best = summary["examples_without_difference"], summary["best"]
    lines = []
    if alike:
        lines.append(f"{alike} of {summary['examples']} prompts: the paths are bitwise equal, and recovery is undefined.")
    if best is None:
        return [*lines, "There is no difference to recover."]
    place = f"layer {best['layer']:g}" + (f", head {best['head']:g}" if best["head"] >= 0 else "")
    place = f"positions {best['positions']}" if summary["sweep"] == "blocks" else place
    what = f"{best['site']} ({best['sweep']}, {summary['direction']})"
    median, over = f"median recovery of the {_DISTANCES[summary['distance']]}", f"over {best['defined']} prompts"
    if best["median"] < 0.05:
        lines.append(f"No place recovers it: the largest {median} by {what} is {best['median']:.1%}, at {place}, {over}.")
    else:
        lines.append(f"Most is recovered by {what} at {place}: {median} {best['median']:.1%} {over}.")
    if summary["floor"] is not None:
        lines.append(
            f"Floor: with the last residual patched {number(summary['floor'])} is left, the unembedding's own share."
        )
    return lines


_DISTANCES = {"kl": "KL", "l2": "L2 distance of the logits", "margin": "margin"}


def said_of_decomposition(summary: Mapping[str, Any]) -> list[str]:
    """What a decomposition found; ``summary`` is :meth:`kvinterp.patching.Decomposition.summary`."""
    if summary["total_l2"] == 0:
        return [f"The paths are bitwise equal at all {summary['steps']} steps: there is nothing to split."]
    split = {name: summary[f"{name}_l2"] for name in ("state", "fresh")}
    more = max(split, key=lambda name: split[name])
    what = {"state": "the K and V written earlier", "fresh": "this step's own one-row computation"}[more]
    null = summary["null_l2"]
    return [
        f"L2 distance of the logits, mean of {summary['steps']} steps: {number(summary['total_l2'])} in all, "
        f"{number(split['state'])} carried by state, {number(split['fresh'])} made fresh: more by {what}.",
        f"Null control (a longer suffix, no cache at all): {number(null)}"
        + (
            f", as large as the {' and the '.join(n for n in split if split[n] <= null)} part: "
            "a difference of that size needs no cache."
            if null >= min(split.values()) and null > 0
            else "."
        ),
        f"Mean KL in nats: {number(summary['total'])} in all, {number(summary['state'])} state, {number(summary['fresh'])} fresh "
        "(KL is no sum of its parts: two differences can undo each other).",
    ]


def model_of(result: Result) -> str:
    """The model's name without ``zoo:``."""
    return str(result.comparison.about["model"]).removeprefix("zoo:")


def kind_of(result: Result) -> str:
    """The model's kind."""
    return str(result.comparison.about["kind"])


def place_of(result: Result) -> tuple[str, str]:
    """The model's name and kind."""
    return model_of(result), kind_of(result)


def with_protocol(results: Sequence[Result], protocol: str) -> list[Result]:
    """Those made under one protocol."""
    return [r for r in results if r.comparison.about["protocol"] == protocol]


def grouped(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """The results of each model and kind."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault(place_of(result), []).append(result)
    return groups


def leading(results: Sequence[Result]) -> list[Result]:
    """One result of each model and kind: the matched one where there is one, because it measures arithmetic alone."""
    return [(with_protocol(group, "matched") or group)[0] for group in grouped(results).values()]


def file_name(model: str, kind: str, figure: str, main: Sequence[Result]) -> str:
    """The figure's file name: plain where there is one result, with model and kind where there are more."""
    if len(main) == 1:
        return figure
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in model.rpartition("/")[2])
    return "-".join(part for part in (safe, kind, figure) if part)


def right_answers(result: Result) -> tuple[int, int] | None:
    """How many prompts each path answered right, or None where a prompt has nothing to judge it by."""
    judged = {prompt.id: prompt for prompt in result.prompts if prompt.task in TASKS}
    rows = result.comparison.examples.to_dict("records")
    if not rows or any(row["id"] not in judged for row in rows):
        return None
    a, b = (sum(score(judged[row["id"]], str(row[f"text_{side}"])) for row in rows) for side in ("a", "b"))
    return a, b


def largest_difference(comparison: Comparison) -> float:
    """The largest logit difference at any step."""
    return float(comparison.steps["max_abs_logit"].max())


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of a dtype."""
    named = dtype_named(dtype)
    assert named is not None, "a comparison names its dtype"
    return float(torch.finfo(named).eps / 2)


def drift_medians(comparison: Comparison) -> pd.Series:
    """Median relative L2 by layer over examples and steps from 1 on, of resid_post or else the first site recorded.

    Steps after a flip are left out: there the streams are those of two texts.
    """
    frame = comparison.layers[(comparison.layers["step"] > 0) & ~comparison.layers["after_flip"].astype(bool)]
    sites = list(frame["site"].unique())
    site = "resid_post" if "resid_post" in sites or not sites else sites[0]
    return frame[frame["site"] == site].groupby("layer")["relative_l2"].median()


def flattened(about: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values by dotted keys, as text."""
    rows: dict[str, str] = {}
    for key, value in about.items():
        if isinstance(value, Mapping):
            rows |= flattened(value, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = str(value)
    return rows


# The ladder of precisions ----------------------------------------------------------------------------------------------


def ladder_of(results: Sequence[Result], dtype: str) -> dict[str, list[Comparison]]:
    """For each model the same kind, protocol and prompts in more than one dtype, ``dtype`` first.

    Args:
        results: All results.
        dtype: The dtype in question.
    """
    found: dict[str, list[Comparison]] = {}
    for rung in results:
        if rung.comparison.about["dtype"] == dtype or rung.comparison.steps.empty:
            continue
        base = next((r for r in results if r.comparison.about["dtype"] == dtype and _like(r, rung)), None)
        if base is None or base.comparison.steps.empty:
            continue
        if model_of(rung) not in found:
            examples = base.comparison.examples
            shared = examples[examples["id"].isin(rung.comparison.examples["id"])]["example"]
            found[model_of(rung)] = [_only(base.comparison, shared)]
        found[model_of(rung)].append(rung.comparison)
    return found


def falls(rungs: Mapping[str, Sequence[Comparison]]) -> bool:
    """Whether the largest logit difference of every model falls, or is 0, at every step up in precision."""
    for group in rungs.values():
        ordered = sorted(group, key=lambda c: unit_roundoff(c.about["dtype"]), reverse=True)
        sizes = [largest_difference(c) for c in ordered]
        if any(finer and finer >= coarser for coarser, finer in itertools.pairwise(sizes)):
            return False
    return True


def _like(one: Result, other: Result) -> bool:
    return place_of(one) == place_of(other) and one.comparison.about["protocol"] == other.comparison.about["protocol"]


def _only(comparison: Comparison, examples: pd.Series) -> Comparison:
    tables = {n: (t := getattr(comparison, n))[t["example"].isin(examples)] for n in PARTS}
    return Comparison(**tables, about=comparison.about)
