"""Survival, power and prediction against closed forms, optimisation by hand and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from kvinterp import metrics
from kvinterp.errors import InputError


def test_kaplan_and_meier_by_hand():
    """Six decodes: flips at 2, 2 and 5; ended without one at 3, 6 and 6."""
    steps, flipped = [2, 2, 3, 5, 6, 6], [True, True, False, True, False, False]
    found = metrics.survival_by_step(steps, flipped)
    assert found["step"].tolist() == [2, 3, 5, 6]
    assert found["at_risk"].tolist() == [6, 4, 3, 2]
    assert found["flips"].tolist() == [2, 0, 1, 0]
    assert found["survival"].tolist() == pytest.approx([4 / 6, 4 / 6, 4 / 6 * 2 / 3, 4 / 6 * 2 / 3])
    assert found["hazard"].tolist() == pytest.approx([2 / 6, 0, 1 / 3, 0])
    # Greenwood on the log-log scale.
    s, variance = 4 / 9, 2 / (6 * 4) + 1 / (3 * 2)
    half = stats.norm.ppf(0.975) * math.sqrt(variance) / abs(math.log(s))
    ends = sorted(s ** math.exp(sign * half) for sign in (1, -1))
    assert found.loc[2, ["survival_low", "survival_high"]].tolist() == pytest.approx(ends, rel=1e-9)
    assert found.loc[1, "hazard_high"] == pytest.approx(1 - 0.025 ** (1 / 4), rel=1e-9)


def test_survival_where_nothing_flips_and_of_nothing():
    assert (metrics.survival_by_step([4, 4], [False, False])["survival"] == 1).all()
    assert metrics.survival_by_step([], []).empty
    with pytest.raises(InputError, match="3 steps, 2 flipped"):
        metrics.survival_by_step([1, 2, 3], [True, False])


def test_cox_by_the_partial_likelihood():
    rng = np.random.default_rng(0)
    margin = rng.gamma(2.0, 0.5, size=60)
    time = rng.exponential(np.exp(0.8 * margin))
    end = 3.0
    flipped, steps = time < end, np.minimum(time, end)

    def loss(beta):
        return -sum(
            beta * margin[i] - math.log(np.exp(beta * margin[steps >= steps[i]]).sum()) for i in np.flatnonzero(flipped)
        )

    best = optimize.minimize_scalar(loss, bracket=(-1, 0)).x
    h = 1e-3
    error = math.sqrt(h * h / (loss(best + h) - 2 * loss(best) + loss(best - h)))
    found = metrics.cox(steps, flipped, margin)
    assert found.n == 60
    assert math.log(found.effect) == pytest.approx(best, rel=1e-4)
    assert found.statistic == pytest.approx(best / error, rel=1e-3)
    half = stats.norm.ppf(0.975) * error
    assert (found.low, found.high) == pytest.approx((math.exp(best - half), math.exp(best + half)), rel=1e-3)
    assert found.high < 1


def test_copies_tell_cox_nothing():
    rng = np.random.default_rng(1)
    margin, time = rng.normal(size=40), rng.exponential(size=40)
    once, names = metrics.cox(time, time < 2, margin), np.tile(np.arange(40), 5)
    five = metrics.cox(np.tile(time, 5), np.tile(time < 2, 5), np.tile(margin, 5), names)
    rows = metrics.cox(np.tile(time, 5), np.tile(time < 2, 5), np.tile(margin, 5))
    assert five.n == 40
    assert math.log(five.high / five.low) == pytest.approx(math.log(once.high / once.low), rel=0.25)
    assert math.log(rows.high / rows.low) < 0.6 * math.log(once.high / once.low)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "only_a", "only_b", "alpha"), [(60, 0.2, 0.05, 0.05), (200, 0.06, 0.01, 0.05 / 9)])
def test_mcnemars_power_by_simulation(n, only_a, only_b, alpha):
    """Of 20,000 simulated studies as many reject as it says, within four standard errors."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(n, [only_a, only_b, 1 - only_a - only_b], size=20_000)
    rejected = np.mean(
        [stats.binomtest(int(a), int(a + b)).pvalue <= alpha if a + b else False for a, b, _ in counts[:4000]]
    )
    assert metrics.mcnemar_power(n, only_a, only_b, alpha) == pytest.approx(rejected, abs=4 * math.sqrt(0.25 / 4000))


def test_mcnemars_size_is_at_most_its_level():
    for n in (5, 20, 111):
        assert metrics.mcnemar_power(n, 0.15, 0.15) <= 0.05
    assert metrics.mcnemar_power(10, 0.0, 0.0) == 0


def test_a_detectable_difference_has_the_power_that_it_is_for():
    found = metrics.detectable_difference(700, 0.05, alpha=0.05 / 9)
    assert metrics.mcnemar_power(700, (0.05 + found) / 2, (0.05 - found) / 2, 0.05 / 9) == pytest.approx(0.8, abs=1e-3)
    assert metrics.detectable_difference(2800, 0.05, alpha=0.05 / 9) == pytest.approx(found / 2, rel=0.1)
    assert math.isnan(metrics.detectable_difference(4, 0.5))
    with pytest.raises(InputError, match="add up to at most 1"):
        metrics.mcnemar_power(10, 0.7, 0.7)
    with pytest.raises(InputError, match="expected a level between 0 and 1"):
        metrics.mcnemar_power(10, 0.1, 0.1, alpha=5.0)


def test_power_of_a_mean_by_the_noncentral_t():
    n, effect, spread = 40, 0.5, 1.1
    critical = stats.t(n - 1).ppf(0.975)
    shift = effect / spread * math.sqrt(n)
    by_hand = stats.nct(n - 1, shift).sf(critical) + stats.nct(n - 1, shift).cdf(-critical)
    assert metrics.mean_power(n, effect, spread) == pytest.approx(by_hand, rel=1e-6)
    assert metrics.mean_power(n, metrics.detectable_mean(n, spread), spread) == pytest.approx(0.8, abs=1e-6)
    assert math.isnan(metrics.detectable_mean(1, 1.0))


def test_the_area_by_every_pair_and_under_the_curve():
    rng = np.random.default_rng(2)
    event = rng.random(60) < 0.3
    score = np.round(rng.normal(size=60) + event, 1)
    pairs = np.mean([(p > q) + 0.5 * (p == q) for p in score[event] for q in score[~event]])
    found, curve = metrics.auc(score, event), metrics.roc(score, event)
    assert found.effect == pytest.approx(pairs, rel=1e-12)
    assert np.trapezoid(curve["true_positive_rate"], curve["false_positive_rate"]) == pytest.approx(pairs, rel=1e-12)
    assert found.low < pairs < found.high
    assert found.p == pytest.approx(stats.mannwhitneyu(score[event], score[~event]).pvalue)
    assert math.isnan(metrics.auc(np.tile(score, 2), np.tile(event, 2), np.tile(np.arange(60), 2)).p)


def test_brier_and_calibration_of_chances_that_are_true():
    rng = np.random.default_rng(3)
    chance = rng.beta(1, 3, size=1000)
    event = rng.random(1000) < chance
    found = metrics.brier(chance, event)
    assert found.statistic == pytest.approx(np.mean((chance - event) ** 2), rel=1e-12)
    rate = event.mean()
    assert found.effect == pytest.approx(1 - found.statistic / (rate * (1 - rate)), rel=1e-9)
    assert 0 < found.low < found.effect < found.high
    table = metrics.calibration(chance, event, bins=6)
    assert table["rows"].sum() == 1000
    assert ((table["low"] <= table["predicted"]) & (table["predicted"] <= table["high"])).sum() >= 5
    worse = metrics.calibration(np.clip(chance + 0.3, 0, 1), event, bins=6)
    assert not ((worse["low"] <= worse["predicted"]) & (worse["predicted"] <= worse["high"])).any()
    with pytest.raises(InputError, match="outside 0 to 1"):
        metrics.brier(chance + 1, event)
