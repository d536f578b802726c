"""Summaries over steps, and that nothing non-finite is averaged over."""

import math

import numpy as np
import pytest
import scipy
import torch

from kvinterp import metrics
from kvinterp.errors import NonFiniteError
from kvinterp.metrics import clustered_interval, kl_statistics


def test_the_summary_on_numbers_done_by_hand():
    kl = torch.arange(1001, dtype=torch.float64).flip(0)
    same = torch.tensor([True] * 1000 + [False])
    dp = torch.tensor([0.0] * 1000 + [-0.5])
    assert kl_statistics(kl, same, dp) == pytest.approx(
        {
            "mean": 500.0,
            "median": 500.0,
            "p90": 900.0,
            "p95": 950.0,
            "p99": 990.0,
            "p99.9": 999.0,
            "maximum": 1000.0,
            "same_top": 1000 / 1001,
            "rms_dp": math.sqrt(0.25 / 1001),
        },
        rel=1e-14,
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_counted_and_located(bad):
    values = torch.zeros(10)
    values[[4, 7]] = bad
    fine, same = torch.zeros(10), torch.ones(10, dtype=torch.bool)
    with pytest.raises(NonFiniteError, match=r"2 of 10 KL divergences .* first at index 4"):
        kl_statistics(values, same, fine)
    with pytest.raises(NonFiniteError, match=r"2 of 10 top probability differences .* first at index 4"):
        kl_statistics(fine, same, values)


def test_whole_clusters_are_drawn():
    """Forty equal steps of each of twelve prompts are twelve observations, of which a mean is not sure."""
    clusters, values = np.repeat(np.arange(12), 40), np.repeat([0.0, 1.0] * 6, 40)
    low, high = clustered_interval(np.mean, clusters, values)
    # Student's would be 0.17 to 0.83.
    assert low == pytest.approx(0.17, abs=0.06)
    assert high == pytest.approx(0.83, abs=0.06)
    assert np.isnan(clustered_interval(np.mean, clusters % 11, values)).all(), "eleven are too few"


def test_an_interval_of_clusters_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for number in range(100):
        prompts = np.repeat(np.arange(20), 5)
        values = rng.normal(size=20)[prompts] + 0.1 * rng.normal(size=100)
        low, high = clustered_interval(lambda x: float(np.mean(x)), prompts, values, resamples=200, seed=number)
        held += low <= 0 <= high
    assert 85 <= held <= 99


def test_a_statistic_that_is_no_number_in_some_resamples_keeps_the_others():
    clusters, values = np.arange(12), np.arange(12.0)
    low, high = clustered_interval(lambda x: float("nan") if x.min() > 0 else float(np.mean(x)), clusters, values)
    assert 1 < low < high < 10
    assert np.isnan(clustered_interval(lambda x: float("nan"), clusters, values)).all()


def test_what_is_typical_is_a_median_between_two_of_the_numbers():
    values = np.array([0.0, 1e-8, 1e-6, 1e-7, 1e-7, 1e-9, 1e-5])
    found = metrics.typical(values)
    assert (found.median, found.interval) == (1e-7, (0.0, 1e-5))
    assert (found.mean, found.zeros, found.n) == (values.mean(), 1, 7)
    assert metrics.typical([*values, np.nan]) == found
    # Of 40 numbers the 14th and the 27th: 96% of samples have between 14 and 26 numbers below their median.
    many = np.random.default_rng(0).permutation(40.0 + np.arange(40))
    assert metrics.typical(many).interval == (53.0, 66.0)
    assert metrics.typical(-many).interval == (-66.0, -53.0)


@pytest.mark.parametrize("n", [*range(1, 40), 200, 1319])
def test_intervals_are_scipys_without_its_statistics(n):
    """scipy.stats takes as long to import as a small comparison to run, so that its formulas stand here."""
    numbers = np.random.default_rng(n).standard_normal(n)
    ends = scipy.stats.quantile_test(numbers).confidence_interval(0.95)
    np.testing.assert_array_equal(metrics.typical(numbers).interval, (ends.low, ends.high))
    for count in {0, 1, n // 3, n - 1, n}:
        ends = scipy.stats.binomtest(count, n).proportion_ci(0.95, "exact")
        found = metrics.share_of(np.arange(n) < count)
        np.testing.assert_allclose((found.low, found.high), (ends.low, ends.high), rtol=1e-9, atol=1e-11)
