"""How well a number tells beforehand what will happen: whether a decode or a step will flip, say from its margin."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.errors import InputError
from kvinterp.metrics.inference import Column, Test, columns, rate_of
from kvinterp.metrics.statistics import clustered_interval

_CONSTANT = "there is no event, or nothing else"


def roc(score: Column, event: Column) -> pd.DataFrame:
    """The receiver operating characteristic: how many events and how many others lie at or above each threshold.

    Args:
        score: Higher where the event is taken to be likelier.
        event: Whether it came.

    Returns:
        One row a threshold, from none upwards to all: threshold, true_positive_rate, false_positive_rate (NaN where there is no
        event, or nothing else).
    """
    _, number, came = columns(None, ("event",), score=score, event=event)
    thresholds = np.concatenate([[np.inf], np.unique(number)[::-1]])
    rates = {}
    for name, of in (("true_positive_rate", number[came]), ("false_positive_rate", number[~came])):
        below = np.searchsorted(np.sort(of), thresholds, side="left")
        rates[name] = 1 - below / len(of) if len(of) else np.full(len(thresholds), np.nan)
    return pd.DataFrame({"threshold": thresholds, **rates})


def auc(score: Column, event: Column, clusters: Column | None = None, seed: int = 0, resamples: int = 1000) -> Test:
    """The area under that curve: the chance that an event's score is higher than another's, half of it where they are equal.

    Args:
        score: Higher where the event is taken to be likelier.
        event: Whether it came.
        clusters: What each observation belongs to.
        seed: Seeds the interval's resampling.
        resamples: How often whole clusters are resampled.

    Returns:
        p: Mann and Whitney's of no difference, and NaN where clusters have several rows, which that takes as independent.
    """
    names, number, came = columns(clusters, ("event",), score=score, event=event)
    n = len(np.unique(names))
    what, area = ("ROC", n, "area under the curve"), _area(number, came)
    if not np.isfinite(area):
        return Test(*what, why=_CONSTANT)
    independent = np.ptp(number) > 0 and n == len(number)
    p = stats.mannwhitneyu(number[came], number[~came]).pvalue if independent else np.nan
    ends = clustered_interval(_area, names, number, came, seed=seed, resamples=resamples)
    return Test(*what, area * int(came.sum()) * int((~came).sum()), p, area, *ends)


def _area(score: np.ndarray, event: np.ndarray) -> float:
    count = int(event.sum())
    if count in (0, len(event)):
        return np.nan
    return float((stats.rankdata(score)[event].sum() - count * (count + 1) / 2) / (count * (len(event) - count)))


def brier(probability: Column, event: Column, clusters: Column | None = None, seed: int = 0, resamples: int = 1000) -> Test:
    """The mean squared error of predicted chances, and what they tell beyond the overall rate.

    Returns:
        statistic: the Brier score, 0 at best. effect: the skill, 1 less that over the score of predicting the overall rate
        every time: 0 where the prediction tells no more than the rate, below 0 where it tells less.
    """
    names, chance, came = columns(clusters, ("event",), probability=probability, event=event)
    if ((chance < 0) | (chance > 1)).any():
        raise InputError("a predicted chance lies outside 0 to 1: give probabilities.")
    what = ("Brier", len(np.unique(names)), "skill beyond the overall rate")
    if not np.isfinite(skill := _skill(chance, came)):
        return Test(*what, why=_CONSTANT)
    ends = clustered_interval(_skill, names, chance, came, seed=seed, resamples=resamples)
    return Test(*what, np.mean((chance - came) ** 2), np.nan, skill, *ends)


def _skill(chance: np.ndarray, event: np.ndarray) -> float:
    rate = event.mean() * (1 - event.mean()) if len(event) else 0.0
    return float(1 - np.mean((chance - event) ** 2) / rate) if rate else np.nan


def calibration(probability: Column, event: Column, clusters: Column | None = None, bins: int = 10) -> pd.DataFrame:
    """Predicted chances beside how often it came, in classes of equally many observations.

    Returns:
        One row a class: predicted (mean), observed, low, high (95%, see :func:`kvinterp.metrics.rate_of`), rows, n (clusters).
    """
    names, chance, came = columns(clusters, ("event",), probability=probability, event=event)
    if bins < 1:
        raise InputError(f"bins={bins} was given: expected at least 1.")
    place = (
        pd.qcut(chance, bins, labels=False, duplicates="drop") if len(chance) and np.ptp(chance) else np.zeros(len(chance))
    )
    rows = []
    for number in np.unique(place):
        of = place == number
        seen = rate_of(came[of].astype(float), names[of])
        rows.append((chance[of].mean(), seen.effect, seen.low, seen.high, int(of.sum()), seen.n))
    return pd.DataFrame(rows, columns=["predicted", "observed", "low", "high", "rows", "n"])
