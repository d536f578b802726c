"""How well a number tells beforehand what will happen: whether a decode or a step will flip, say from its margin."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.errors import InputError
from kvinterp.metrics.inference import Column, Test, columns, flags, nothing, rate_of
from kvinterp.metrics.statistics import clustered_interval


def roc(score: Column, event: Column) -> pd.DataFrame:
    """The receiver operating characteristic: how many events and how many others lie at or above each threshold.

    Args:
        score: Higher where the event is taken to be likelier.
        event: Whether it came.

    Returns:
        One row a threshold, from none upwards to all: threshold, true_positive_rate, false_positive_rate (NaN where there is no
        event, or nothing else).
    """
    (_, number), (_, came) = columns(None, score=score), flags(None, event=event)
    _same_length(number, came)
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
    names, number = columns(clusters, score=score)
    _, came = flags(None, event=event)
    _same_length(number, came)
    said, n = ("ROC", "area under the curve"), len(np.unique(names))
    area = _area(number, came)
    if not np.isfinite(area):
        return nothing(said[0], n, said[1], "there is no event, or nothing else")
    test = stats.mannwhitneyu(number[came], number[~came]) if np.ptp(number) > 0 else None
    p = float(test.pvalue) if test is not None and n == len(number) else float("nan")
    low, high = clustered_interval(_area, names, number, came, seed=seed, resamples=resamples)
    statistic = area * int(came.sum()) * int((~came).sum())
    return Test(said[0], n, statistic, p, area, low, high, said[1])


def _area(score: np.ndarray, event: np.ndarray) -> float:
    count = int(event.sum())
    if count in (0, len(event)):
        return float("nan")
    return float((stats.rankdata(score)[event].sum() - count * (count + 1) / 2) / (count * (len(event) - count)))


def brier(probability: Column, event: Column, clusters: Column | None = None, seed: int = 0, resamples: int = 1000) -> Test:
    """The mean squared error of predicted chances, and what they tell beyond the overall rate.

    Returns:
        statistic: the Brier score, 0 at best. effect: the skill, 1 less that over the score of predicting the overall rate
        every time: 0 where the prediction tells no more than the rate, below 0 where it tells less.
    """
    names, chance = columns(clusters, probability=probability)
    _, came = flags(None, event=event)
    _same_length(chance, came)
    if ((chance < 0) | (chance > 1)).any():
        raise InputError("a predicted chance lies outside 0 to 1: give probabilities.")
    said, n = ("Brier", "skill beyond the overall rate"), len(np.unique(names))
    if not np.isfinite(skill := _skill(chance, came)):
        return nothing(said[0], n, said[1], "there is no event, or nothing else")
    low, high = clustered_interval(_skill, names, chance, came, seed=seed, resamples=resamples)
    return Test(said[0], n, float(np.mean((chance - came) ** 2)), float("nan"), skill, low, high, said[1])


def _skill(chance: np.ndarray, event: np.ndarray) -> float:
    rate = event.mean() * (1 - event.mean()) if len(event) else 0.0
    return float(1 - np.mean((chance - event) ** 2) / rate) if rate else float("nan")


def calibration(probability: Column, event: Column, clusters: Column | None = None, bins: int = 10) -> pd.DataFrame:
    """Predicted chances beside how often it came, in classes of equally many observations.

    Returns:
        One row a class: predicted (mean), observed, low, high (95%, see :func:`kvinterp.metrics.rate_of`), rows, n (clusters).
    """
    names, chance = columns(clusters, probability=probability)
    _, came = flags(None, event=event)
    _same_length(chance, came)
    if bins < 1:
        raise InputError(f"bins={bins} was given: expected at least 1.")
    if not len(chance):
        return pd.DataFrame(columns=["predicted", "observed", "low", "high", "rows", "n"])
    place = pd.qcut(chance, bins, labels=False, duplicates="drop") if np.ptp(chance) else np.zeros(len(chance))
    rows = []
    for number in np.unique(place):
        of = place == number
        seen = rate_of(came[of].astype(float), names[of])
        rows.append((chance[of].mean(), seen.effect, seen.low, seen.high, int(of.sum()), seen.n))
    return pd.DataFrame(rows, columns=["predicted", "observed", "low", "high", "rows", "n"])


def _same_length(number: np.ndarray, event: np.ndarray) -> None:
    if len(number) != len(event):
        raise InputError(f"got {len(number)} scores and {len(event)} events: give one of each for every observation.")
