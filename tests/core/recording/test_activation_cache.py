"""TransformerLens's ActivationCache: out of a trace by the names of its hooks, and into a donor of patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_lens import ActivationCache

import kvinterp as kv

ASKED = "12 + 30 ="


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model("zoo:gqa2-mini", kind="bridge", dtype="float64")


def test_a_trace_becomes_the_cache_that_run_with_cache_gives(model: Any) -> None:
    """Of the recompute path, and of the cached one, whose rows were computed step by step."""
    tokens = model.to_tokens(ASKED)
    sites = "resid_post,z,attn_out,pattern"
    for path in ("recompute", "cached"):
        trace = kv.run(model, ASKED, path, record=sites, positions="all", max_new_tokens=3, stop="length")
        whole = torch.cat([tokens, torch.tensor([trace.tokens[:2]])], 1)
        _, plain = model.model.run_with_cache(whole)
        made = trace.to_activation_cache(2, model)
        assert isinstance(made, ActivationCache)
        assert len(made) == 4 * model.facts.layers
        for name in ("blocks.1.hook_resid_post", "blocks.3.attn.hook_z", "blocks.0.hook_attn_out"):
            torch.testing.assert_close(made[name], plain[name], rtol=0, atol=1e-5)
        torch.testing.assert_close(made["pattern", 1][:, :, -1], plain["pattern", 1][:, :, -1], rtol=0, atol=1e-6)
    newest = kv.run(model, ASKED, "cached", record="resid_post,pattern", max_new_tokens=2).to_activation_cache()
    assert newest["resid_post", 0].shape == (1, 1, model.facts.width)
    assert newest["pattern", 0].shape == (1, model.facts.query_heads, 1, tokens.shape[1] + 1)


def test_a_cache_is_a_donor(model: Any) -> None:
    """A patch from what run_with_cache kept gives the bits of one from what kv.record kept."""
    tokens, other = model.to_tokens(ASKED), model.to_tokens("45 + 11 =")
    _, cache = model.model.run_with_cache(other)
    with kv.record(model, "resid_post", positions="all") as seen:
        model.model(other)
    shown = []
    for donor in (kv.donor_trace(cache, other), kv.donor_trace(seen, other[0].tolist())):
        with kv.patched(model, kv.Patch("blocks.1.hook_resid_post", positions="all", steps=(0,), donor=donor)):
            shown.append(model.model(tokens))
    assert torch.equal(*shown)
    assert not torch.equal(shown[0], model.model(tokens))
