"""When a token flips, and whether that goes with how far the paths are apart or with how sure the model was.

In the free protocol the mean KL of a decode counts the steps after the flip, which are of two texts: an early flip leaves more of
them, so a negative correlation of flip step and mean KL follows from counting. Beside it stand the KL before the flip and the
matched protocol's, which are arithmetic alone, and how well the margin tells the step of a flip.
"""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.metrics.dependence import correlation, restricted_correlation, terciles
from kvinterp.metrics.inference import Test
from kvinterp.metrics.statistics import FEWEST, clustered_interval
from kvinterp.study.behaviour.divergence import DECODE, conditions, with_ends

QUANTITIES = ("mean_kl", "mean_kl_before_flip", "matched_mean_kl", "smallest_margin")
"""What the step of the first flip is held against: the free protocol's KL (the paper's), that of the steps up to the flip, the
matched protocol's, and the smallest margin of the decode."""
FIRST = 1
"""The first step that a cache decides, the first at which a token can flip: the paper's step 0, as ours is the prefill's."""
LEAST = FEWEST
"""Prompts that flip, below which nothing is said of how flips go with a number: resampling so few gives no interval."""

_FEW = f"fewer than {LEAST} prompts have such a flip"

CONDITION = ("model", "strategy")


def boundary_tables(decodes: pd.DataFrame, steps: pd.DataFrame, above: float) -> dict[str, pd.DataFrame]:
    """Every table of the decision boundary.

    Args:
        decodes: As :func:`kvinterp.study.experiments.behaviour.decodes_of` gives them, with the model of each.
        steps: The same.
        above: The second restriction: flips later than this step alone.

    Returns:
        flips; thirds; correlations, of the decodes of all strategies together; and prediction.
    """
    flips = flips_with_kl(decodes)
    return {
        "flips": flips,
        "thirds": terciles_of(flips),
        "correlations": correlations_with_flip(pooled(flips), above),
        "prediction": _prediction(predicted(steps)),
    }


def pooled(table: pd.DataFrame) -> pd.DataFrame:
    """The decodes of all strategies together, each still told apart."""
    return table.assign(seed=table["strategy"] + " " + table["seed"].astype(str), strategy="all")


def flips_with_kl(decodes: pd.DataFrame) -> pd.DataFrame:
    """Every decode that flips, with its KL in both protocols.

    Returns:
        One row a decode: model, strategy, seed, example, id, flip_index, mean_kl (free), mean_kl_before_flip, matched_mean_kl,
        smallest_margin, margin_at_flip, steps.
    """
    free, matched = (decodes[decodes["protocol"] == protocol] for protocol in ("free", "matched"))
    columns = ["id", "flip_index", "mean_kl", "mean_kl_before_flip", "smallest_margin", "margin_at_flip", "steps"]
    # The smallest margin over the whole text that the first path writes, which the free protocol may not have seen to its end.
    apart = matched[[*DECODE, "mean_kl", "smallest_margin"]].rename(columns={"mean_kl": "matched_mean_kl"})
    both = free.drop(columns="smallest_margin").merge(apart, on=DECODE).dropna(subset=["flip_index"])
    return both[[*DECODE, *columns, "matched_mean_kl"]].reset_index(drop=True)


def correlations_with_flip(flips: pd.DataFrame, above: float) -> pd.DataFrame:
    """How the step of the first flip goes with each of :data:`QUANTITIES`, over the decodes that flip.

    Args:
        flips: As :func:`flips_with_kl` gives them.
        above: The step that ``restricted>k`` asks for more than; the paper's 8 is 9 here.

    Returns:
        One row a model, strategy, quantity and method: ``pearson``, ``spearman``, ``restricted>1`` and ``restricted>k`` (what
        the paper calls partial: without the flips of the first cached step, and of the first steps), and ``partial``, with
        the smallest margin held constant (of the margin: the matched KL).
        value, low, high, p, n (decodes), n_prompts, why (there is none).
    """
    rows = []
    for labels, group in conditions(flips, *CONDITION):
        for quantity in QUANTITIES:
            covariate = "matched_mean_kl" if quantity == "smallest_margin" else "smallest_margin"
            finite = group[np.isfinite(group[[quantity, covariate]].astype(float)).all(axis=1)]
            x, y, names = finite["flip_index"], finite[quantity], finite["example"]
            whole = functools.partial(correlation, x, y, names)
            tests = [("pearson", -1.0, whole), ("spearman", -1.0, functools.partial(whole, method="spearman"))]
            for bound in (float(FIRST), float(above)):
                later = functools.partial(restricted_correlation, x, y, names, bound)
                tests.append((f"restricted>{bound:g}", bound, later))
            tests.append(("partial", -1.0, functools.partial(whole, finite[covariate])))
            for method, bound, ask in tests:
                few = names[x > bound].nunique()
                test = ask() if few >= LEAST else Test(method, few, "r", why=f"{_FEW} ({few})")
                numbers = (*_numbers(test), int((x > bound).sum()), test.n, test.why)
                rows.append((*labels.values(), quantity, method, *numbers))
    names = ["model", "strategy", "quantity", "method", "value", "low", "high", "p", "n", "n_prompts", "why"]
    return pd.DataFrame(rows, columns=names)


def terciles_of(flips: pd.DataFrame) -> pd.DataFrame:
    """The mean of each of :data:`QUANTITIES` over the earliest third of the flips, against the latest.

    Returns:
        One row a model, strategy and quantity: ratio of the two means, low, high, p (Welch), n (decodes), n_prompts, why.
    """
    rows = []
    for labels, group in conditions(flips, *CONDITION):
        for quantity in QUANTITIES:
            finite = group.dropna(subset=[quantity])
            columns, few = (finite["flip_index"], finite[quantity], finite["example"]), finite["example"].nunique()
            test = terciles(*columns) if few >= LEAST else Test("thirds", few, "ratio", why=f"{_FEW} ({few})")
            rows.append((*labels.values(), quantity, *_numbers(test), len(finite), test.n, test.why))
    return pd.DataFrame(
        rows, columns=["model", "strategy", "quantity", "ratio", "low", "high", "p", "n", "n_prompts", "why"]
    )


def predicted(steps: pd.DataFrame) -> pd.DataFrame:
    """Every step at risk of a first flip, with the chance that follows from its margin and the logits' noise: ``predicted``.

    Were the errors of the two highest logits independent and normal with a root mean square of s, the greedy token would flip
    with probability Phi(-margin / (s sqrt 2)). s is that of the other examples' steps of the model, matched, so that nothing is
    predicted from itself. Of a drawn token it is the chance that the greedy one would flip, which is something else.

    Args:
        steps: As :func:`kvinterp.study.experiments.behaviour.decodes_of` gives them, with the model of each.
    """
    matched = steps[(steps["protocol"] == "matched") & (steps["step"] > 0)].rename(columns={"margin_a": "margin"})
    parts = []
    for _, group in matched.groupby("model", sort=False):
        squares = (group["rms_logit"] ** 2).groupby(group["example"]).agg(["sum", "count"])
        others_squares = (squares.sum() - squares).clip(lower=0)
        scale = group["example"].map(
            np.sqrt(2 * others_squares["sum"] / others_squares["count"].where(others_squares["count"] > 0))
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            chance = stats.norm.cdf(-group["margin"] / scale)
        # Without noise nothing flips but what is equal.
        parts.append(group.assign(predicted=np.where(scale > 0, chance, 0.5 * (group["margin"] == 0))))
    at_risk = pd.concat(parts)
    return at_risk[~at_risk["after_flip"]].reset_index(drop=True)


def _prediction(steps: pd.DataFrame) -> pd.DataFrame:
    """How well the margin tells which step flips, and how many the chance foretells.

    Returns:
        One row a model and strategy: auc (the chance that the margin at a flip is smaller than elsewhere) with auc_low,
        auc_high; foretold (the sum of the chances) beside flips; n (examples), steps, margin_at_flip and margin_elsewhere
        (medians, logits).
        No interval where fewer than :data:`LEAST` examples flip.
    """
    rows = []
    for labels, group in conditions(steps, *CONDITION):
        columns = group["margin"].to_numpy(float), group["flipped"].to_numpy(bool)
        few = group.loc[group["flipped"], "example"].nunique() < LEAST
        low, high = (np.nan, np.nan) if few else clustered_interval(_area, group["example"].to_numpy(), *columns)
        medians = group.groupby("flipped")["margin"].median()
        rows.append(
            labels
            | with_ends("auc", _area(*columns), low, high)
            | {"foretold": float(group["predicted"].sum())}
            | {"n": group["example"].nunique(), "steps": len(group), "flips": int(group["flipped"].sum())}
            | {"margin_at_flip": medians.get(True, np.nan), "margin_elsewhere": medians.get(False, np.nan)}
        )
    return pd.DataFrame(rows)


def _area(margin: np.ndarray, flipped: np.ndarray) -> float:
    """Mann and Whitney's U as a share; NaN where all steps flip, or none."""
    flips = int(flipped.sum())
    if flips in (0, len(flipped)):
        return float("nan")
    above = stats.mannwhitneyu(margin[~flipped], margin[flipped]).statistic
    return float(above / (flips * (len(flipped) - flips)))


def _numbers(test: Test) -> tuple[float, ...]:
    """Its effect, the ends of its interval, and p."""
    return test.effect, test.low, test.high, test.p
