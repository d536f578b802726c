"""What was made of a model (its copy in another dtype, its hashes) follows every change of it, by whatever way."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import kvinterp as kv
from kvinterp.models.mark import _summed_on_device, mark_of, settings_of
from support import Case, cases

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
SETTINGS = {"b": "recompute@float64", "max_new_tokens": 3, "stop": "length", "progress": "none"}


def rows_permuted(model):
    weight = model.lm_head.weight
    weight.data.copy_(weight.data[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])


def signs_changed_places(model):
    """Of two neighbouring numbers of opposite signs: only their highest bits change, and the sum of all bits does not."""
    flat = model.lm_head.weight.data.view(-1)
    flat[4:8] = torch.tensor([0.5, -0.5, 0.5, 0.5])
    return lambda: flat[4:8].copy_(torch.tensor([0.5, 0.5, 0.5, -0.5]))


def epsilon(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.3


def frequencies(model):
    model.model.rotary_emb.inv_freq.data.copy_(model.model.rotary_emb.inv_freq.data.flip(0))


def scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9


def activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh().eval()


WEIGHTS = {"rows permuted": rows_permuted, "signs changed places": signs_changed_places}
REST = {"epsilon": epsilon, "frequencies": frequencies, "scaling": scaling, "activation": activation}


@pytest.mark.parametrize("way", [*WEIGHTS, *REST])
def test_the_copy_and_the_hashes_follow_every_change(tiny, way):
    """The bits were summed, which permuted rows leave as they are, and of what is no tensor nobody knew: a model was compared
    with the float64 copy of another one (2.8 nats where 2.4e-5 were true), under the old hash."""
    model = tiny("Llama")
    changed = {**WEIGHTS, **REST}[way](model) if way == "signs changed places" else None
    adapter = kv.wrap(model)
    first, twin = kv.compare(adapter, PROMPT, **SETTINGS), adapter.at(torch.float64)
    assert adapter.at(torch.float64) is twin
    (changed or (lambda: {**WEIGHTS, **REST}[way](model)))()
    second = kv.compare(adapter, PROMPT, **SETTINGS)
    assert adapter.at(torch.float64) is not twin
    assert second.steps["max_abs_logit"].max() < 1e-3
    of = "weights" if way in WEIGHTS else "settings"
    assert second.provenance[of] != first.provenance[of]
    other = "settings" if way in WEIGHTS else "weights"
    assert second.provenance[other] == first.provenance[other]


def transposed(model):
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.t()


def users_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output * 3)


def users_pre_hook(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: (given[0] * 3,))


def array_in_place(model):
    model.model.layers[0].mlp.gains[0] = 4.0


def private_tensor_in_place(model):
    model.model.layers[0].mlp._gain.data.fill_(4.0)


@pytest.mark.parametrize("way", [transposed, users_hook, users_pre_hook, array_in_place, private_tensor_in_place])
def test_a_copy_follows_what_lies_otherwise_and_what_is_hooked(tiny, way):
    """Of each of these the copy was kept: 0.2 to 0.4 nats where 1e-14 were true."""
    model = tiny("Llama")
    assert len(set(model.model.layers[0].self_attn.o_proj.weight.shape)) == 1, "square, so that it can be transposed"
    mlp = model.model.layers[0].mlp
    mlp.gains, mlp._gain = np.ones(1), torch.ones(1)
    mlp.register_forward_hook(lambda module, given, output: output * float(module.gains[0] * module._gain))
    adapter = kv.wrap(model)
    kv.compare(adapter, PROMPT, **SETTINGS)
    way(model)
    assert kv.compare(adapter, PROMPT, **SETTINGS).steps["max_abs_logit"].max() < 1e-3


def test_a_forward_that_holds_on_to_the_original_is_a_sentence(tiny):
    """The copy called the original's weights: torch's own error about dtypes, or no error at all."""
    model = tiny("Llama")
    mlp = model.model.layers[0].mlp
    old = mlp.forward
    mlp.forward = lambda x: old(x) * 3
    adapter = kv.wrap(model)
    with pytest.raises(kv.UnsupportedError, match="holds on to the model itself"):
        kv.compare(adapter, PROMPT, **SETTINGS)
    assert len(kv.compare(adapter, PROMPT, **{**SETTINGS, "b": "recompute"}).steps)


def test_another_attention_is_seen_after_wrap(tiny):
    """The facts went on saying eager, and the pattern was looked for where it no longer was."""
    model = tiny("Llama")
    adapter = kv.wrap(model)
    first = kv.run(adapter, PROMPT, "recompute@float64", record="pattern", max_new_tokens=2, stop="length")
    adapter.checked_batches["a check of the other kernel"] = True
    model.set_attn_implementation("sdpa")
    second = kv.run(adapter, PROMPT, "recompute@float64", record="pattern", max_new_tokens=2, stop="length")
    assert (first.derived, second.derived) == ((), ("pattern",))
    assert (first.provenance["attention"], second.provenance["attention"]) == ("eager", "sdpa")
    assert first.provenance["settings"] != second.provenance["settings"]
    assert adapter.at(torch.float64).facts.attention == "sdpa"
    assert not adapter.checked_batches
    with kv.record(adapter, "pattern") as seen:
        model(torch.tensor([PROMPT]))
    assert seen.derived == ("pattern",)


@cases([Case("llama-gqa", "hooked"), Case("llama-gqa", "native", "sdpa"), Case("llama-gqa", "bridge")])
def test_running_a_model_does_not_change_its_mark(load, case):
    """Else its copy would be made anew at every run."""
    adapter = load(case)
    kv.run(adapter, PROMPT, record="resid_post", max_new_tokens=2)
    before = mark_of(adapter.model)
    kv.run(adapter, PROMPT[:5], record="resid_post,kv", max_new_tokens=3)
    assert mark_of(adapter.model) == before
    twin = adapter.at(torch.float64)
    kv.compare(adapter, PROMPT, **SETTINGS)
    assert adapter.at(torch.float64) is twin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (7, 5), (300, 257)])
def test_every_exchange_and_every_single_change_shows(dtype, shape):
    """Of numbers that differ in anything: in their signs alone, in one bit, by whole rows."""
    module = nn.Module()
    made = torch.Generator().manual_seed(0)
    module.weight = nn.Parameter(torch.randn(shape, generator=made).to(dtype), requires_grad=False)
    flat, first = module.weight.data.view(-1), mark_of(module)
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
            assert (mark_of(module) != first) == (not torch.equal(flat, original)), (way, number)
            flat.copy_(original)
    assert mark_of(module) == first


def test_the_settings_of_two_loads_are_equal(tiny):
    one, two = tiny("Llama"), tiny("Llama")
    two.config._name_or_path = "/another/folder"
    assert settings_of(one) == settings_of(two) == settings_of(copy.deepcopy(one))


def test_a_verb_asks_once(tiny, monkeypatch):
    """It reads all weights, so it is not to be asked at every forward."""
    asked = []
    monkeypatch.setattr("kvinterp.models.adapter.mark_of", lambda model: asked.append(1) or mark_of(model))
    adapter = kv.wrap(tiny("Llama"))
    for verb in (
        lambda: kv.compare(adapter, [PROMPT, PROMPT[:5]], b="recompute@float64", max_new_tokens=3, progress="none"),
        lambda: kv.run(adapter, [PROMPT, PROMPT[:5]], "cached@float64", max_new_tokens=3),
    ):
        asked.clear()
        verb()
        assert len(asked) == 1


def test_on_a_device_the_sum_is_as_sensitive():
    """There torch does the sums, in rows of words."""
    row, made = 1 << 15, torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (row * 63 + 8,), generator=made)

    def total(given):
        return int(_summed_on_device(given.view(torch.uint8)))

    first = total(words)
    for one, two in ((0, 1), (5, row + 5), (3, 62 * row + 3), (row * 63 + 1, 7)):
        changed = words.clone()
        changed[[one, two]] = words[[two, one]]
        assert total(changed) != first
        changed = words.clone()
        changed[one] ^= -(2**63)
        assert total(changed) != first
    assert total(words.clone()) == first
