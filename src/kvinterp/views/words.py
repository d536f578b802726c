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
    "said_of_root_cause",
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


def said_of_root_cause(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """What the root-cause experiments found, a sentence each; ``tables`` are those of ``experiments.root_cause``."""
    sums = tables["accumulation"]
    sums = sums[(sums["product"] == "values") & (sums["accumulate"] == "float16")].sort_values("length")
    first, last = sums.iloc[0], sums.iloc[-1]
    behind = tables["propagation"]
    deepest = behind[behind["layer"] == behind["layer"].max()]
    deepest = deepest[deepest["source"] == 0]["amplification"].median()
    written = tables["kv_write"].groupby("kernels", sort=False)["relative_error"].mean()
    ladder = tables["ladder"][tables["ladder"]["protocol"] == "matched"]
    rungs = ladder.groupby(["dtype", "kernels"], sort=False)["rms_logit"].agg(["min", "max"])
    lines = [
        f"1. A float16 sum, one term after another, is off by {number(first['mean_relative'])} of what was added at "
        f"{first['length']} terms and {number(last['mean_relative'])} at {last['length']}; of the result by "
        f"{number(first['relative_to_result'])} and {number(last['relative_to_result'])}.",
        f"2. Layer 0's output rounded once to float16 reaches the last layer {number(deepest)} times as large (median).",
        "3. K and V written alone differ from those written jointly by "
        + ", ".join(f"{number(error)} ({kernels})" for kernels, error in written.items())
        + ", mean relative error.",
        *_said_of_flips(tables["flips"], tables["correlations"]),
        "5. RMS logit difference, smallest and largest of the models: "
        + "; ".join(f"{dtype} {kernels} {between(list(found))}" for (dtype, kernels), found in rungs.iterrows())  # type: ignore[misc]
        + ".",
    ]
    if "gqa" in tables:
        spread = tables["gqa"].groupby("query_heads_per_kv_head")[["heads_touched", "attn_out"]].median()
        shown = (f"{int(n)} a KV head: {row['heads_touched']:g}, {number(row['attn_out'])}" for n, row in spread.iterrows())
        lines.append(
            "6. Query heads touched by one KV head's error, and the attention output's L2: " + "; ".join(shown) + "."
        )
    return lines


_AGAINST = {"mean_kl": "free", "mean_kl_before_flip": "earlier", "matched_mean_kl": "matched"}


def _said_of_flips(flips: pd.DataFrame, correlations: pd.DataFrame) -> list[str]:
    lines = []
    for (strategy, kernels), group in flips.groupby(["strategy", "kernels"], sort=False):
        flipped = group.dropna(subset=["flip_index"])
        said = f"4. {strategy}, {kernels} kernels: {len(flipped)} of {len(group)} decodes flip a token"
        if len(flipped):
            said += (
                f"; mean KL {number(flipped['mean_kl'].mean())} nats over all free steps, "
                f"{number(flipped['mean_kl_before_flip'].mean())} before the flip, "
                f"{number(flipped['matched_mean_kl'].mean())} matched"
            )
        known = correlations[(correlations["strategy"] == strategy) & (correlations["kernels"] == kernels)]
        known = known.dropna(subset=["pearson"])
        whole = known[known["model"] == "all"]
        for row in (whole if len(whole) else known).to_dict("records"):
            if row["against"] in _AGAINST:
                name = _AGAINST[row["against"]]
                said += f"; Pearson of flip step and {name} KL {row['pearson']:.2f} (p {row['pearson_p']:.1g})"
        lines.append(said + ".")
    return lines


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
