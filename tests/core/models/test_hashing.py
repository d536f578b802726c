"""The hash of a model's weights: the same for the same weights, another after any change, wherever they lie."""

import copy

import pytest
import torch
from torch import nn

import kvinterp as kv
from kvinterp.models.hashing import weights_hash
from support import Case, cases

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]


def holding(tensor):
    module = nn.Module()
    module.weight = nn.Parameter(tensor, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (7, 5), (300, 257)])
def test_every_exchange_and_every_single_change_shows(dtype, shape):
    """Of numbers that differ in anything: in their signs alone, in one bit, by whole rows."""
    made = torch.Generator().manual_seed(0)
    module = holding(torch.randn(shape, generator=made).to(dtype))
    flat, first = module.weight.data.view(-1), weights_hash(module)
    original = flat.clone()
    for number in range(40):
        one, two = torch.randint(len(flat), (2,), generator=made).tolist()
        ways = {
            "exchanged": lambda one=one, two=two: flat[[one, two]].flip(0),
            "another sign": lambda one=one, two=two: flat[[one, two]] * torch.tensor([-1.0, 1.0], dtype=dtype),
            "signs exchanged": lambda one=one, two=two: flat[[one, two]].abs().copysign(flat[[one, two]].flip(0)),
            "next number": lambda one=one, two=two: torch.stack(
                [flat[one].nextafter(flat[one] + 1) if dtype.itemsize > 2 else flat[one] * 2, flat[two]]
            ),
        }
        for way, new in ways.items():
            if one == two:
                continue
            flat[[one, two]] = new()
            assert (weights_hash(module) != first) == (not torch.equal(flat, original)), (way, number)
            flat.copy_(original)
    assert weights_hash(module) == first


@cases([Case("llama-gqa", "hooked"), Case("llama-gqa", "native", "sdpa"), Case("llama-gqa", "bridge")])
def test_running_and_copying_leave_it(load, case):
    adapter = load(case)
    before = adapter.fingerprint()
    kv.run(adapter, PROMPT, record="resid_post", max_new_tokens=2)
    assert adapter.fingerprint() == before == weights_hash(copy.deepcopy(adapter.model))


def test_a_verb_hashes_once_and_casts_once(tiny, monkeypatch):
    """It reads all weights, and a cast copies them: neither is to be done at every prompt or forward."""
    adapter = kv.wrap(tiny("Llama"))
    done = []
    monkeypatch.setattr("kvinterp.models.adapter.weights_hash", lambda model: done.append("hash") or weights_hash(model))
    cast = adapter.cast
    monkeypatch.setattr(adapter, "cast", lambda dtype: done.append("cast") or cast(dtype))
    for verb in (
        lambda: kv.compare(adapter, [PROMPT, PROMPT[:5]], b="recompute@float64", max_new_tokens=3, progress="none"),
        lambda: kv.run(adapter, [PROMPT, PROMPT[:5]], "cached@float64", max_new_tokens=3),
        # What is planted is looked for in float64.
        lambda: kv.sweep(adapter, PROMPT, layers=[0], max_new_tokens=3, controls="all"),
    ):
        done.clear()
        verb()
        assert sorted(done) == ["cast", "hash"]
