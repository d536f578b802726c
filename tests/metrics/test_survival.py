"""Survival, power and prediction against closed forms, optimisation by hand and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from kvinterp import metrics


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
