"""The noise that an error amounts to, against the noise that was made."""

import math

import pandas as pd
import pytest
import torch

from kvinterp.metrics.equivalent_noise import SUMS, error_sums, noise_of_sums


def noise(exact, read):
    sums = error_sums(exact[None], read[None])
    return noise_of_sums(pd.DataFrame({name: sums[name].numpy() for name in SUMS})).iloc[0]


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = 400, 500
    return torch.randn(shape, generator=generator).double() * 3, torch.rand(shape, generator=generator).double()


@pytest.mark.parametrize(
    ("low", "high", "flips"), [(-1, 1, 0.0), (0, 2, 0.0), (-1.5, 1.5, 1 / 6), (-2, 2, 1 / 4), (-2, 0, 1 / 2)]
)
def test_multiplicative_noise_is_read_back(low, high, flips):
    x, u = drawn()
    u = low + (high - low) * u
    found = noise(x, x + x * u)
    assert found["bias"] == pytest.approx((low + high) / 2, abs=0.01)
    assert found["relative_std"] == pytest.approx((high - low) / math.sqrt(12), rel=0.01)
    assert found["relative_rms"] == pytest.approx(math.hypot(found["bias"], found["relative_std"]))
    assert found["sign_flips"] == pytest.approx(flips, abs=0.005)
    # Of x u, with both independent: 3 E u^4 / (E u^2)^2 - 3 where the mean is 0.
    if low == -high:
        assert found["kurtosis"] == pytest.approx(3 * 9 / 5 - 3, abs=0.15)


def test_no_error_is_exactly_none_and_a_constant_one_has_no_tails():
    x, _ = drawn()
    still = noise(x, x)
    assert (still[["relative_rms", "bias", "relative_std", "sign_flips", "zeroed"]] == 0).all()
    assert math.isnan(still["kurtosis"])
    assert math.isnan(noise(x, x + 1)["kurtosis"])


def test_zeros_are_no_flipped_signs():
    x = torch.tensor([[1.0, -2.0, 0.0, 4.0]])
    found = noise(x, torch.tensor([[0.0, 2.0, 5.0, 4.0]]))
    assert found["zeroed"] == pytest.approx(1 / 3)
    assert found["sign_flips"] == pytest.approx(1 / 3)


def test_sums_of_parts_are_those_of_the_whole_and_heads_stay_apart():
    x, u = drawn()
    y = x + x * u
    parts = [error_sums(x[rows][None], y[rows][None]) for rows in (slice(0, 150), slice(150, 400))]
    for name, whole in error_sums(x[None], y[None]).items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole)
    heads = error_sums(torch.stack([x, x]), torch.stack([x, y]))
    assert heads["e2"][0] == 0 < heads["e2"][1]
