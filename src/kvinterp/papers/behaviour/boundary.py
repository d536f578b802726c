"""When a token flips, and whether that goes with how far the paths are apart or with how sure the
model was.

In the free protocol the mean KL of a decode counts the steps after the flip, which are of two
texts: an early flip leaves more of them, so a negative correlation of flip step and mean KL follows
from counting. Beside it stand the KL before the flip and the matched protocol's, which are
arithmetic alone, and how well the margin tells the step of a flip.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pandas as pd

from kvinterp.metrics.dependence import restricted_correlation, terciles
from kvinterp.metrics.inference import Test
from kvinterp.metrics.statistics import FEWEST, typical
from kvinterp.papers.behaviour.divergence import DECODE, conditions, with_ends

QUANTITIES = ("mean_kl", "matched_mean_kl")
"""What the step of the first flip is held against: the free protocol's KL (the paper's) and the
matched protocol's.
"""
METHODS = {"pearson": -1.0, "spearman": -1.0, "restricted>1": 1.0, "restricted>9": 9.0}
"""Correlations, and the step that a flip must be later than: step 1, the first that a cache
decides, is the paper's step 0.
"""

CONDITION = ("model", "strategy")


def boundary_tables(decodes: pd.DataFrame, steps: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table of the decision boundary.

    Args:
        decodes: As :func:`kvinterp.papers.studies.behaviour.decodes_of` gives them, with the model
            of each.
        steps: The same.

    Returns:
        flips; thirds; correlations, of the decodes of all strategies together; and prediction.
    """
    flips = flips_with_kl(decodes)
    return {
        "flips": flips,
        "thirds": terciles_of(flips),
        "correlations": correlations_with_flip(pooled(flips)),
        "prediction": margins_of(steps),
    }


def pooled(table: pd.DataFrame) -> pd.DataFrame:
    """The decodes of all strategies together, each still told apart."""
    return table.assign(seed=table["strategy"] + " " + table["seed"].astype(str), strategy="all")


def flips_with_kl(decodes: pd.DataFrame) -> pd.DataFrame:
    """Every decode that flips, with its KL in both protocols.

    Returns:
        One row a decode: model, strategy, seed, example, id, flip_index, mean_kl (free),
        mean_kl_before_flip, matched_mean_kl, smallest_margin, margin_at_flip, steps.
    """
    free, matched = (decodes[decodes["protocol"] == protocol] for protocol in ("free", "matched"))
    columns = [
        "id",
        "flip_index",
        "mean_kl",
        "mean_kl_before_flip",
        "smallest_margin",
        "margin_at_flip",
        "steps",
    ]
    # The smallest margin over the whole text that the first path writes, which the free protocol
    # may not have seen to its end.
    apart = matched[[*DECODE, "mean_kl", "smallest_margin"]].rename(
        columns={"mean_kl": "matched_mean_kl"}
    )
    both = (
        free.drop(columns="smallest_margin").merge(apart, on=DECODE).dropna(subset=["flip_index"])
    )
    return both[[*DECODE, *columns, "matched_mean_kl"]].reset_index(drop=True)


def correlations_with_flip(flips: pd.DataFrame) -> pd.DataFrame:
    """The correlation of the step of the first flip with each of :data:`QUANTITIES`, over the
    decodes that flip.

    Args:
        flips: As :func:`flips_with_kl` gives them.

    Returns:
        One row a model, strategy, quantity and method: ``pearson``, ``spearman`` (the paper's check
        of it), ``restricted>1`` and ``restricted>9`` (what the paper calls partial: without the
        flips of the first cached step, and of the first steps). value, low, high, p, n (decodes),
        n_prompts, why (there is none).
    """
    rows = []
    for labels, group in conditions(flips, *CONDITION):
        for quantity, (method, bound) in itertools.product(QUANTITIES, METHODS.items()):
            later = group[group["flip_index"] > bound].dropna(subset=[quantity])
            test = _asked(
                restricted_correlation,
                later,
                quantity,
                bound,
                "spearman" if method == "spearman" else "pearson",
            )
            rows.append(
                (*labels.values(), quantity, method, *_numbers(test), len(later), test.n, test.why)
            )
    return pd.DataFrame(rows, columns=[*CONDITION, "quantity", "method", "value", *_COLUMNS])


def terciles_of(flips: pd.DataFrame) -> pd.DataFrame:
    """The mean of each of :data:`QUANTITIES` over the earliest third of the flips, against the
    latest.

    Returns:
        One row a model, strategy and quantity: ratio of the two means, low, high, p (Welch), n
            (decodes), n_prompts, why.
    """
    rows = []
    for labels, group in conditions(flips, *CONDITION):
        for quantity in QUANTITIES:
            known = group.dropna(subset=[quantity])
            test = _asked(terciles, known, quantity)
            rows.append((*labels.values(), quantity, *_numbers(test), len(known), test.n, test.why))
    return pd.DataFrame(rows, columns=[*CONDITION, "quantity", "ratio", *_COLUMNS])


def margins_of(steps: pd.DataFrame) -> pd.DataFrame:
    """How sure the model was at a first flip, and at the other steps at risk of one.

    Args:
        steps: As :func:`kvinterp.papers.studies.behaviour.decodes_of` gives them, with the model of
            each.

    Returns:
        One row a model and strategy: n (examples), steps, flips, margin_at_flip and
        margin_elsewhere (logits: the medians over the examples of each one's mean, with their ends
        in _low and _high).
    """
    at_risk = steps[(steps["protocol"] == "matched") & (steps["step"] > 0) & ~steps["after_flip"]]
    rows = []
    for labels, group in conditions(at_risk, *CONDITION):
        flips = group["flipped"].astype(bool)
        row = {
            **labels,
            "n": group["example"].nunique(),
            "steps": len(group),
            "flips": int(flips.sum()),
        }
        for name, some in (("margin_at_flip", group[flips]), ("margin_elsewhere", group[~flips])):
            middle = typical(some["margin_a"], some["example"])
            row |= with_ends(name, middle.median, *middle.interval)
        rows.append(row)
    return pd.DataFrame(rows)


_COLUMNS = ("low", "high", "p", "n", "n_prompts", "why")


def _asked(test: Callable[..., Test], flips: pd.DataFrame, quantity: str, *options: Any) -> Test:
    """A test of the step of the flip and a quantity, where enough prompts flip."""
    prompts = flips["example"].nunique()
    # Resampling fewer gives no interval.
    if prompts < FEWEST:
        return Test("", prompts, why=f"fewer than {FEWEST} prompts have such a flip ({prompts})")
    return test(flips["flip_index"], flips[quantity], flips["example"], *options)


def _numbers(test: Test) -> tuple[float, ...]:
    """Its effect, the ends of its interval, and p."""
    return test.effect, test.low, test.high, test.p
