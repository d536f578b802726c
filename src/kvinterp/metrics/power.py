"""What a comparison of so many could have found: its power, and the smallest difference that it would likely see."""

from __future__ import annotations

import numpy as np
from scipy import optimize, stats

from kvinterp.errors import InputError, unexpected


def mcnemar_power(n: int, only_a: float, only_b: float, alpha: float = 0.05) -> float:
    """The chance that McNemar's exact test of ``n`` pairs rejects.

    Summed over how many pairs may disagree (binomial) and, given those, over how they fall; no approximation.

    Args:
        n: Independent pairs.
        only_a: The true share of pairs in which one alone is right.
        only_b: And in which the other alone is.
        alpha: The level, after whatever correction: 0.05 / 9 for Bonferroni over nine.

    Raises:
        InputError: The shares are no shares, or there are no pairs.
    """
    if n < 1:
        raise unexpected("n", n, "at least 1 pair")
    if not (only_a >= 0 and only_b >= 0 and only_a + only_b <= 1):
        raise InputError(f"shares {only_a} and {only_b} were given: expected two shares that add up to at most 1.")
    _check_level(alpha)
    differing = only_a + only_b
    if not differing:
        return 0.0
    counts = np.arange(n + 1)
    # The largest number of the rarer disagreement that is still rejected: twice its binomial tail is at most alpha.
    largest = stats.binom.ppf(alpha / 2, counts, 0.5).astype(int)
    largest -= 2 * stats.binom.cdf(largest, counts, 0.5) > alpha
    share = only_a / differing
    rejected = stats.binom.cdf(largest, counts, share) + stats.binom.cdf(largest, counts, 1 - share)
    return float(np.sum(stats.binom.pmf(counts, n, differing) * rejected))


def detectable_difference(n: int, differing: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest difference of two shares that McNemar's exact test of ``n`` pairs would see with this power.

    Args:
        n: Independent pairs.
        differing: The share of pairs that disagree at all.
        alpha: The level, after correction.
        power: The chance of seeing it.

    Returns:
        The difference as a share; NaN where even pairs that all disagree in one direction would not do.
    """
    if not 0 < power < 1:
        raise unexpected("power", power, "a share between 0 and 1, such as 0.8")

    def missing(difference: float) -> float:
        return mcnemar_power(n, (differing + difference) / 2, (differing - difference) / 2, alpha) - power

    if missing(differing) < 0:
        return float("nan")
    return float(optimize.brentq(missing, 0, differing, xtol=1e-6))


def mean_power(n: int, effect: float, spread: float, alpha: float = 0.05) -> float:
    """The chance that Student's test of ``n`` independent differences rejects, if their mean is ``effect``.

    Args:
        n: Independent differences.
        effect: Their true mean.
        spread: Their standard deviation.
        alpha: The level, after correction.
    """
    from statsmodels.stats.power import TTestPower

    _check_level(alpha)
    if n < 2 or not spread > 0:
        return float("nan")
    found = float(TTestPower().power(abs(effect) / spread, n, alpha))
    # The noncentral t distribution is not computed far out, where a rejection is certain.
    return found if np.isfinite(found) else 1.0


def detectable_mean(n: int, spread: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest mean of ``n`` independent differences that Student's test would see with this power.

    Args:
        n: Independent differences.
        spread: Their standard deviation.
        alpha: The level, after correction.
        power: The chance of seeing it.
    """
    if not 0 < power < 1:
        raise unexpected("power", power, "a share between 0 and 1, such as 0.8")
    if n < 2 or not spread > 0:
        return float("nan")
    top = spread
    while mean_power(n, top, spread, alpha) < power:
        top *= 2
    return float(optimize.brentq(lambda effect: mean_power(n, effect, spread, alpha) - power, 0, top))


def _check_level(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise unexpected("alpha", alpha, "a level between 0 and 1, such as 0.05")
