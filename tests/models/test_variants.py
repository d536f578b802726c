"""Copies of a model in another dtype: they follow the weights, hear nobody, and run what the model runs."""

import pytest
import torch

import kvinterp as kv

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
WAYS = {
    "through .data, which torch does not count": lambda weight: weight.data.mul_(1.5),
    "in place": lambda weight: weight.mul_(1.5),
    "one number": lambda weight: weight.data.view(-1)[:1].add_(1.0),
    "another tensor": lambda weight: setattr(weight, "data", weight.data * 1.5),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_copy_and_the_fingerprint_follow_an_edit_of_the_weights(tiny, way):
    """They were made once: after an edit a float64 reference of the old weights was compared with the new model, and
    the provenance gave the old hash."""
    model = tiny("Llama")
    adapter = kv.wrap(model)
    settings = {"b": "recompute@float64", "max_new_tokens": 3, "stop": "length", "progress": "none"}
    first, copy = kv.compare(adapter, PROMPT, **settings), adapter.at(torch.float64)
    assert adapter.at(torch.float64) is copy
    with torch.no_grad():
        WAYS[way](model.lm_head.weight)
    second = kv.compare(adapter, PROMPT, **settings)
    assert second.steps.max_abs_logit.max() < 1e-4
    assert second.provenance["weights"] != first.provenance["weights"]
    assert adapter.at(torch.float64) is not copy


def test_a_copy_made_while_recording_has_no_hooks_of_the_recorder(tiny):
    """The copy is a deep one, and had the recorder's hooks on it: a recorder that was done went on growing."""
    model = tiny("Llama")
    theirs = []
    model.register_forward_hook(lambda *_: theirs.append(1))
    adapter = kv.wrap(model)
    with kv.record(adapter, "resid_post,pattern") as seen:
        model(torch.tensor([PROMPT]))  # A recorder that hears nothing is an error.
        kv.run(adapter, PROMPT, "recompute@float64", max_new_tokens=2, stop="length")
    copy = adapter.at(torch.float64).model
    hooks = [hook for m in copy.modules() for held in (m._forward_hooks, m._forward_pre_hooks) for hook in held.values()]
    assert len(hooks) == len(theirs[:1]) == 1, "the user's hook is kept, ours are not"
    before = len(seen.recorded_steps)
    kv.run(adapter, PROMPT, "recompute@float64", max_new_tokens=2, stop="length")
    assert len(seen.recorded_steps) == before


def test_experts_run_in_float64(tiny):
    """torch's grouped product refuses float64, so that no mixture of experts had a float64 reference."""
    model = tiny("Mixtral", head_dim=10, num_local_experts=4, num_experts_per_tok=2)
    compared = kv.compare(model, PROMPT, b="recompute@float64", max_new_tokens=3, stop="length", progress="none")
    assert compared.steps.max_abs_logit.max() < 1e-3
    assert len(kv.run(model.double(), PROMPT, record="mlp_out", max_new_tokens=2, stop="length").tokens) == 2


@pytest.mark.parametrize(("query", "heads"), [("multi_query", 1), ("new_decoder_architecture", 4), ("neither", 4)])
def test_falcon_says_how_many_kv_heads_its_cache_has(tiny, query, heads):
    """It says so in fields of its own; with the wrong number the cache table could not be put together."""
    fields = {name: name == query for name in ("multi_query", "new_decoder_architecture")}
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tiny(
        "Falcon", sizes=sizes, alibi=False, **fields, **({"num_kv_heads": 2} if heads == 4 and query != "neither" else {})
    )
    assert kv.wrap(model).facts.kv_heads == heads
    compared = kv.compare(model, PROMPT, max_new_tokens=2, stop="length", progress="none")
    assert set(compared.kv_steps["kv_head"]) == set(range(heads))
