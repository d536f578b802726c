"""How one number goes with another over observations that come in clusters: correlations, slopes, and odds by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from kvinterp.errors import InputError
from kvinterp.metrics.inference import Column, Test, columns, welch
from kvinterp.metrics.statistics import clustered_interval, quiet

METHODS = ("pearson", "spearman")


def correlation(
    x: Column,
    y: Column,
    clusters: Column | None = None,
    *given: Column,
    method: str = "pearson",
    seed: int = 0,
    resamples: int = 1000,
) -> Test:
    """The correlation of two numbers; a partial one where others are given, which are taken out of both.

    Args:
        x: One number an observation.
        y: The other.
        clusters: What each observation belongs to.
        given: What is held constant: the correlation is that of what two linear regressions on these leave. Spearman's takes
            ranks first.
        method: ``pearson`` or ``spearman``.
        seed: Seeds the interval's resampling.
        resamples: How often whole clusters are resampled.

    Returns:
        statistic: Student's t. p: of the slope of ``y`` on ``x`` beside what is given, which without clusters is the usual
        test of the correlation; with them its error lets rows of one cluster be correlated. effect: r.
    """
    if method not in METHODS:
        raise InputError(f"method {method!r} was given: expected {' or '.join(METHODS)}.")
    names, one, other, *held = _beside(clusters, x, y, given)
    n = len(np.unique(names))
    what = (f"{'partial ' * bool(held)}{method}", n, "r")
    if method == "spearman":
        one, other, *held = (stats.rankdata(each) for each in (one, other, *held))
    if n < 4 + len(held):
        return Test(*what, why=f"there are fewer than {4 + len(held)} clusters")
    if not np.isfinite(r := _r(one, other, *held)):
        return Test(*what, why="one of the two does not vary")
    test = slope(one, other, names, *held)
    # Ranks are of the sample they are taken in: with those of the whole one, resampled, 9 in 100 intervals of 12 prompts miss.
    resampled = _rank_r if method == "spearman" else _r
    ends = clustered_interval(resampled, names, one, other, *held, seed=seed, resamples=resamples)
    return Test(*what, test.statistic, test.p, r, *ends, test.why)


def _beside(clusters: Column | None, x: Column, y: Column, given: Sequence[Column]) -> tuple[np.ndarray, ...]:
    return columns(clusters, (), x=x, y=y, **{f"given_{at}": each for at, each in enumerate(given)})


def restricted_correlation(
    x: Column, y: Column, clusters: Column | None = None, above: float = 0.0, method: str = "pearson", **how: Any
) -> Test:
    """The correlation over those observations alone whose ``x`` is above a bound.

    The FP16 paper calls this a partial correlation. It is none: leaving out a range of ``x`` holds nothing constant, and a
    smaller range by itself makes a correlation weaker.
    """
    names, one, other = columns(clusters, x=x, y=y)
    kept = one > above
    found = correlation(one[kept], other[kept], names[kept], method=method, **how)
    return dataclasses.replace(found, name=f"{method} above {above:g}")


def _r(x: np.ndarray, y: np.ndarray, *given: np.ndarray) -> float:
    """Pearson's r of what is left of both beside a constant and what is given; NaN where nothing is left."""
    design = np.column_stack([np.ones(len(x)), *given])
    left = []
    for values in (x, y):
        rest = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
        # What rounding leaves of a number that is explained whole is no variation.
        if np.ptp(values) == 0 or np.abs(rest).max() <= 1e-12 * np.abs(values).max():
            return np.nan
        left.append(rest)
    return float(np.clip(left[0] @ left[1] / np.sqrt((left[0] @ left[0]) * (left[1] @ left[1])), -1, 1))


def _rank_r(*numbers: np.ndarray) -> float:
    return _r(*(stats.rankdata(each) for each in numbers))


def slope(x: Column, y: Column, clusters: Column | None = None, *given: Column) -> Test:
    """The slope of ``y`` on ``x`` by least squares, beside a constant and what is given.

    Args:
        x: One number an observation.
        y: What is explained.
        clusters: What each observation belongs to; where one has several, errors within it may be correlated (the sandwich
            of statsmodels' ``cov_type="cluster"``, Student's t with one degree of freedom less than there are clusters).
        given: Further numbers beside ``x``.
    """
    import statsmodels.api as sm

    names, one, other, *held = _beside(clusters, x, y, given)
    n = len(np.unique(names))
    what = ("least squares", n, "slope")
    if n < 3 + len(held):
        return Test(*what, why=f"there are fewer than {3 + len(held)} clusters")
    if not np.isfinite(_r(one, other, *held)):
        return Test(*what, why="one of the two does not vary")
    model = sm.OLS(other, np.column_stack([one, np.ones(len(one)), *held]))
    with quiet():
        how: Any = {} if n == len(one) else {"cov_type": "cluster", "cov_kwds": {"groups": names}, "use_t": True}
        found: Any = model.fit(**how)
    return Test(*what, found.tvalues[0], found.pvalues[0], found.params[0], *found.conf_int()[0])


def terciles(order: Column, values: Column, clusters: Column | None = None, seed: int = 0, resamples: int = 1000) -> Test:
    """The mean of a number over the lowest third of another, against that over its highest third.

    Args:
        order: What the thirds are of.
        values: What is averaged.
        clusters: What each row belongs to.
        seed: Seeds the interval's resampling.
        resamples: How often clusters are resampled; the thirds are made anew in each.

    Returns:
        statistic and p: Welch's t of the lowest against the highest third; where clusters have several rows, the t of the same
        difference with errors that are correlated within clusters (statsmodels, ``cov_type="cluster"``). effect: the ratio of
        the two means.
    """
    names, place, numbers = columns(clusters, order=order, values=values)
    n = len(np.unique(names))
    what = ("lowest against highest third", n, "ratio of the means")
    if n < 6:
        return Test(*what, why="there are fewer than 6 clusters")
    early, late = _thirds(place)
    if (early & late).any() or min(early.sum(), late.sum()) < 2:
        return Test(*what, why="the thirds are not apart: too many are equal in what orders them")
    kept = early | late
    if n == len(place):
        test = welch(numbers[early], numbers[late])
    else:
        test = slope(early[kept].astype(float), numbers[kept], clusters=names[kept])
    if test.why:
        return Test(*what, why=test.why)
    ends = clustered_interval(_ratio_of_thirds, names, place, numbers, seed=seed, resamples=resamples)
    return Test(*what, test.statistic, test.p, _ratio_of_thirds(place, numbers), *ends)


def _thirds(order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.quantile(order, (1 / 3, 2 / 3))
    return order <= low, order >= high


def _ratio_of_thirds(order: np.ndarray, values: np.ndarray) -> float:
    early, late = _thirds(order)
    below = values[late].mean()
    return float(values[early].mean() / below) if below else np.nan
