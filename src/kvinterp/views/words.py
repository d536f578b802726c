"""What the report's sentences are made of: facts about results, and numbers a person can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvinterp import metrics
from kvinterp.comparison import Comparison
from kvinterp.comparison.where import machine_of
from kvinterp.data import TASKS, score
from kvinterp.models import dtype_named
from kvinterp.results import Result

__all__ = [
    "between",
    "drift_medians",
    "file_name",
    "flattened",
    "grouped",
    "interval_said",
    "kind_of",
    "leading",
    "listed",
    "machines_of",
    "model_of",
    "number",
    "place_of",
    "right_answers",
    "share",
    "site_of",
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


def share(part: int, whole: int) -> str:
    """A share in percent that is 0% or 100% only where it is so."""
    if part in (0, whole):
        return f"{part // max(whole, 1):.0%}"
    percent = 100 * part / whole
    return "less than 1%" if percent < 1 else "more than 99%" if percent > 99 else f"{percent:.0f}%"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def interval_said(values: Any, of: str = "prompt") -> str:
    """The bootstrap interval of a mean over prompts, or why there is none.

    Args:
        values: One number for each; NaN and infinity are left out.
        of: What there is one number for.
    """
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if not len(known):
        return f"no {of} gives a number"
    if len(known) == 1:
        return f"one {of}, no interval"
    low, high = metrics.bootstrap_interval(known)
    return f"95% interval {number(low)} to {number(high)} over {len(known)} {of}s"


def machines_of(abouts: Iterable[Mapping[str, Any]]) -> str:
    """The hardware some results were measured on, each once."""
    return listed(list(dict.fromkeys(machine_of(dict(about)) for about in abouts)))


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


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of a dtype."""
    named = dtype_named(dtype)
    assert named is not None, "a comparison names its dtype"
    return float(torch.finfo(named).eps / 2)


def site_of(comparison: Comparison) -> str:
    """The site whose drift is told: resid_post, or else the first recorded; empty where none was."""
    sites = list(comparison.layers["site"].unique())
    return "resid_post" if "resid_post" in sites else str(sites[0]) if sites else ""


def drift_medians(comparison: Comparison) -> pd.Series:
    """Median relative L2 of :func:`site_of` by layer over prompts and steps from 1 on at which both hold the same text."""
    frame = comparison.same_text(comparison.layers)
    frame = frame[(frame["step"] > 0) & (frame["site"] == site_of(comparison))]
    return frame.groupby("layer")["relative_l2"].median().dropna()


def flattened(about: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values by dotted keys, as text."""
    rows: dict[str, str] = {}
    for key, value in about.items():
        if isinstance(value, Mapping):
            rows |= flattened(value, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = str(value)
    return rows
