"""What is heard of a loop that somebody else owns is copied when it is heard: they may go on writing into that memory."""

from __future__ import annotations

import copy

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.auditing.blocks import BlockModel, referenced

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
DECODED = {"max_new_tokens": 3, "stop": "length", "progress": "none"}


def in_place(layer):
    """A forward that computes what the layer computes, in the memory that it is given: the stream of all blocks is one tensor."""
    attention, mlp, before, between = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm

    def forward(hidden_states, **given):
        added = attention(hidden_states=before(hidden_states), **given)[0]
        hidden_states += added
        added.zero_()
        written = mlp(between(hidden_states))
        hidden_states += written
        written.zero_()
        return hidden_states

    return forward


@pytest.fixture(scope="module")
def models():
    """A model, and one that computes the same in place."""
    plain = kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32").model
    other = copy.deepcopy(plain)
    for layer in other.model.layers:
        layer.forward = in_place(layer)
    return plain, other


def test_a_model_that_computes_in_place_gives_every_verb_the_same_numbers(models):
    """Falcon adds attention to what its MLP returned and Gemma 4 scales its stream, both in place; the bits are the same, and
    so is every number of a comparison and a sweep."""
    sites = "resid_post,resid_mid,attn_out,mlp_out,kv"
    compared = [kv.compare(model, [PROMPT], record=sites, **DECODED) for model in models]
    swept = [
        kv.sweep(model, [PROMPT], site, positions=where, controls="none", **DECODED).recovery
        for site, where in (("attn_out", "newest"), ("resid_post", "all"), ("resid_mid", "newest"))
        for model in models
    ]
    pairs = [[each.layers for each in compared], [each.steps for each in compared]]
    for one, other in (*pairs, swept[:2], swept[2:4], swept[4:]):
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_blocks_that_compute_in_place_do_not_change_what_an_audit_refers_to(models):
    """An audit gives each block the reference's rows: it must neither be told what became of them, nor let them be changed."""
    tokens, seen = torch.tensor([PROMPT]), []
    for model in models:
        with referenced(BlockModel(kv.wrap(model)), tokens) as hooks:
            before = [*hooks.reference.inputs.values(), *hooks.reference.outputs.values()]
            kept = [tensor.clone() for tensor in before]
            hooks.feed(4, 6, hooks.feed(0, 4)[1])
            seen.append([*kept, *hooks.inputs.values(), *hooks.outputs.values()])
            assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
