"""Tests of paired and grouped observations, each with its effect and an interval besides the
p-value.

Every test counts independent units: the decodes of one prompt under several seeds are rows of one
unit, named by ``clusters``. If the data cannot answer (nothing varies, one cluster, no event), the
numbers are NaN and ``why`` gives the reason; impossible arguments raise an InputError. The
arithmetic is scipy's and statsmodels'.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import scipy

from kvinterp.errors import InputError
from kvinterp.metrics.statistics import CONFIDENCE, FEWEST, Column, Interval, columns

CORRECTIONS = ("bonferroni", "holm", "bh")
"""Corrections for several tests."""


@dataclasses.dataclass(frozen=True)
class Test:
    """The result of a test; numbers are NaN if they cannot be computed.

    Attributes:
        name: The name of the test.
        n: How many independent units it rests on, not rows.
        statistic: The statistic of the test.
        p: The p-value, two-sided unless the test says otherwise.
        effect: The size of the effect.
        low: The lower end of the effect's interval, at 95%.
        high: Its upper end.
        why: Why a number is NaN; else empty.
    """

    __test__: ClassVar[bool] = False  # pytest would take it for tests of its own.

    name: str
    n: int
    statistic: Any = np.nan  # Any number; a float once it is made.
    p: Any = np.nan
    effect: Any = np.nan
    low: Any = np.nan
    high: Any = np.nan
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("statistic", "p", "effect", "low", "high"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def named(self, name: str) -> dict[str, float]:
        """The effect under a name, and its interval, as columns of a table."""
        return {name: self.effect, "low": self.low, "high": self.high}


def by_cluster(names: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of each cluster."""
    return np.bincount(names, values) / np.bincount(names)


# Several tests ------------------------------------------------------------------------------------


def corrected(p: Column, method: str = "holm") -> np.ndarray:
    """Corrects p-values for multiple tests; a NaN stays NaN and does not count as a test.

    Args:
        p: The p-values of one family.
        method: ``bonferroni``, ``holm`` (the chance of any false rejection, as Bonferroni but never
            weaker) or ``bh`` (the share of false ones among the rejections, Benjamini and Hochberg
            1995).

    Raises:
        InputError: The method is none of these, or a p-value lies outside 0 to 1.
    """
    if method not in CORRECTIONS:
        raise InputError(
            f"correction {method!r} was given: expected one of {', '.join(CORRECTIONS)}."
        )
    values = np.asarray(p, dtype=np.float64)
    finite = np.isfinite(values)
    if ((values[finite] < 0) | (values[finite] > 1)).any():
        raise InputError("a p-value lies outside 0 to 1: give p-values, not statistics.")
    result = np.full(len(values), np.nan)
    if finite.any():
        result[finite] = _corrected(values[finite], method)
    return result


def _corrected(p: np.ndarray, method: str) -> np.ndarray:
    # Not statsmodels' multipletests: it collects Python's garbage at every call, which takes most
    # of a second with a model.
    if method == "bh":
        return scipy.stats.false_discovery_control(p)
    if method == "bonferroni":
        return np.minimum(1.0, p * len(p))
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(1.0, stepped[np.argsort(order)])


# Pairs --------------------------------------------------------------------------------------------


def mcnemar(a: Column, b: Column) -> Test:
    """McNemar's exact test of whether both paths are right equally often; of clusters with several
    pairs ask :func:`sign_flips`.

    Args:
        a: Whether path a was right, pair by pair; pairs are independent.
        b: Whether path b was right.

    Returns:
        statistic: the pairs of the rarer disagreement. effect: the share right on ``a`` minus that
        on ``b``. Its interval is Clopper and Pearson's for the disagreements, given their number,
        so that it excludes 0 exactly if p is below 0.05. Without a disagreement its ends are the
        upper bound of the share of disagreements.
    """
    _, right_a, right_b = columns(None, ("a", "b"), a=a, b=b)
    n = len(right_a)
    head = "exact McNemar", n
    if not n:
        return Test(*head, why="there are no pairs")
    only_a, only_b = int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    differing = only_a + only_b
    if not differing:
        high = share_of(np.zeros(n)).high
        return Test(*head, 0.0, 1.0, 0.0, -high, high)
    test = scipy.stats.binomtest(only_a, differing)
    low, high = ((2 * end - 1) * differing / n for end in test.proportion_ci(CONFIDENCE, "exact"))
    return Test(*head, min(only_a, only_b), test.pvalue, (only_a - only_b) / n, low, high)


def sign_flips(
    differences: Column, clusters: Column | None = None, seed: int = 0, resamples: int = 4999
) -> Test:
    """The randomisation test that exchanges the two paths, cluster by cluster; valid for any number
    of rows a cluster.

    Args:
        differences: Path a minus path b, row by row.
        clusters: The cluster of each row; its rows are exchanged together, and each cluster counts
            once.
        seed: Seeds the exchanges. If there are at most ``resamples`` exchanges, all are made.
        resamples: The number of random exchanges.

    Returns:
        statistic and effect: the mean of the clusters' mean differences; its interval is that of
            :func:`mean_of`.
    """
    names, values = columns(clusters, differences=differences)
    means = by_cluster(names, values)
    head, effect = ("sign flips by cluster", len(means)), means.mean()
    if len(means) < 2:
        return Test(*head, why="there are fewer than 2 clusters")
    if not means.any():
        return Test(*head, 0.0, 1.0, 0.0, 0.0, 0.0)
    test = scipy.stats.permutation_test(
        (means, np.zeros_like(means)),
        lambda x, y, axis=-1: (x - y).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        random_state=np.random.default_rng(
            seed
        ),  # Called rng from scipy 1.15 on, which takes both.
    )
    ends = mean_of(means)
    return Test(*head, effect, test.pvalue, effect, ends.low, ends.high)


def mean_of(values: Column, clusters: Column | None = None) -> Test:
    """Tests whether a mean is 0, each cluster counting once by its own mean, with the wider of
    Student's and Hall's intervals.

    Student's interval of a skewed score is too short on one side. Hall's corrects it for the
    skewness of the sample, and is too short if the sample shows none. So each end is the wider of
    the two, and p the larger.

    Args:
        values: One number a row.
        clusters: The cluster of each row.

    Returns:
        statistic: Student's. effect: the mean of the clusters' means; both ends NaN for fewer than
        :data:`kvinterp.metrics.FEWEST` of them.

    Source: Hall 1992, Journal of the Royal Statistical Society B 54(1), the cubic transformation.
    """
    names, numbers = columns(clusters, values=values)
    means = by_cluster(names, numbers)
    n = len(means)
    head = "t of cluster means", n
    if n < 2:
        return Test(*head, why="there are fewer than 2 clusters")
    if np.ptp(means) == 0:
        why = "all clusters have the same mean: there is no spread to test it against"
        return Test(*head, effect=means[0], why=why)
    test: Any = scipy.stats.ttest_1samp(means, 0.0)
    p, low, high = test.pvalue, np.nan, np.nan
    if n >= FEWEST:
        mean, deviation, skew = (
            means.mean(),
            means.std(ddof=1),
            float(scipy.stats.skew(means, bias=False)),
        )
        student_t = scipy.stats.t(n - 1)
        t = _unskewed(mean / deviation, skew, n) * np.sqrt(n)
        p = max(p, 2 * student_t.sf(abs(t)))
        ends = student_t.ppf([(1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2]) / np.sqrt(n)
        student, hall = (
            mean - deviation * quantiles for quantiles in (ends, _skewed(ends, skew, n))
        )
        low, high = min(student[0], hall[0]), max(student[1], hall[1])
    return Test(*head, test.statistic, p, means.mean(), low, high)


def _unskewed(value: float, skew: float, n: int) -> float:
    """Hall's transformation of how many deviations a mean of n lies above a bound."""
    return value + skew * value**2 / 3 + skew**2 * value**3 / 27 + skew / (6 * n)


def _skewed(value: np.ndarray, skew: float, n: int) -> np.ndarray:
    """The inverse of :func:`_unskewed`."""
    if abs(skew) < 1e-6:
        return value
    return (np.cbrt(1 + skew * (value - skew / (6 * n))) - 1) * 3 / skew


# Two groups ---------------------------------------------------------------------------------------


def welch(x: Column, y: Column) -> Test:
    """Welch's test of two groups that are not paired, every observation independent.

    Returns:
        effect: the mean of ``x`` minus that of ``y``.
    """
    (_, xs), (_, ys) = columns(None, x=x), columns(None, y=y)
    head = "Welch", len(xs) + len(ys)
    if min(len(xs), len(ys)) < 2:
        return Test(*head, why="a group has fewer than 2 observations")
    if np.ptp(xs) == np.ptp(ys) == 0:
        return Test(*head, why="nothing varies within the groups")
    test: Any = scipy.stats.ttest_ind(xs, ys, equal_var=False)
    ends = test.confidence_interval(CONFIDENCE)
    return Test(*head, test.statistic, test.pvalue, xs.mean() - ys.mean(), ends.low, ends.high)


# Shares -------------------------------------------------------------------------------------------


def share_of(events: Column) -> Test:
    """The share of events, with Clopper and Pearson's interval, for independent observations.

    kvinterp uses this interval for every share: for 0 of 4 it reaches to 60.2%, for 0 of n to about
    3.7/n.

    Returns:
        statistic: the number of events. p: NaN, since nothing is tested.
    """
    _, happened = columns(None, ("events",), events=events)
    n = len(happened)
    head = "share", n
    if not n:
        return Test(*head, why="there are no observations")
    count = int(happened.sum())
    return Test(*head, count, np.nan, count / n, *clopper_pearson(count, n))


def clopper_pearson(count: int, n: int) -> Interval:
    """The exact interval of a share: to the bit that of scipy's ``binomtest``, without
    ``scipy.stats``, whose import takes as long as the rest of a small comparison.
    """
    tail, ibeta = (1 - CONFIDENCE) / 2, scipy.special.betainc

    def at_least(share: float) -> float:
        return float(ibeta(count, n - count + 1, share)) - tail

    def at_most(share: float) -> float:
        return float(ibeta(n - count, count + 1, 1 - share)) - tail

    root = scipy.optimize.brentq
    low = root(at_least, 0, 1) if count else 0.0
    return Interval(low, root(at_most, 0, 1) if count < n else 1.0)


def rate_of(events: Column, clusters: Column, trials: Column | None = None) -> Test:
    """The rate of events with Korn and Graubard's interval, for rows that are correlated in
    clusters, as steps of a prompt are.

    It is Clopper and Pearson's interval for the effective number of independent trials. (With
    events in one cluster only, the interval of resampled clusters covers the truth in half of all
    studies.)

    Args:
        events: The number of events, row by row.
        clusters: The cluster of each row.
        trials: The number of trials, row by row; by default one a row.

    Raises:
        InputError: A row has no cluster, or more events than trials.

    Returns:
        effect: events by trial. statistic: the effective number of trials. n: clusters; both ends
        NaN for fewer than :data:`kvinterp.metrics.FEWEST`. If no trial, or every trial, has an
        event, each cluster counts as one trial.

    Source: Korn and Graubard 1998, Survey Methodology 24(2).
    """
    trial_counts = np.ones(len(np.asarray(events))) if trials is None else trials
    names, count, tries = columns(clusters, events=events, trials=trial_counts)
    if (names < 0).any() or (count < 0).any() or (count > tries).any():
        raise InputError(
            "a row has no cluster, fewer than 0 events or more events than trials: give events of these trials."
        )
    happened, tried = np.bincount(names, count), np.bincount(names, tries)
    happened, tried = happened[tried > 0], tried[tried > 0]
    n, total = len(tried), tried.sum()
    head = "share in clusters", n
    if not total:
        return Test(*head, why="there are no trials")
    share = happened.sum() / total
    if n < FEWEST:
        return Test(*head, effect=share, why=f"there are fewer than {FEWEST} clusters")
    variance, tail = (
        n / (n - 1) * ((happened - share * tried) ** 2).sum() / total**2,
        (1 - CONFIDENCE) / 2,
    )
    worth = n
    if variance > 0:
        worth = (
            share
            * (1 - share)
            / variance
            * (scipy.special.stdtrit(total - 1, tail) / scipy.special.stdtrit(n - 1, tail)) ** 2
        )
        worth = min(worth, total)
    x = share * worth
    low = scipy.special.betaincinv(x, worth - x + 1, tail) if x > 0 else 0.0
    high = scipy.special.betaincinv(x + 1, worth - x, 1 - tail) if x < worth else 1.0
    return Test(*head, worth, np.nan, share, low, high)
