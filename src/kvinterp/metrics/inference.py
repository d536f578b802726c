"""Tests of paired and grouped observations, each with its effect and an interval: what a p-value alone does not say.

Every test counts the units that are independent of each other: the decodes of one prompt under several seeds are rows of one
unit, named by ``clusters``. Where data cannot answer (nothing varies, one cluster, no event) the numbers are NaN and ``why``
says it; arguments that no data could make right raise an InputError. The arithmetic is scipy's and statsmodels'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.errors import InputError, NonFiniteError
from kvinterp.metrics.statistics import FEWEST

Column: TypeAlias = Sequence[Any] | np.ndarray | pd.Series | pd.Index
"""One number, flag or name for each observation."""
CORRECTIONS = ("bonferroni", "holm", "bh")
"""Corrections for several tests."""


@dataclasses.dataclass(frozen=True)
class Test:
    """What a test found; numbers are NaN where there are none.

    Attributes:
        name: The test's.
        n: Independent units that it rests on, not rows.
        effect_of: What the effect is.
        statistic: The test's own.
        p: Two-sided unless the test says otherwise.
        effect: How large it is, in the unit that ``effect_of`` names.
        low: The lower end of the effect's 95% interval (or of another confidence that was asked for).
        high: Its upper end.
        why: Why there is no number, where there is none.
    """

    __test__: ClassVar[bool] = False  # pytest would take it for tests of its own.

    name: str
    n: int
    effect_of: str
    statistic: Any = np.nan  # Any number; a float once it is made.
    p: Any = np.nan
    effect: Any = np.nan
    low: Any = np.nan
    high: Any = np.nan
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("statistic", "p", "effect", "low", "high"):
            object.__setattr__(self, name, float(getattr(self, name)))


def columns(clusters: Column | None, flags: Sequence[str] = (), **given: Column) -> tuple[np.ndarray, ...]:
    """Cluster names, then what was given as numbers, all of one length.

    Args:
        clusters: What each observation belongs to; each its own where it is None.
        flags: Those that are yes or no.
        given: Numbers or flags by what they are called.

    Raises:
        InputError: The lengths differ, or a flag is neither 0 nor 1.
        NonFiniteError: One is NaN or infinite.
    """
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in given.items()}
    count = len(next(iter(arrays.values())))
    names = np.arange(count) if clusters is None else pd.factorize(np.asarray(clusters))[0]
    lengths = {**{name: len(array) for name, array in arrays.items()}, "clusters": len(names)}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{size} {name}" for name, size in lengths.items())
        raise InputError(f"got {told}: give one of each for every observation.")
    for name, array in arrays.items():
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            raise NonFiniteError(
                f"{bad.size} of {array.size} {name} are NaN or infinite, the first at index {bad[0]}: leave those "
                "observations out, and say how many they were."
            )
        if name in flags:
            if not np.isin(array, (0, 1)).all():
                raise InputError(f"{name} holds other values than true and false: give one flag for every observation.")
            arrays[name] = array.astype(bool)
    return names, *arrays.values()


def by_cluster(names: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of each cluster."""
    return np.bincount(names, values) / np.bincount(names)


# Several tests ---------------------------------------------------------------------------------------------------------


def corrected(p: Column, method: str = "holm") -> np.ndarray:
    """p-values corrected for being several; a NaN stays NaN and counts as no test.

    Args:
        p: The p-values of one family.
        method: ``bonferroni``, ``holm`` (the chance of any false rejection, as Bonferroni but never weaker) or ``bh`` (the
            share of false ones among the rejections, Benjamini and Hochberg 1995).

    Raises:
        InputError: The method is none of these, or a p-value lies outside 0 to 1.
    """
    if method not in CORRECTIONS:
        raise InputError(f"correction {method!r} was given: expected one of {', '.join(CORRECTIONS)}.")
    values = np.asarray(p, dtype=np.float64)
    known = np.isfinite(values)
    if ((values[known] < 0) | (values[known] > 1)).any():
        raise InputError("a p-value lies outside 0 to 1: give p-values, not statistics.")
    found = np.full(len(values), np.nan)
    if known.any():
        found[known] = _corrected(values[known], method)
    return found


def _corrected(p: np.ndarray, method: str) -> np.ndarray:
    # Not statsmodels' multipletests, which collects Python's garbage at every call: most of a second beside a loaded model.
    if method == "bh":
        return stats.false_discovery_control(p)
    if method == "bonferroni":
        return np.minimum(1.0, p * len(p))
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(1.0, stepped[np.argsort(order)])


# Pairs -----------------------------------------------------------------------------------------------------------------


def mcnemar(a: Column, b: Column, clusters: Column | None = None, confidence: float = 0.95) -> Test:
    """McNemar's exact test that both of a pair are right equally often.

    Args:
        a: Whether one path was right, pair by pair.
        b: Whether the other was.
        clusters: What a pair belongs to; each must be its own.
        confidence: Of the interval.

    Returns:
        statistic: the pairs of the rarer disagreement. effect: the share right on ``a`` less that on ``b``. Its interval is
        Clopper and Pearson's for the disagreements, given how many there are, so that 0 lies outside exactly where p is below
        1 - confidence; without a disagreement it reaches as far as disagreements may be common that were never seen.

    Raises:
        InputError: Several pairs belong to one cluster: they are not independent, and the test takes them to be.
    """
    names, one, other = columns(clusters, ("a", "b"), a=a, b=b)
    n = len(one)
    what = ("exact McNemar", n, "difference of the shares that are right")
    if len(np.unique(names)) < n:
        raise InputError(
            f"McNemar's test takes every pair as independent, and {n} pairs come from {len(np.unique(names))} clusters: give one "
            "pair a cluster, or ask sign_flips."
        )
    if not n:
        return Test(*what, why="there are no pairs")
    only_a, only_b = int((one & ~other).sum()), int((other & ~one).sum())
    differing = only_a + only_b
    if not differing:
        high = share_of(np.zeros(n), confidence).high
        return Test(*what, 0.0, 1.0, 0.0, -high, high)
    found = stats.binomtest(only_a, differing)
    low, high = ((2 * end - 1) * differing / n for end in found.proportion_ci(confidence, "exact"))
    return Test(*what, float(min(only_a, only_b)), found.pvalue, (only_a - only_b) / n, low, high)


def sign_flips(
    differences: Column, clusters: Column | None = None, seed: int = 0, resamples: int = 4999, confidence: float = 0.95
) -> Test:
    """The randomisation test that exchanges the two paths, cluster by cluster: right for any number of rows a cluster.

    Args:
        differences: One path less the other, row by row.
        clusters: What each row belongs to; a cluster's rows are exchanged together, and each cluster counts once.
        seed: Seeds the exchanges; every one is made where there are no more than ``resamples``.
        resamples: How many, for more clusters.
        confidence: Of the interval, which is Student's for the clusters' means.

    Returns:
        statistic and effect: the mean of the clusters' mean differences.
    """
    names, values = columns(clusters, differences=differences)
    means = by_cluster(names, values)
    what, effect = ("sign flips by cluster", len(means), "mean difference"), means.mean()
    if len(means) < 2:
        return Test(*what, why="there are fewer than 2 clusters")
    if not means.any():
        return Test(*what, 0.0, 1.0, 0.0, 0.0, 0.0)
    found = stats.permutation_test(
        (means, np.zeros_like(means)),
        lambda x, y, axis=-1: (x - y).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        random_state=np.random.default_rng(seed),  # Called rng from scipy 1.15 on, which takes both.
    )
    ends = mean_of(means, confidence=confidence)
    return Test(*what, effect, found.pvalue, effect, ends.low, ends.high)


def mean_of(
    values: Column,
    clusters: Column | None = None,
    against: float = 0.0,
    alternative: str = "two-sided",
    confidence: float = 0.95,
) -> Test:
    """A test of a mean, each cluster counting once by its own mean: the more careful of Student's and Hall's.

    Student's interval of a skewed score is too short on one side. Hall's corrects it for the skewness of the sample, and is too
    short where there is none to be seen; the wider end of the two is given, and the larger p.

    Args:
        values: One number a row.
        clusters: What each row belongs to.
        against: The mean to be tested against.
        alternative: ``two-sided``, or ``greater`` or ``less`` than that.
        confidence: Of the interval, which is two-sided whatever the alternative.

    Returns:
        statistic: Student's. effect: the mean of the clusters' means; both ends NaN for fewer than
        :data:`kvinterp.metrics.FEWEST` of them.

    Source: Hall 1992, Journal of the Royal Statistical Society B 54(1), the cubic transformation.
    """
    names, numbers = columns(clusters, values=values)
    means = by_cluster(names, numbers)
    n = len(means)
    what = ("t of cluster means", n, "mean")
    if n < 2:
        return Test(*what, why="there are fewer than 2 clusters")
    if np.ptp(means) == 0:
        why = "all clusters have the same mean: there is no spread to test it against"
        return Test(*what, effect=means[0], why=why)
    found: Any = stats.ttest_1samp(means, against, alternative=alternative)
    p, low, high = found.pvalue, np.nan, np.nan
    if n >= FEWEST:
        mean, deviation, skew = means.mean(), means.std(ddof=1), float(stats.skew(means, bias=False))
        of = stats.t(n - 1)
        t = _unskewed((mean - against) / deviation, skew, n) * np.sqrt(n)
        p = max(p, {"two-sided": 2 * of.sf(abs(t)), "greater": of.sf(t), "less": of.cdf(t)}[alternative])
        ends = of.ppf([(1 + confidence) / 2, (1 - confidence) / 2]) / np.sqrt(n)
        student, hall = (mean - deviation * each for each in (ends, _skewed(ends, skew, n)))
        low, high = min(student[0], hall[0]), max(student[1], hall[1])
    return Test(*what, found.statistic, p, means.mean(), low, high)


def _unskewed(value: float, skew: float, n: int) -> float:
    """Hall's transformation of how many deviations a mean of n lies above a bound."""
    return value + skew * value**2 / 3 + skew**2 * value**3 / 27 + skew / (6 * n)


def _skewed(value: np.ndarray, skew: float, n: int) -> np.ndarray:
    """Its inverse."""
    if abs(skew) < 1e-6:
        return value
    return (np.cbrt(1 + skew * (value - skew / (6 * n))) - 1) * 3 / skew


# Two groups ------------------------------------------------------------------------------------------------------------


def welch(x: Column, y: Column, confidence: float = 0.95) -> Test:
    """Welch's test of two groups that are not paired, every observation independent.

    Returns:
        effect: the mean of ``x`` less that of ``y``.
    """
    (_, one), (_, other) = columns(None, x=x), columns(None, y=y)
    what = ("Welch", len(one) + len(other), "difference of the means")
    if min(len(one), len(other)) < 2:
        return Test(*what, why="a group has fewer than 2 observations")
    if np.ptp(one) == np.ptp(other) == 0:
        return Test(*what, why="nothing varies within the groups")
    found: Any = stats.ttest_ind(one, other, equal_var=False)
    ends = found.confidence_interval(confidence)
    return Test(*what, found.statistic, found.pvalue, one.mean() - other.mean(), ends.low, ends.high)


# Shares ----------------------------------------------------------------------------------------------------------------


def share_of(events: Column, confidence: float = 0.95) -> Test:
    """How often something happened, with Clopper and Pearson's interval; every observation independent.

    The one interval of a share, and of a count of 0, that kvinterp has: of 0 in 4 it reaches to 60.2%, of 0 in n to about 3.7/n.

    Returns:
        statistic: how many there were. p: NaN, since nothing is tested.
    """
    _, happened = columns(None, ("events",), events=events)
    n = len(happened)
    what = ("share", n, "share of the observations")
    if not n:
        return Test(*what, why="there are no observations")
    count = int(happened.sum())
    ends = stats.binomtest(count, n).proportion_ci(confidence, "exact")
    return Test(*what, float(count), np.nan, count / n, float(ends.low), float(ends.high))


def rate_of(events: Column, clusters: Column, trials: Column | None = None, confidence: float = 0.95) -> Test:
    """How often something happened where rows of a cluster go together, as steps of a prompt do: Korn and Graubard's interval.

    It is Clopper and Pearson's of as many independent trials as these are worth: resampled clusters of which one alone has an
    event give an interval that holds the truth in one of two studies.

    Args:
        events: How many there were, row by row.
        clusters: What each row belongs to.
        trials: Of how many; one a row unless given.
        confidence: Of the interval.

    Raises:
        InputError: A row has no cluster, or more events than trials, or the confidence is not between 0 and 1.

    Returns:
        effect: events by trial. statistic: the trials that they are worth. n: clusters; both ends NaN for fewer than
        :data:`kvinterp.metrics.FEWEST`. Of no event, or of nothing else, every cluster counts as one trial.

    Source: Korn and Graubard 1998, Survey Methodology 24(2).
    """
    if not 0 < confidence < 1:
        raise InputError(f"confidence {confidence} is not between 0 and 1: give a share such as 0.95.")
    each = np.ones(len(np.asarray(events))) if trials is None else trials
    names, count, of = columns(clusters, events=events, trials=each)
    if (names < 0).any() or (count < 0).any() or (count > of).any():
        raise InputError(
            "a row has no cluster, fewer than 0 events or more events than trials: give events of these trials."
        )
    happened, tried = np.bincount(names, count), np.bincount(names, of)
    happened, tried = happened[tried > 0], tried[tried > 0]
    n, total = len(tried), float(tried.sum())
    what = ("share in clusters", n, "events by trial")
    if not total:
        return Test(*what, why="there are no trials")
    share = float(happened.sum()) / total
    if n < FEWEST:
        return Test(*what, effect=share, why=f"there are fewer than {FEWEST} clusters")
    variance, tail = n / (n - 1) * ((happened - share * tried) ** 2).sum() / total**2, (1 - confidence) / 2
    worth = float(n)
    if variance > 0:
        worth = share * (1 - share) / variance * (stats.t.ppf(tail, total - 1) / stats.t.ppf(tail, n - 1)) ** 2
        worth = min(worth, total)
    x = share * worth
    low = stats.beta.ppf(tail, x, worth - x + 1) if x > 0 else 0.0
    high = stats.beta.ppf(1 - tail, x + 1, worth - x) if x < worth else 1.0
    return Test(*what, worth, np.nan, share, low, high)
