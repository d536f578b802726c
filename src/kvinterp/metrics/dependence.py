"""The dependence of one number on another over clustered observations: correlations, slopes and
thirds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy

from kvinterp.errors import InputError
from kvinterp.metrics.inference import Test, welch
from kvinterp.metrics.statistics import Column, clustered_interval, columns, quiet

METHODS = ("pearson", "spearman")


def correlation(
    x: Column,
    y: Column,
    clusters: Column | None = None,
    method: str = "pearson",
    seed: int = 0,
    resamples: int = 1000,
) -> Test:
    """The correlation of two numbers.

    Args:
        x: One number an observation.
        y: The other number.
        clusters: The cluster of each observation.
        method: ``pearson`` or ``spearman``.
        seed: Seeds the interval's resampling.
        resamples: How often whole clusters are resampled.

    Returns:
        statistic: Student's t. p: of the slope of ``y`` on ``x``, which without clusters is the
        usual test of the correlation; with clusters its error allows rows of one cluster to be
        correlated. effect: r.
    """
    if method not in METHODS:
        raise InputError(f"method {method!r} was given: expected {' or '.join(METHODS)}.")
    names, xs, ys = columns(clusters, x=x, y=y)
    what = method, len(np.unique(names))
    if method == "spearman":
        xs, ys = map(scipy.stats.rankdata, (xs, ys))
    if what[1] < 4:
        return Test(*what, why="there are fewer than 4 clusters")
    test = slope(xs, ys, names)
    if test.why:
        return Test(*what, why=test.why)
    # Each resample is ranked again: with resampled ranks of the whole sample 9 in 100 intervals of
    #     12 prompts miss.
    resampled = _rank_r if method == "spearman" else _r
    ends = clustered_interval(resampled, names, xs, ys, seed=seed, resamples=resamples)
    return Test(*what, test.statistic, test.p, _r(xs, ys), *ends)


def restricted_correlation(
    x: Column,
    y: Column,
    clusters: Column | None = None,
    above: float = 0.0,
    method: str = "pearson",
    **options: Any,
) -> Test:
    """The correlation over the observations whose ``x`` is above a bound.

    The FP16 paper calls this a partial correlation. It is not one: leaving out a range of ``x``
    holds nothing constant, and a smaller range alone weakens a correlation.
    """
    names, xs, ys = columns(clusters, x=x, y=y)
    inside = xs > above
    test = correlation(xs[inside], ys[inside], names[inside], method=method, **options)
    return dataclasses.replace(test, name=f"{method} above {above:g}")


def _r(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's r; NaN if one of the two does not vary."""
    design, residuals = np.ones((len(x), 1)), []
    for values in (x, y):
        residual = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
        # Rounding errors are no variation.
        if np.ptp(values) == 0 or np.abs(residual).max() <= 1e-12 * np.abs(values).max():
            return np.nan
        residuals.append(residual)
    first, second = residuals
    return float(np.clip(first @ second / np.sqrt((first @ first) * (second @ second)), -1, 1))


def _rank_r(*numbers: np.ndarray) -> float:
    return _r(*map(scipy.stats.rankdata, numbers))


def slope(x: Column, y: Column, clusters: Column | None = None) -> Test:
    """The slope of ``y`` on ``x`` by least squares, with a constant.

    Args:
        x: One number an observation.
        y: The number that is explained.
        clusters: The cluster of each observation; if one has several, errors within it may be
            correlated (the sandwich of statsmodels' ``cov_type="cluster"``, Student's t with one
            degree of freedom less than there are clusters).
    """
    import statsmodels.api as sm

    names, xs, ys = columns(clusters, x=x, y=y)
    n = len(np.unique(names))
    what = "least squares", n
    if n < 3:
        return Test(*what, why="there are fewer than 3 clusters")
    if not np.isfinite(_r(xs, ys)):
        return Test(*what, why="one of the two does not vary")
    model = sm.OLS(ys, np.column_stack([xs, np.ones(len(xs))]))
    with quiet():
        options: Any = (
            {}
            if n == len(xs)
            else {"cov_type": "cluster", "cov_kwds": {"groups": names}, "use_t": True}
        )
        fit: Any = model.fit(**options)
    return Test(*what, fit.tvalues[0], fit.pvalues[0], fit.params[0], *fit.conf_int()[0])


def terciles(
    order: Column,
    values: Column,
    clusters: Column | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> Test:
    """Compares the mean of a number over the lowest third of another with that over its highest
    third.

    Args:
        order: The number whose thirds are taken.
        values: The number that is averaged.
        clusters: The cluster of each row.
        seed: Seeds the interval's resampling.
        resamples: How often clusters are resampled; the thirds are made anew in each.

    Returns:
        statistic and p: Welch's t of the lowest against the highest third; if clusters have several
        rows, the t of the same difference with errors that are correlated within clusters
        (statsmodels, ``cov_type="cluster"``). effect: the ratio of the two means.
    """
    names, ordered, numbers = columns(clusters, order=order, values=values)
    n = len(np.unique(names))
    what = "lowest against highest third", n
    if n < 6:
        return Test(*what, why="there are fewer than 6 clusters")
    early, late = _thirds(ordered)
    if (early & late).any() or min(early.sum(), late.sum()) < 2:
        return Test(*what, why="the thirds are not apart: too many are equal in what orders them")
    outer = early | late
    if n == len(ordered):
        test = welch(numbers[early], numbers[late])
    else:
        test = slope(early[outer].astype(float), numbers[outer], clusters=names[outer])
    if test.why:
        return Test(*what, why=test.why)
    ends = clustered_interval(
        _ratio_of_thirds, names, ordered, numbers, seed=seed, resamples=resamples
    )
    return Test(*what, test.statistic, test.p, _ratio_of_thirds(ordered, numbers), *ends)


def _thirds(order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.quantile(order, (1 / 3, 2 / 3))
    return order <= low, order >= high


def _ratio_of_thirds(order: np.ndarray, values: np.ndarray) -> float:
    early, late = _thirds(order)
    below = values[late].mean()
    return float(values[early].mean() / below) if below else np.nan
