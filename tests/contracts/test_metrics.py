"""The laws every metric keeps, run over the registry: a new metric is tested here without a line of its own."""

import math

import pytest
import torch

from kvinterp.comparison.tables import Differences
from kvinterp.metrics import KINDS, OF_KIND, REGISTRY, measured

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

metrics = pytest.mark.parametrize("metric", REGISTRY.values(), ids=REGISTRY)
pairs = pytest.mark.parametrize("metric", [m for m in REGISTRY.values() if m.zero is not None], ids=lambda m: m.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs(kind, dtype, shape=(3, 4, 33), seed=0):
    """Random input of a kind, with what real ones contain: equal logits, masked keys, zeros of both signs, outliers."""
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if x.numel() and kind == "pattern":
        x[..., -5:] = -math.inf
        x = x.softmax(-1)
    elif x.numel():
        x[..., 0] = x[..., 1]
        x[..., 2], x[..., 3] = 0.0, -0.0
        x[..., 4] *= 100.0
    return x.to(dtype)


def nearby(x, kind, size, seed=1):
    noise = size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "pattern":
        return (x.double().log() + noise).softmax(-1).to(x.dtype)
    return (x.double() * (1 + noise)).to(x.dtype)


@pairs
@dtypes
def test_equal_inputs_give_exactly_zero(metric, dtype):
    for seed in range(5):
        x = inputs(metric.kind, dtype, seed=seed)
        result = metric.function(x, x.clone())
        assert result.shape == x.shape[:-1]
        assert result.tolist() == torch.full(x.shape[:-1], metric.zero).tolist()


@pairs
@dtypes
def test_different_inputs_do_not(metric, dtype):
    a, b = inputs(metric.kind, dtype), inputs(metric.kind, dtype, seed=9)
    assert (metric.function(a, b) != metric.zero).any()


@metrics
@dtypes
def test_never_negative_where_claimed_and_never_nan(metric, dtype):
    for size in (1e-16, 1e-8, 1e-4, 1e-2, 1.0, 100.0):
        a = inputs(metric.kind, dtype)
        result = metric.function(a, nearby(a, metric.kind, size))
        assert not result.isnan().any()
        if metric.nonnegative:
            assert (result >= 0).all()


@metrics
def test_the_batch_changes_nothing(metric):
    for size in (1e-7, 1e-2, 3.0):
        a = inputs(metric.kind, torch.float32)
        b = nearby(a, metric.kind, size)
        whole = metric.function(a, b)
        rows = torch.stack([metric.function(x, y) for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)])
        assert torch.allclose(whole.double().flatten(), rows.double(), rtol=1e-15, atol=0)
        assert torch.equal(whole.flatten(), metric.function(a.flatten(0, 1), b.flatten(0, 1)))


@metrics
def test_strides_change_nothing(metric):
    a = inputs(metric.kind, torch.float32)
    b = nearby(a, metric.kind, 1e-3)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (a, b)]
    assert not turned[0].is_contiguous()
    assert torch.allclose(metric.function(*turned).double(), metric.function(a, b).double(), rtol=1e-14, atol=0)


@metrics
def test_an_empty_batch_gives_an_empty_result(metric):
    for shape in ((0, 8), (2, 0, 8)):
        x = inputs(metric.kind, torch.float16, shape)
        assert metric.function(x, x).shape == shape[:-1]


@metrics
@dtypes
def test_the_result_is_float64_or_bool_and_the_inputs_are_left_alone(metric, dtype):
    a = inputs(metric.kind, dtype)
    b = nearby(a, metric.kind, 0.1)
    kept = a.clone(), b.clone()
    result = metric.function(a, b)
    assert result.dtype is (torch.bool if isinstance(metric.zero, bool) else torch.float64)
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


@metrics
def test_gradients_are_neither_needed_nor_kept(metric):
    a = inputs(metric.kind, torch.float32)
    b = nearby(a, metric.kind, 1e-3)
    plain = metric.function(a, b)
    with torch.inference_mode():
        assert torch.equal(metric.function(a, b), plain)
    tracked = metric.function(a.requires_grad_(), b)
    assert not tracked.requires_grad
    assert torch.equal(tracked, plain)


@pytest.mark.parametrize("metric", [m for m in REGISTRY.values() if isinstance(m.zero, float)], ids=lambda m: m.name)
def test_a_nan_never_looks_like_agreement(metric):
    """Of every metric but those that say yes or no, which have no NaN."""
    x = inputs(metric.kind, torch.float32)
    bad = x.clone()
    bad[0, 0, 7] = math.nan
    for a, b in ((x, bad), (bad, x), (bad, bad)):
        result = metric.function(a, b)
        assert result[0, 0].isnan()
        assert torch.equal(result.flatten()[1:], metric.function(x, x).flatten()[1:])


@metrics
def test_nothing_is_brought_to_the_host(metric):
    """The meta device has no values: whatever asked for one would raise."""
    x = torch.empty(2, 10, device="meta", dtype=torch.float16)
    result = metric.function(x, x)
    assert result.device.type == "meta"
    assert result.shape == (2,)


@pytest.mark.cuda
@metrics
@dtypes
def test_a_cuda_device_is_kept_without_a_transfer_and_gives_the_same(metric, dtype):
    a = inputs(metric.kind, dtype)
    b = nearby(a, metric.kind, 1e-2)
    a_there, b_there = a.cuda(), b.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = metric.function(a_there, b_there)
        same = metric.function(a_there, a_there.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.device.type == "cuda"
    assert torch.allclose(result.cpu().double(), metric.function(a, b).double(), rtol=1e-9, atol=1e-25)
    assert metric.zero is None or (same == metric.zero).all()


def test_names_are_the_registrys_keys():
    assert all(name == metric.name for name, metric in REGISTRY.items())
    assert {metric.kind for metric in REGISTRY.values()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once_has_the_bits_of_each_alone_and_is_what_the_table_holds(kind):
    """What several metrics share is worked out once at every step of a comparison."""
    a = inputs(kind, torch.float16)
    b = nearby(a, kind, 1e-2)
    together = measured(kind, a, b)
    assert list(together) == [metric.column for metric in OF_KIND[kind]]
    for metric in OF_KIND[kind]:
        assert torch.equal(together[metric.column], metric.function(a, b)), metric.name
    dimensions = ("step", *KINDS[kind].dimensions)
    assert Differences.columns()[KINDS[kind].table] == (*dimensions, *together, "after_flip")
