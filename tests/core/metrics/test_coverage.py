"""How often intervals hold the true value, and tests reject a true null, where rows of a cluster depend on each other.

A short simulation runs by default and one of 1,000 repeats with ``--everything``. What is asked is what so many repeats can
show: the number of intervals that hold the truth lies where 99.9% of binomial draws do. The percentile bootstrap of few
clusters is known to be a little too short (of n clusters by about a factor sqrt((n - 1) / n), and by normal instead of
Student's quantiles); that is computed and asked for, not hidden in a tolerance.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvinterp import metrics

REPEATS = [pytest.param(150, id="short"), pytest.param(1000, id="long", marks=pytest.mark.long)]


def within(hits: int, repeats: int, share: float) -> bool:
    low, high = stats.binom.interval(0.999, repeats, share)
    return low <= hits <= high


def dependent(
    rng: np.random.Generator, clusters: int, rows: int, within_share: float = 0.5
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of mean 0 whose correlation within a cluster is ``within_share``."""
    names = np.repeat(np.arange(clusters), rows)
    own = rng.normal(size=clusters)[names] * math.sqrt(within_share)
    return names, own + rng.normal(size=len(names)) * math.sqrt(1 - within_share)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", REPEATS)
def test_the_clustered_bootstrap_holds_the_mean_as_often_as_it_says(repeats):
    clusters, rng = 40, np.random.default_rng(0)
    hits = rows_hit = 0
    for repeat in range(repeats):
        names, values = dependent(rng, clusters, 5)
        low, high = metrics.clustered_interval(np.mean, names, values, seed=repeat, resamples=400)
        hits += low <= 0 <= high
        half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
        rows_hit += abs(values.mean()) <= half
    # Normal quantiles and a divisor of n where Student's and n - 1 would be exact: 93.9% of 40 clusters.
    expected = 1 - 2 * stats.t(clusters - 1).sf(1.96 * math.sqrt((clusters - 1) / clusters))
    assert expected > 0.935
    assert within(hits, repeats, expected), hits
    # Rows taken as independent hold it in about 74%: the mistake that clusters are there for.
    assert not within(rows_hit, repeats, 0.95), rows_hit


@pytest.mark.parametrize("repeats", [pytest.param(60, id="short"), *REPEATS[1:]])
def test_the_correlation_of_clustered_rows(repeats):
    """Two numbers that share nothing, each with a part of its own cluster: rows would see a correlation in every third study."""
    rng, hits, rejected, by_rows = np.random.default_rng(1), 0, 0, 0
    for repeat in range(repeats):
        (names, x), (_, y) = dependent(rng, 40, 4, 0.7), dependent(rng, 40, 4, 0.7)
        found = metrics.correlation(x, y, names, seed=repeat, resamples=200)
        hits += found.low <= 0 <= found.high
        rejected += found.p <= 0.05
        by_rows += stats.pearsonr(x, y).pvalue <= 0.05
    assert hits >= stats.binom.ppf(0.001, repeats, 0.92), hits
    assert rejected <= stats.binom.ppf(0.999, repeats, 0.07), rejected
    assert not within(by_rows, repeats, 0.05), by_rows


@pytest.mark.parametrize("repeats", [pytest.param(60, id="short"), *REPEATS[1:]])
def test_tests_of_two_equal_paths_reject_as_often_as_they_say(repeats):
    """Decodes of a prompt under four seeds, as hard for both paths; only clustered tests hold their level."""
    rng = np.random.default_rng(2)
    counts = dict.fromkeys(("sign flips", "t", "rows"), 0)
    for repeat in range(repeats):
        names = np.repeat(np.arange(30), 4)
        # A prompt favours one path by its own accident; over prompts neither is favoured.
        chance = np.clip(rng.beta(2, 2, 30) + rng.normal(0, 0.3, 30) * np.array([[1], [-1]]), 0.02, 0.98)
        a, b = (rng.random(120) < chance[side][names] for side in (0, 1))
        d = a.astype(float) - b
        counts["sign flips"] += metrics.sign_flips(d, names, seed=repeat, resamples=999).p <= 0.05
        counts["t"] += metrics.mean_of(d, names).p <= 0.05
        counts["rows"] += metrics.mcnemar(a, b).p <= 0.05
    for name in ("sign flips", "t"):
        assert counts[name] <= stats.binom.ppf(0.999, repeats, 0.06), counts
    assert counts["rows"] > stats.binom.ppf(0.999, repeats, 0.05), counts


@pytest.mark.parametrize("repeats", [pytest.param(25, id="short"), *REPEATS[1:]])
def test_survival_and_hazard_hold_the_truth(repeats):
    """Flips at a rate of 3% a step, decodes that end at a step of their own; survival after 10 steps is 0.97 ** 10."""
    rng, survived, hazards = np.random.default_rng(3), 0, 0
    for _ in range(repeats):
        flip, end = rng.geometric(0.03, 120), rng.integers(5, 40, 120)
        table = metrics.survival_by_step(np.minimum(flip, end), flip <= end).set_index("step")
        at = table.loc[table.index <= 10].iloc[-1]
        survived += at["survival_low"] <= 0.97**10 <= at["survival_high"]
        hazards += table["hazard_low"].loc[10] <= 0.03 <= table["hazard_high"].loc[10] if 10 in table.index else 1
    assert within(survived, repeats, 0.95), survived
    assert hazards >= stats.binom.ppf(0.001, repeats, 0.95), hazards


@pytest.mark.parametrize("n", [6, 12, 40])
@pytest.mark.parametrize("repeats", [pytest.param(200, id="short"), pytest.param(2000, id="long", marks=pytest.mark.long)])
def test_the_interval_of_what_spreads_over_orders_of_magnitude(n: int, repeats: int) -> None:
    """As KL over prompts does: the bootstrap's interval of the mean holds it in a third of samples of six."""
    rng, median, mean = np.random.default_rng(n), 0, 0
    for _ in range(repeats):
        values = np.exp(rng.normal(0, 2.5, n))
        found = metrics.typical(values)
        median += found.low <= 1 <= found.high
        low, high = np.quantile(rng.choice(values, (200, n)).mean(1), (0.025, 0.975))
        mean += low <= math.exp(2.5**2 / 2) <= high
    # The count of numbers below the median is binomial: 96.9% of six, 96.1% of twelve, 96.2% of forty.
    below = stats.binom(n, 0.5)
    assert within(median, repeats, 1 - 2 * below.cdf(below.ppf(0.025) - 1)), median
    assert mean < 0.75 * repeats, mean
