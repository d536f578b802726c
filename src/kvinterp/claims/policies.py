"""Claims of two other sources about what a less exact cache does: errors put into K and V, and chains of restatements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.claims.base import (
    Claim,
    Found,
    NotTestableError,
    Tables,
    check_enough,
    known,
    larger_of_intervals,
    smaller,
    smaller_of_intervals,
    table,
)

ERRORS, DRIFT = "cache-error paper", "drift post"
EIGHT_BITS, FOUR_BITS = ("q8_0", "int8"), ("q4_0", "int4")
"""Arms on K and V, of which the first that was run is judged; q8_0 is Ollama's."""
CATASTROPHIC = 0.5
"""The share of what the control follows that a catastrophe costs. The source gives no number: it calls a fifth within bounds."""
KEPT = ("uniform(-1.5,1.5)", "normal(0,0.5)")
"""The bounds of error within which the source says that 80% is kept."""


# Errors in the cache ---------------------------------------------------------------------------------------------------


def _score(tables: Tables, policy: str, metric: str, rule: Callable[..., Found], bound: float) -> Found:
    """A policy's score as a share of the control's, against a bound."""
    columns = ("policy", "reading", "metric", "percent", "percent_low", "percent_high", "prompts", "control")
    rows = table(tables, "scores", *columns)
    rows = rows[(rows["policy"] == policy) & (rows["metric"] == metric)]
    # llama.cpp, which the source used, computes the prompt on what it has stored.
    stored = rows[rows["reading"] == "stored"]
    rows = known(stored if len(stored) else rows, "percent", "percent_low", "percent_high") if len(rows) else rows
    if rows.empty:
        raise NotTestableError(f"{policy} was not scored on {metric}")
    row = rows.iloc[0]
    value, low, high = (float(row[name]) / 100 for name in columns[3:6])
    return rule(Found(value, low, high, int(row["prompts"])), bound, flags=float(row["control"]))


def kept_within_bounds(tables: Tables) -> Found:
    """Under both errors that the source names as bounds 80% of the control's score is kept."""
    found = [_score(tables, policy, "instructions", larger_of_intervals, 0.8) for policy in KEPT]
    least = min(found, key=lambda one: one.matched)
    fails = min(1.0, len(found) * min(one.fails for one in found))
    why = " and ".join(f"{one.matched:.0%} under {policy}" for policy, one in zip(KEPT, found, strict=True))
    return dataclasses.replace(least, holds=max(one.holds for one in found), fails=fails, why=why)


def _effect(tables: Tables, factor: str) -> Found:
    """What a factor does to the instructions followed, as a share of those that the control follows."""
    rows = table(tables, "contrasts", "contrast", "metric", "difference", "low", "high", "prompts")
    named = rows["contrast"].astype(str).str.startswith(f"{factor}, ")
    rows = rows[(named | (rows["contrast"] == factor)) & (rows["metric"] == "instructions")]
    # As for the scores: the source's engine computes the prompt on what it has stored.
    stored = rows[rows["contrast"].astype(str).str.contains("prefill=stored")]
    rows = stored if len(stored) else rows
    if rows.empty:
        raise NotTestableError(f"no factorial at a matched error has a contrast of {factor}")
    scores = table(tables, "scores", "metric", "control")
    control = float(scores.loc[scores["metric"] == "instructions", "control"].max())
    if not control > 0:
        raise NotTestableError("the control follows no instruction")
    row = rows.iloc[0]
    found = Found(float(row["difference"]), float(row["low"]), float(row["high"]), int(row["prompts"]))
    return smaller_of_intervals(found.through(lambda value: value / control), -CATASTROPHIC, flags=control)


# Chains ----------------------------------------------------------------------------------------------------------------


def _differences(tables: Tables, *arms: str) -> pd.DataFrame:
    """The last similarity under the first of these arms that was run, less that without a policy.

    Returns:
        A row a chain: arm, ``difference``, and ``text``, which is the unit: its chains under several seeds are not independent.
    """
    chains = table(tables, "chains", "model", "arm", "temperature", "text", "seed", "hop", "similarity")
    keys = ["model", "temperature", "text", "seed"]
    last = chains[chains["hop"] == chains.groupby(["model", "arm", *keys[1:]])["hop"].transform("max")]
    arm = next((name for name in arms if (last["arm"] == name).any()), "")
    control = last.loc[last["arm"] == "cached", [*keys, "similarity"]]
    both = last[last["arm"] == arm].merge(control, on=keys, suffixes=("", "_control"))
    if both.empty:
        raise NotTestableError(f"no chain was run with {' or '.join(arms)} beside one without a policy")
    return both.assign(difference=both["similarity"] - both["similarity_control"])


def exact_cache_keeps_more(tables: Tables) -> Found:
    """Chains under 8 bits end further from their first text than without."""
    both = _differences(tables, *EIGHT_BITS)
    return dataclasses.replace(
        smaller(both["difference"], both["text"], 0.0, of="mean"), why=f"the arm is {both['arm'].iloc[0]}"
    )


def keys_matter_more(tables: Tables) -> Found:
    """A policy on K alone costs more similarity than on V alone."""
    reasons = []
    for name in (*EIGHT_BITS, *FOUR_BITS):
        try:
            k, v = (_differences(tables, f"{name}(on={part})") for part in "kv")
        except NotTestableError as reason:
            reasons.append(reason)
            continue
        both = k.merge(v, on=["model", "temperature", "text", "seed"], suffixes=("_k", "_v"))
        found = smaller(both["difference_k"] - both["difference_v"], both["text"], 0.0, of="mean")
        return dataclasses.replace(found, why=f"the arms are those of {name}")
    raise reasons[0]


def models_disagree(tables: Tables) -> Found:
    """For some models the less exact cache is better, for others worse."""
    both = _differences(tables, *EIGHT_BITS)
    if both["model"].nunique() < 2:
        raise NotTestableError("it is of several models, and there is one")
    by = both.groupby(["text", "model"])["difference"].mean().unstack("model").dropna()
    check_enough(len(by), f"{len(by)} texts were restated by every model")
    means = by.mean()
    best, worst = means.idxmax(), means.idxmin()
    above, below = (
        np.array([metrics.mean_of(by[model], alternative=side).p for model in by]) for side in ("greater", "less")
    )
    if not np.isfinite([above, below]).all():
        raise NotTestableError("in a model no text differs, or all by the same")
    # Both signs occur: some model is above 0 and some below, each corrected for having been chosen. Only one does: all are.
    holds = min(1.0, max(above.min(), below.min()) * len(means))
    fails = min(1.0, 2 * min(above.max(), below.max()))
    apart = metrics.mean_of(by[best] - by[worst])
    return Found.of(apart, holds=holds, fails=fails, why=f"the arm is {both['arm'].iloc[0]}")


_ERRORS = "1,000 and more prompts paired with the control on the source's model (Llama-3.2-1B-Instruct)"
_CHAINS = "30 texts and more, 10 seeds each, with other seeds of the same precision beside them, on the source's models"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "q8-instructions", ERRORS, "table 1", "8-bit quantisation keeps nearly all of instruction following.",
        "98%", "instructions followed, as a share of the control's", "holds above 90%, does not below",
        _ERRORS, lambda tables: _score(tables, "q8_0", "instructions", larger_of_intervals, 0.9), if_equal="open",
    ),
    Claim(
        "q4-words", ERRORS, "6.1, table 2", "4-bit quantisation guesses more next words than no quantisation.",
        "115%", "words guessed, as a share of the control's", "holds above 100%, does not below",
        _ERRORS, lambda tables: _score(tables, "q4_0", "next_token", larger_of_intervals, 1.0), if_equal="open",
    ),
    Claim(
        "uniform-noise", ERRORS, "table 3", "Uniform noise within the value's own size costs instruction following.",
        "83%", "instructions followed, as a share of the control's", "holds below 95%, does not above",
        _ERRORS, lambda tables: _score(tables, "uniform(-1,1)", "instructions", smaller_of_intervals, 0.95), if_equal="open",
    ),
    Claim(
        "flipped-signs", ERRORS, "5.5, 6.4", "At the same magnitude, errors that flip signs are catastrophic.",
        "", "effect of flipped signs at a matched mean square on instructions followed, as a share of the control's",
        "holds where it costs more than half, does not where it costs less; the source gives no bound",
        _ERRORS, lambda tables: _effect(tables, "flips"), if_equal="open",
    ),
    Claim(
        "skewed-errors", ERRORS, "5.5", "At the same magnitude, errors with a mean other than zero are catastrophic.",
        "", "effect of a shifted mean at a matched mean square on instructions followed, as a share of the control's",
        "holds where it costs more than half, does not where it costs less; the source gives no bound",
        _ERRORS, lambda tables: _effect(tables, "shift"), if_equal="open",
    ),
    Claim(
        "kept-within-bounds", ERRORS, "7", "Errors up to uniform(-1.5,1.5) or normal(0,0.5) keep 80% of the accuracy.",
        "80%", "instructions followed under the worse of the two, as a share of the control's",
        "holds where both are shown to be above 80%, does not where one is shown to be below", _ERRORS, kept_within_bounds,
        if_equal="open",
    ),
    Claim(
        "exact-chains", DRIFT, "results", "Chains of restatements keep more of the text with 16 bits than with 8.",
        "17 of 22 models, +0.09",
        "last similarity under q8_0 (int8 where that was not run) less that without a policy; texts are the units",
        "holds below 0, does not above", _CHAINS, exact_cache_keeps_more, if_equal="open",
    ),
    Claim(
        "keys-matter", DRIFT, "background, insights", "Keys are more sensitive to low precision than values.",
        "", "last similarity with one policy on K alone less that with it on V alone; texts are the units",
        "holds below 0, does not above", _CHAINS, keys_matter_more, if_equal="open",
    ),
    Claim(
        "not-monotone", DRIFT, "results", "More precision is not better for every model.",
        "+0.62 to -0.36", "effect of 8 bits on the last similarity, the best model's less the worst's",
        "holds where one model is shown to be above 0 and one below, corrected for all models; does not where all have one sign",
        _CHAINS, models_disagree, if_equal="open",
    ),
)  # fmt: skip
