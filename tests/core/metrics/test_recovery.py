"""The share a patch removes."""

import math

import torch

from kvinterp.metrics import recovery


def test_recovery_is_a_signed_share():
    before = torch.tensor([4.0, 4.0, 4.0, 4.0, 1e-12])
    after = torch.tensor([0.0, 4.0, 1.0, 6.0, 0.0])
    assert recovery(before, after).tolist() == [1.0, 0.0, 0.75, -0.5, 1.0]


def test_nothing_to_recover_is_undefined_and_not_zero():
    before = torch.tensor([0.0, 0.0, 2.0])
    after = torch.tensor([0.0, 1.0, math.nan])
    assert recovery(before, after).isnan().all()
