"""Copies of a model in another dtype: each is of the model as it is when a verb is called, hears nobody, runs what it runs."""

import pytest
import torch
from torch import nn

import kvinterp as kv

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
SETTINGS = {"b": "recompute@float64", "max_new_tokens": 3, "stop": "length", "progress": "none"}


def rows_permuted(model):
    weight = model.lm_head.weight
    weight.data.copy_(weight.data[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])


def epsilon(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.3


def activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh().eval()


def users_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output * 3)


WAYS = {
    "through .data, which torch does not count": lambda model: model.lm_head.weight.data.mul_(1.5),
    "in place": lambda model: model.lm_head.weight.mul_(1.5),
    "one number": lambda model: model.lm_head.weight.data.view(-1)[:1].add_(1.0),
    "another tensor": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 1.5),
    "rows permuted": rows_permuted,
}
REST = {"epsilon": epsilon, "activation": activation, "a user's hook": users_hook}


@pytest.mark.parametrize("way", [*WAYS, *REST])
def test_the_copy_and_the_hash_are_of_the_model_as_it_is(tiny, way):
    """They were made once: after an edit a float64 reference of the old weights was compared with the new model (2.8 nats
    where 2.4e-5 were true), and the provenance gave the old hash."""
    model = tiny("Llama")
    adapter = kv.wrap(model)
    first = kv.compare(adapter, PROMPT, **SETTINGS)
    with torch.no_grad():
        {**WAYS, **REST}[way](model)
    second = kv.compare(adapter, PROMPT, **SETTINGS)
    assert second.steps.max_abs_logit.max() < 1e-3
    assert (second.provenance["weights"] != first.provenance["weights"]) == (way in WAYS)


def test_a_copy_lives_as_long_as_the_call(tiny):
    adapter = kv.wrap(tiny("Llama"))
    with adapter.one_call():
        copy = adapter.at(torch.float64)
        with adapter.one_call():
            assert adapter.at(torch.float64) is copy
        assert adapter.at(torch.float64) is copy
    assert adapter.at(torch.float64) is not copy
    assert adapter.at(None) is adapter.at(adapter.dtype) is adapter


def test_another_attention_is_seen_after_wrap(tiny):
    """The facts went on saying eager, and the pattern was looked for where it no longer was."""
    model = tiny("Llama")
    adapter = kv.wrap(model)
    first = kv.run(adapter, PROMPT, "recompute@float64", record="pattern", max_new_tokens=2, stop="length")
    assert adapter.checked_once(lambda: "of eager", "a check") == "of eager"
    model.set_attn_implementation("sdpa")
    second = kv.run(adapter, PROMPT, "recompute@float64", record="pattern", max_new_tokens=2, stop="length")
    assert (first.derived, second.derived) == ((), ("pattern",))
    assert (first.provenance["attention"], second.provenance["attention"]) == ("eager", "sdpa")
    assert adapter.at(torch.float64).facts.attention == "sdpa"
    assert adapter.checked_once(lambda: "of sdpa", "a check") == "of sdpa"
    with kv.record(adapter, "pattern") as seen:
        model(torch.tensor([PROMPT]))
    assert seen.derived == ("pattern",)
