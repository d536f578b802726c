"""TransformerLens's names of hooks, wherever a site is taken: the same tensors, and a sentence where no site is there."""

from __future__ import annotations

import re

import pytest
import torch
from transformer_lens import utils

import kvinterp as kv
from kvinterp.errors import InputError
from kvinterp.models.convert import hooked_class
from kvinterp.models.hook_names import HOOKS, hook_of

MODEL = "zoo:gqa2-mini"


@pytest.fixture(scope="module")
def models():
    return {kind: kv.load_model(MODEL, kind=kind, dtype="float32") for kind in ("bridge", "native")}


def test_every_site_has_the_hook_that_transformer_lens_calls_it_by():
    for site, hook in HOOKS.items():
        layer = 0 if site == "embed" else None
        name = utils.get_act_name(site) if site == "embed" else utils.get_act_name(site, 3)
        assert hook_of(name) == (site, 3 if layer is None else layer)
        assert hook_of(hook) == hook_of(hook.removeprefix("attn.")) == (site, layer)
    assert hook_of("blocks.2.hook_out") == ("resid_post", 2)
    assert hook_of("resid_post") is None


@pytest.mark.hooked
def test_a_hook_gives_the_tensor_that_transformer_lens_gives(models):
    """Recorded by the hook's name, on every kind: run_with_cache of the HookedTransformer has the same bits."""
    hooked = kv.load_model(MODEL, kind="hooked", dtype="float32")
    assert isinstance(hooked.model, hooked_class())
    tokens = torch.tensor([[5, 9, 11, 7]])
    _, cache = hooked.model.run_with_cache(tokens)
    names = ["blocks.1.attn.hook_pattern", "blocks.3.hook_resid_post", "blocks.0.attn.hook_z"]
    for kind, model in {"hooked": hooked, **models}.items():
        with kv.record(model, names, positions="all") as seen:
            model.model(tokens)
        assert set(seen.kept) == {("pattern", 1), ("resid_post", 3), ("z", 0)}
        for name in names:
            torch.testing.assert_close(seen[name], cache[name], rtol=0, atol=0 if kind == "hooked" else 1e-4)


def test_a_hook_names_a_layer_wherever_a_site_is_taken(models):
    model, how = models["native"], {"max_new_tokens": 2, "progress": "none"}
    trace = kv.run(model, "1 + 1 =", record="blocks.2.hook_resid_mid,pattern", layers=[1, 2], max_new_tokens=2)
    assert set(trace.records) == {("resid_mid", 2), ("pattern", 1), ("pattern", 2)}
    assert torch.equal(trace["blocks.2.hook_resid_mid"], trace["resid_mid", 2])
    assert kv.Patch("blocks.1.attn.hook_pattern") == kv.Patch("pattern", (1,))
    assert kv.Patch("hook_resid_post").layers is None
    found = kv.compare(model, "1 + 1 =", record="blocks.1.hook_resid_post,blocks.3.attn.hook_pattern", **how)
    assert set(found.layers["layer"]) == {1}
    assert set(found.heads["layer"]) == {3}
    swept = kv.sweep(model, "1 + 1 =", "blocks.2.hook_resid_post", controls="none", **how)
    assert set(swept.recovery["layer"]) == {2}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.0.mlp.hook_pre", "use mlp.hook_post"),
        ("hook_pos_embed", "use blocks.0.hook_resid_pre"),
        ("blocks.1.attn.hook_patern", "did you mean 'blocks.1.attn.hook_pattern'"),
        ("blocks.99.hook_resid_post", "layer 99 does not exist"),
        ("blocks.1.attn.pattern", "unknown site"),
    ],
)
def test_a_hook_where_no_site_is(models, name, said):
    with pytest.raises(InputError, match=re.escape(said)), kv.record(models["native"], name):
        pass
