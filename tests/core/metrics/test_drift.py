"""Residual drift against 60-digit arithmetic, down to differences of one rounding."""

import math

import mpmath
import pytest
import torch

from kvinterp.metrics import residual_drift

mpmath.mp.dps = 60


def exact(a, b):
    a = [mpmath.mpf(value) for value in a.double().tolist()]
    b = [mpmath.mpf(value) for value in b.double().tolist()]
    norm_a, norm_b = (mpmath.sqrt(sum(value * value for value in vector)) for vector in (a, b))
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    l2 = mpmath.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    return {
        "l2": l2,
        "relative_l2": l2 / norm_b,
        "cosine": dot / (norm_a * norm_b),
        "cosine_distance": 1 - dot / (norm_a * norm_b),
    }


@pytest.mark.parametrize(
    ("perturbation", "dtype", "tolerance"),
    [
        (1.0, torch.float32, 1e-14),
        (1e-3, torch.float16, 1e-11),
        (1e-6, torch.float32, 1e-8),
        (1e-9, torch.float64, 1e-6),
        (1e-12, torch.float64, 1e-3),
    ],
)
def test_every_number_keeps_its_digits(perturbation, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    a = (3 * torch.randn(128, generator=generator, dtype=torch.float64)).to(dtype)
    b = (a.double() * (1 + perturbation * torch.randn(128, generator=generator, dtype=torch.float64))).to(dtype)
    assert not torch.equal(a, b)
    drift, truth = residual_drift(a, b), exact(a, b)
    for key, value in drift.items():
        assert float(abs(mpmath.mpf(float(value)) - truth[key]) / abs(truth[key])) < tolerance, key


def test_one_rounding_apart_is_seen_by_the_distance_and_lost_by_the_cosine():
    a = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b = a.clone()
    b[0] = torch.nextafter(b[0], b[0] + 1)
    assert 0 < residual_drift(a, b)["cosine_distance"].item() < 1e-30
    assert residual_drift(a, b)["cosine"].item() == 1.0


def test_known_angles():
    a = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    b = torch.tensor([[0.0, 3.0], [-5.0, 0.0], [7.0, 0.0], [1.0, 1.0]])
    assert torch.allclose(
        residual_drift(a, b)["cosine"], torch.tensor([0.0, -1.0, 1.0, 0.5**0.5], dtype=torch.float64), rtol=1e-15, atol=0
    )
    assert residual_drift(a, b)["cosine_distance"][1].item() == 2.0
    assert residual_drift(a, b)["l2"][1].item() == 7.0
    assert residual_drift(a, b)["relative_l2"][1].item() == 1.4


def test_opposite_directions_stay_within_the_bounds():
    a = torch.randn(500, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drift = residual_drift(a, -0.3 * a)
    assert (drift["cosine_distance"] <= 2).all()
    assert (drift["cosine"] >= -1).all()


def test_zero_vectors():
    zero, one = torch.zeros(3), torch.ones(3)
    assert {key: value.item() for key, value in residual_drift(zero, -zero).items()} == {
        "l2": 0.0,
        "relative_l2": 0.0,
        "cosine": 1.0,
        "cosine_distance": 0.0,
    }
    assert residual_drift(one, zero)["relative_l2"].item() == math.inf
    assert residual_drift(zero, one)["relative_l2"].item() == 1.0
    for a, b in ((one, zero), (zero, one)):
        drift = residual_drift(a, b)
        assert drift["cosine"].isnan()
        assert drift["cosine_distance"].isnan()
