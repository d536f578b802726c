"""Noise is keyed by where it falls, and what it preserves it preserves; truncation against NumPy's bits."""

import numpy as np
import pytest
import torch

from kvinterp.policies import CacheRows, policy_named
from support import assert_bitwise, assert_close

NOISES = ["uniform(-1.5,1.5)", "normal(0.1,0.8)"]
noises = pytest.mark.parametrize("text", NOISES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


def place(start, stop, layer=0):
    return CacheRows(layer, start, stop, rotated=True)


def written(text, tensor, start=0, layer=0):
    policy = policy_named(text)
    return policy.write(tensor, tensor, place(start, start + tensor.shape[2], layer))


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(0)
    return torch.randn(1, 3, 700, 32)


def said(text, more):
    return f"{text[:-1]},{more})"


@noises
def test_an_error_is_its_places_alone(rows, text):
    """The same in pieces over the edge of what is drawn together, one head alone, another width of batch, another dtype."""
    whole = written(text, rows)
    for begun, stop in ((0, 1), (60, 70), (63, 64), (128, 700)):
        for one, other in zip(written(text, rows[:, :, begun:stop], begun), whole, strict=True):
            assert_bitwise(one, other[:, :, begun:stop], f"rows {begun} to {stop}")
    alone = written(said(text, "heads=2"), rows)
    assert_bitwise(alone[0][:, 2], whole[0][:, 2], "head 2")
    assert_bitwise(alone[0][:, :2], rows[:, :2], "the other heads")
    assert_bitwise(written(text, rows.expand(2, -1, -1, -1))[1], whole[1].expand(2, -1, -1, -1), "a batch")
    assert_close(written(text, rows.half())[0].float(), written(text, rows.half().float())[0], "float16", relative=2e-3)


@noises
def test_the_errors_follow_their_distribution(rows, text):
    policy = policy_named(text)
    error = written(text, torch.ones_like(rows).double())[0].flatten() - 1
    spread = (policy.high - policy.low) / 12**0.5 if text.startswith("uniform") else policy.std
    assert abs(error.mean() - policy.expected) < 5 * spread / len(error) ** 0.5
    assert abs(error.std() / spread - 1) < 0.02
    for bound in (-1.0, 0.2):
        share, part = policy.below(bound)
        assert abs((error < bound).double().mean() - share) < 0.01
        assert abs((error * (error < bound)).mean() - part) < 0.01


@noises
def test_signs_are_preserved_by_errors_as_large(rows, text):
    plain, kept = (written(one, rows.double())[0] for one in (text, said(text, "preserve=sign")))
    assert (plain * rows < 0).any()
    assert (kept.sign() == rows.sign()).all()
    assert_close((kept - rows).abs(), (plain - rows).abs(), "the errors' size", relative=1e-12)


@noises
def test_a_magnitude_is_preserved_where_signs_turn_over(rows, text):
    plain, kept = (written(one, rows)[0] for one in (text, said(text, "preserve=magnitude")))
    assert_bitwise(kept.abs(), rows.abs(), "magnitudes")
    assert (kept.sign() == plain.sign()).all()


@noises
@pytest.mark.parametrize("kept", ["mean", "sign+mean", "magnitude+mean"])
def test_the_mean_is_preserved_whatever_else_is(rows, text, kept):
    ones = torch.ones_like(rows)
    made = written(said(text, f"preserve={kept}"), ones)[0]
    without = written(said(text, f"preserve={kept.split('+')[0]}") if "+" in kept else text, ones)[0]
    assert abs(made.mean() - 1) < 5 * made.std() / made.numel() ** 0.5
    assert_close(made / made.mean(), without / without.mean(), "but for its scale", relative=1e-5)


@every_dtype
def test_the_low_bits_are_those_that_numpy_drops(dtype):
    torch.manual_seed(1)
    rows = torch.randn(1, 2, 5, 8, dtype=torch.float64).mul(1e-3).to(dtype)
    rows[0, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, torch.finfo(dtype).tiny / 4])
    made = written("truncate(3)", rows)[0]
    words = {2: np.uint16, 4: np.uint32, 8: np.uint64}[rows.element_size()]
    given, found = (
        t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]).numpy()
        for t in (rows, made)
    )
    given, found = given.view(words).ravel(), found.view(words).ravel()
    assert (found[1:] == given[1:] >> words(3) << words(3)).all()
    assert made[0, 0, 0, 0].isnan()
    assert_bitwise(written("truncate(0)", rows)[0], rows, "nothing dropped")
