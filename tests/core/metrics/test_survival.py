"""Survival, power and prediction against closed forms, optimisation by hand and simulation."""

from __future__ import annotations

import math

import pytest
from scipy import stats

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
