"""Attention patterns: divergence to 60 digits, and zeros on one side, on both, and everywhere."""

import mpmath
import pytest
import torch

from kvinterp.metrics import pattern_kl

mpmath.mp.dps = 60

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def smallest_subnormal(dtype):
    zero = torch.zeros((), dtype=dtype)
    return float(torch.nextafter(zero, torch.ones((), dtype=dtype)))


def exact(a, b):
    """KL of two 1-D patterns by its definition, each normalised to one, with 60 digits."""
    a = [mpmath.mpf(value) for value in a.double().tolist()]
    b = [mpmath.mpf(value) for value in b.double().tolist()]
    return sum(x / sum(a) * mpmath.log((x / sum(a)) / (y / sum(b))) for x, y in zip(a, b, strict=True))


def patterns(perturbation, dtype, keys=40):
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(keys, generator=generator, dtype=torch.float64)
    moved = scores + perturbation * torch.randn(keys, generator=generator, dtype=torch.float64)
    return scores.softmax(-1).to(dtype), moved.softmax(-1).to(dtype)


@pytest.mark.parametrize(
    ("perturbation", "dtype"),
    [
        (1e-2, torch.float16),
        (1e-1, torch.bfloat16),
        (1.0, torch.float16),
        (1e-6, torch.float32),
        (1e-3, torch.float32),
        (1.0, torch.float32),
        (1e-12, torch.float64),
        (1e-8, torch.float64),
        (3e-3, torch.float64),
        (10.0, torch.float64),
        (100.0, torch.float64),
    ],
)
def test_the_divergence_has_its_digits_at_every_size(perturbation, dtype):
    a, b = patterns(perturbation, dtype)
    truth = exact(a, b)
    assert truth > 0
    assert abs(mpmath.mpf(float(pattern_kl(a, b))) - truth) <= 1e-12 * truth + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
def test_underflow_on_one_side_is_floored_at_the_smallest_subnormal(dtype):
    a = torch.tensor([0.5, 0.25, 0.25], dtype=dtype)
    b = torch.tensor([0.5, 0.5, 0.0], dtype=dtype)
    floored = b.double()
    floored[2] = smallest_subnormal(dtype)
    assert float(pattern_kl(a, b)) == pytest.approx(float(exact(a, floored)), rel=1e-13)
    floored_a = b.double()
    floored_a[2] = smallest_subnormal(dtype)
    assert float(pattern_kl(b, a)) == pytest.approx(float(exact(floored_a, a)), rel=1e-13)


def test_a_key_zero_on_both_sides_contributes_nothing():
    a, b = patterns(0.1, torch.float16)
    zeros = torch.zeros(7, dtype=torch.float16)
    padded = pattern_kl(torch.cat((zeros, a)), torch.cat((zeros, b)))
    assert padded.item() == pytest.approx(pattern_kl(a, b).item(), rel=1e-14)


def test_masked_rows():
    row = torch.tensor([0.5, 0.5, 0.0])
    zero = torch.zeros(3)
    assert pattern_kl(zero, zero).item() == 0.0
    assert pattern_kl(zero, row).isnan()
    assert pattern_kl(row, zero).isnan()
