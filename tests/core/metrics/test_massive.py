"""Drift without the three largest dimensions, against what is left when they are cut out by hand."""

import math

import pytest
import torch

from kvinterp.metrics import residual_drift
from kvinterp.metrics.massive import residual_drift_without_largest


def streams(dtype=torch.float32):
    """Two streams of five rows, the largest dimensions of each row elsewhere."""
    draw = torch.Generator().manual_seed(0)
    b = torch.randn(5, 40, generator=draw, dtype=torch.float64)
    large = torch.stack([torch.randperm(40, generator=draw)[:3] for _ in range(5)])
    b.scatter_(1, large, torch.tensor([900.0, -700.0, 300.0], dtype=torch.float64).expand(5, 3))
    a = b + 1e-2 * torch.randn(5, 40, generator=draw, dtype=torch.float64)
    a.scatter_add_(1, large, torch.full((5, 3), 50.0, dtype=torch.float64))
    return a.to(dtype), b.to(dtype), large


def test_it_is_the_drift_of_the_dimensions_that_are_left():
    a, b, large = streams()
    found = residual_drift_without_largest(a, b)
    for row, out in enumerate(large.tolist()):
        kept = [at for at in range(40) if at not in out]
        for name, value in residual_drift(a[row, kept], b[row, kept]).items():
            assert found[f"{name}_without_top3"][row].item() == pytest.approx(value.item(), rel=1e-12)
    # A planted difference in the massive dimensions is what the absolute distance is made of.
    assert (residual_drift(a, b)["l2"] > 80).all()
    assert (found["l2_without_top3"] < 0.2).all()


def test_the_reference_decides_what_is_left_out():
    b = torch.tensor([[9.0, -8.0, 7.0, 1.0, 1.0]])
    a = b.clone()
    a[0, 4] = 100.0  # Large on the other path alone.
    assert residual_drift_without_largest(a, b)["l2_without_top3"].item() == 99.0
    assert residual_drift_without_largest(b, a)["l2_without_top3"].item() == 0.0


def test_what_is_not_finite_is_unknown_though_it_would_be_left_out():
    a, b, large = streams()
    for value in (math.nan, math.inf):
        b[0, large[0, 0]] = value
        found = residual_drift_without_largest(a, b)
        assert all(measure[0].isnan() for measure in found.values())
        assert all(measure[1:].isfinite().all() for measure in found.values())
