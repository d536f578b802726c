"""Statistics over many steps: these functions bring their input to the host and return Python
numbers.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import scipy
from torch import Tensor

from kvinterp.errors import InputError, NonFiniteError

Column: TypeAlias = Sequence[Any] | np.ndarray | pd.Series | pd.Index | Tensor
"""One number, flag or name for each observation."""
CONFIDENCE = 0.95
"""The share of intervals that should hold the true value."""
FEWEST = 6
"""The fewest independent observations with an interval: five all lie on one side of their median in
6% of samples.
"""
FEWEST_RESAMPLED = 12
"""The fewest clusters for which a resampled interval covers the truth as often as it claims."""


def columns(
    clusters: Column | None, flags: Sequence[str] = (), **variables: Column
) -> tuple[np.ndarray, ...]:
    """Checks columns and returns the numbers of the clusters and then each column as an array.

    Args:
        clusters: The cluster of each observation; None if each is its own.
        flags: The names of the columns that are yes or no.
        variables: Numbers or flags by what they are called.

    Raises:
        InputError: The lengths differ, or a flag is neither 0 nor 1.
        NonFiniteError: A number is NaN or infinite.
    """
    arrays = {
        name: np.asarray(
            values.double().cpu() if isinstance(values, Tensor) else values, dtype=np.float64
        )
        for name, values in variables.items()
    }
    lengths = {name: len(array) for name, array in arrays.items()}
    names = (
        np.arange(max(lengths.values()))
        if clusters is None
        else pd.factorize(np.asarray(clusters))[0]
    )
    lengths["clusters"] = len(names)
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{size} {name}" for name, size in lengths.items())
        raise InputError(f"got {sizes}: give one of each for every observation.")
    for name, array in arrays.items():
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            raise NonFiniteError(
                f"{bad.size} of {array.size} {name} are NaN or infinite, the first at index {bad[0]}: leave those "
                "observations out, and say how many they were."
            )
        if name in flags:
            if not np.isin(array, (0, 1)).all():
                raise InputError(
                    f"{name} holds other values than true and false: give one flag for every observation."
                )
            arrays[name] = array.astype(bool)
    return names, *arrays.values()


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    low: float
    high: float


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings about values that have no number; the caller checks for NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def kl_statistics(
    kl: Column, same_top: Column, top_probability_difference: Column
) -> dict[str, float]:
    """The summary that llama-perplexity prints under ``--kl-divergence``, without its perplexities.

    Differences from ``tools/perplexity/perplexity.cpp`` of llama.cpp: shares and probability
    differences are fractions and not percent, and Δp is of the first path's greedy token and not of
    the text's next one (see :func:`kvinterp.metrics.compare_logits`).

    Args:
        kl: KL divergence in nats at each step.
        same_top: Whether the greedy tokens agree at each step.
        top_probability_difference: Δp at each step.

    Returns:
        ``mean``, ``median``, ``p90``, ``p95``, ``p99``, ``p99.9`` and ``maximum`` of the KL in
        nats, percentiles interpolated linearly as numpy and llama.cpp do; ``same_top``, the share
        of agreeing steps; and ``rms_dp``, the root mean square of Δp.

    Raises:
        InputError: There are no steps, or the inputs differ in length.
        NonFiniteError: A value is NaN or infinite; how many and where the first is.
    """
    named = {
        "KL divergences": kl,
        "top-token agreements": same_top,
        "top probability differences": top_probability_difference,
    }
    _, divergence, agree, difference = columns(None, ("top-token agreements",), **named)
    if not len(divergence):
        raise InputError("there are no KL divergences: give at least one.")
    names = ("median", "p90", "p95", "p99", "p99.9", "maximum")
    percentiles = np.percentile(divergence, (50, 90, 95, 99, 99.9, 100), method="linear")
    return {
        "mean": float(divergence.mean()),
        **{name: float(value) for name, value in zip(names, percentiles, strict=True)},
        "same_top": float(agree.mean()),
        "rms_dp": float(np.sqrt(np.mean(difference**2))),
    }


def mean_error(
    frame: pd.DataFrame, keys: Sequence[str], value: str = "relative_error"
) -> pd.Series:
    """The mean of a column: over all vectors behind the rows of kv_steps or kv_positions, over the
    rows of another table.

    Args:
        frame: A table of a comparison, or some rows of one.
        keys: What to group by.
        value: The column, such as ``"relative_error"`` or ``"ulp_mean"``.
    """
    weights = frame["vectors"] if "vectors" in frame else frame[value].notna()
    groups = [frame[key] for key in keys]
    return (frame[value] * weights).groupby(groups).sum() / weights.groupby(groups).sum()


class Typical(NamedTuple):
    """Typical values of numbers with any distribution.

    Attributes:
        mean: The mean.
        median: The median.
        low, high: The confidence interval of the median, by order statistics.
        zeros: How many numbers are exactly 0.
        n: How many numbers there are, one a cluster.
    """

    mean: float
    median: float
    low: float
    high: float
    zeros: int
    n: int

    @property
    def interval(self) -> Interval:
        """The interval of the median."""
        return Interval(self.low, self.high)


def typical(values: Any, clusters: Any = None) -> Typical:
    """Returns the median of numbers with an interval that is valid for any distribution.

    KL, drift and relative errors spread over orders of magnitude, so one prompt may dominate a
    mean; recoveries are almost all alike. In such cases no interval of a mean has the coverage it
    claims (``benchmarks/calibration.py``). The interval of a median lies between two of the
    numbers, is the same on every scale, and needs no assumption; zeros need no special case.

    Args:
        values: The numbers; NaN is left out.
        clusters: The cluster of each number; each cluster counts once, by its mean. By default each
            number is its own.

    Returns:
        The typical values; both ends of the median's interval NaN for fewer than :data:`FEWEST`.
    """
    numbers = pd.Series(np.asarray(values, dtype=float))
    if clusters is not None:
        numbers = numbers.groupby(np.asarray(clusters)).mean()
    finite = numbers.dropna().to_numpy()
    if not len(finite):
        return Typical(np.nan, np.nan, np.nan, np.nan, 0, 0)
    ordered, ranks = np.sort(finite), _median_ranks(len(finite))
    low, high = (float(ordered[rank]) if 0 <= rank < len(finite) else np.nan for rank in ranks)
    middle = float(np.median(finite))
    return Typical(
        float(finite.mean()),
        middle,
        low,
        high,
        int((finite == 0).sum()),
        len(finite),
    )


@functools.cache
def _median_ranks(n: int) -> tuple[int, int]:
    """The places, among n numbers in order, of the ends of the median's interval; outside of them
    where so few have none. As scipy's ``quantile_test``, without ``scipy.stats``, whose import
    takes as long as the rest of a small comparison.
    """
    tail = (1 - CONFIDENCE) / 2
    below = scipy.special.bdtr(np.arange(n + 1), n, 0.5)
    low = int(np.searchsorted(below, tail)) - 1
    return low, n - int(np.searchsorted(below, tail, side="right"))


def clustered_interval(
    statistic: Callable[..., float],
    clusters: np.ndarray,
    *columns: np.ndarray,
    seed: int = 0,
    resamples: int = 1000,
) -> Interval:
    """Computes the bootstrap interval of a statistic of clustered observations.

    The steps of one prompt, or its decodes under several seeds, are not independent, so whole
    clusters are drawn. A percentile interval of few clusters is too short; its percentiles are
    moved outwards to match Student's quantiles and the divisor n - 1 (the expanded percentile
    interval of Hesterberg 2015, doi:10.1080/00031305.2015.1089789).

    Args:
        statistic: Returns a number of the columns of a resample, or NaN.
        clusters: The cluster of each observation.
        columns: The observations, one number each.
        seed: Seed of the resampling; the same seed gives the same interval.
        resamples: How often to resample.

    Returns:
        The interval over the resamples in which the statistic is a number; both ends NaN for fewer
        than :data:`FEWEST_RESAMPLED` clusters, or where it never is.

    Raises:
        InputError: There are no resamples, or the lengths differ.
    """
    if resamples < 1:
        raise InputError(
            f"{resamples} resamples cannot give an interval: give at least 1, better 1000."
        )
    if any(len(column) != len(clusters) for column in columns):
        lengths = ", ".join(str(len(column)) for column in columns)
        raise InputError(
            f"got {len(clusters)} cluster names and columns of {lengths}: give one name for every number."
        )
    members = [np.flatnonzero(clusters == name) for name in np.unique(clusters)]
    n = len(members)
    if n < FEWEST_RESAMPLED:
        return Interval(np.nan, np.nan)

    draws = np.random.default_rng(seed).integers(n, size=(resamples, n))
    # A statistic may warn of resamples without a value, which are left out below.
    with quiet():
        rows = (np.concatenate([members[number] for number in draw]) for draw in draws)
        values = np.array([statistic(*(column[row] for column in columns)) for row in rows])
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Interval(np.nan, np.nan)
    student_t = scipy.special.stdtrit(n - 1, (1 - CONFIDENCE) / 2)
    tail = scipy.special.ndtr(student_t * np.sqrt(n / (n - 1)))
    return Interval(*np.quantile(finite, (tail, 1 - tail)).tolist())
