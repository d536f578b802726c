"""TransformerLens's names of hooks, wherever a site is taken: the same tensors, and a sentence where no site is there."""

from __future__ import annotations

import pytest
import torch
from transformer_lens import utils

import kvinterp as kv
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
