"""Claims of two other sources about what a less exact cache does: errors put into K and V, and chains of restatements."""

from __future__ import annotations

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

__all__ = ["CLAIMS"]

ERRORS, DRIFT = "cache-error paper", "drift post"
EIGHT_BITS = r"^(?:q8_0|int8)(?:\([^)]*\))?$"
"""The arms that stand for Ollama's q8_0."""


# Errors in the cache ---------------------------------------------------------------------------------------------------


def _score(tables: Tables, policy: str, metric: str) -> Found:
    """A policy's score as a share of the control's."""
    columns = ("policy", "reading", "metric", "percent", "percent_low", "percent_high", "prompts")
    rows = table(tables, "scores", *columns)
    rows = rows[(rows["policy"] == policy) & (rows["metric"] == metric)]
    # llama.cpp, which the source used, computes the prompt on what it has stored.
    stored = rows[rows["reading"] == "stored"]
    rows = known(stored if len(stored) else rows, "percent", "percent_low", "percent_high") if len(rows) else rows
    if rows.empty:
        raise NotTestableError(f"{policy} was not scored on {metric}")
    row = rows.iloc[0]
    value, low, high = (float(row[name]) / 100 for name in columns[3:6])
    return Found(value, low, high, int(row["prompts"]))


def _effect(tables: Tables, factor: str) -> Found:
    rows = table(tables, "contrasts", "contrast", "metric", "difference", "low", "high", "prompts")
    named = rows["contrast"].astype(str).str.startswith(f"{factor}, ")
    rows = rows[(named | (rows["contrast"] == factor)) & (rows["metric"] == "instructions")]
    if rows.empty:
        raise NotTestableError(f"no factorial at a matched error has a contrast of {factor}")
    row = rows.iloc[-1]
    return Found(float(row["difference"]), float(row["low"]), float(row["high"]), int(row["prompts"]))


# Chains ----------------------------------------------------------------------------------------------------------------


def _differences(tables: Tables, arms: str) -> pd.DataFrame:
    """The last similarity under each of these arms less that without a policy: a row a chain, ``difference``."""
    chains = table(tables, "chains", "model", "arm", "temperature", "text", "seed", "hop", "similarity")
    keys = ["model", "temperature", "text", "seed"]
    last = chains[chains["hop"] == chains.groupby(["model", "arm", *keys[1:]])["hop"].transform("max")]
    control = last.loc[last["arm"] == "cached", [*keys, "similarity"]]
    chosen = last[last["arm"].astype(str).str.contains(arms, regex=True)]
    both = chosen.merge(control, on=keys, suffixes=("", "_control"))
    if both.empty:
        raise NotTestableError("no chain was run with such a policy beside one without")
    unit = both["text"].astype(str) + " " + both["seed"].astype(str)
    return both.assign(difference=both["similarity"] - both["similarity_control"], unit=unit)


def exact_cache_keeps_more(tables: Tables) -> Found:
    """Chains under 8 bits end further from their first text than without."""
    both = _differences(tables, EIGHT_BITS)
    return smaller(both["difference"], both["unit"], 0.0)


def keys_matter_more(tables: Tables) -> Found:
    """A policy on K alone costs more similarity than on V alone."""
    on = {part: _differences(tables, rf"on={part}\)") for part in ("k", "v")}
    name = [each.assign(policy=each["arm"].astype(str).str.replace(r"on=[kv]", "", regex=True)) for each in on.values()]
    keys = ["model", "temperature", "text", "seed", "policy", "unit"]
    both = name[0].merge(name[1], on=keys, suffixes=("_k", "_v"))
    if both.empty:
        raise NotTestableError("no policy was on K alone and on V alone")
    return smaller(both["difference_k"] - both["difference_v"], both["unit"], 0.0)


def models_disagree(tables: Tables) -> Found:
    """For some models the less exact cache is better, for others worse."""
    both = _differences(tables, EIGHT_BITS)
    if both["model"].nunique() < 2:
        raise NotTestableError("it is of several models, and there is one")
    by = both.groupby(["unit", "model"])["difference"].mean().unstack("model").dropna()
    check_enough(len(by), f"{len(by)} chains were run by every model")
    means = by.mean()
    best, worst = means.idxmax(), means.idxmin()
    above, below = (
        np.array([metrics.mean_of(by[model], alternative=side).p for model in by]) for side in ("greater", "less")
    )
    if not np.isfinite([above, below]).all():
        raise NotTestableError("in a model no chain differs, or all by the same")
    # Both signs occur: some model is above 0 and some below, each corrected for having been chosen. Only one does: all are.
    holds = min(1.0, max(above.min(), below.min()) * len(means))
    fails = min(1.0, 2 * min(above.max(), below.max()))
    apart = metrics.mean_of(by[best] - by[worst])
    return Found.of(apart, holds=holds, fails=fails)


_ERRORS = "1,000 and more prompts paired with the control on the source's model (Llama-3.2-1B-Instruct)"
_CHAINS = "10 seeds and more a model, with other seeds of the same precision beside them, on the source's models"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "q8-instructions", ERRORS, "table 1", "8-bit quantisation keeps nearly all of instruction following.",
        "98%", "instructions followed, as a share of the control's", "holds above 90%, does not below",
        _ERRORS, lambda tables: larger_of_intervals(_score(tables, "q8_0", "instructions"), 0.9), if_equal="open",
    ),
    Claim(
        "q4-words", ERRORS, "6.1, table 2", "4-bit quantisation guesses more next words than no quantisation.",
        "115%", "words guessed, as a share of the control's", "holds above 100%, does not below",
        _ERRORS, lambda tables: larger_of_intervals(_score(tables, "q4_0", "next_token"), 1.0), if_equal="open",
    ),
    Claim(
        "uniform-noise", ERRORS, "table 3", "Uniform noise within the value's own size costs instruction following.",
        "83%", "instructions followed, as a share of the control's", "holds below 95%, does not above",
        _ERRORS, lambda tables: smaller_of_intervals(_score(tables, "uniform(-1,1)", "instructions"), 0.95), if_equal="open",
    ),
    Claim(
        "flipped-signs", ERRORS, "5.5, 6.4", "At the same magnitude, errors that flip signs are catastrophic.",
        "", "instructions followed: effect of flipped signs at a matched mean square, as a share",
        "holds below 0, does not above",
        _ERRORS, lambda tables: smaller_of_intervals(_effect(tables, "flips"), 0.0), if_equal="open",
    ),
    Claim(
        "skewed-errors", ERRORS, "5.5", "At the same magnitude, errors with a mean other than zero are catastrophic.",
        "", "instructions followed: effect of a shifted mean at a matched mean square, as a share",
        "holds below 0, does not above",
        _ERRORS, lambda tables: smaller_of_intervals(_effect(tables, "shift"), 0.0), if_equal="open",
    ),
    Claim(
        "exact-chains", DRIFT, "results", "Chains of restatements keep more of the text with 16 bits than with 8.",
        "17 of 22 models, +0.09", "last similarity under 8 bits less that without a policy, chains paired",
        "holds below 0, does not above", _CHAINS, exact_cache_keeps_more, if_equal="open",
    ),
    Claim(
        "keys-matter", DRIFT, "background, insights", "Keys are more sensitive to low precision than values.",
        "", "last similarity with a policy on K alone less that with it on V alone",
        "holds below 0, does not above", _CHAINS, keys_matter_more, if_equal="open",
    ),
    Claim(
        "not-monotone", DRIFT, "results", "More precision is not better for every model.",
        "+0.62 to -0.36", "effect of 8 bits on the last similarity, the best model's less the worst's",
        "holds where one model is shown to be above 0 and one below, corrected for all models; does not where all have one sign",
        _CHAINS, models_disagree, if_equal="open",
    ),
)  # fmt: skip
