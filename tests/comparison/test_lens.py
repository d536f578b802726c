"""The logit lens of the difference: the last layer, and the model's own numbers."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.models.unembedding import Unembedding

ASKED = "12 + 30 ="
TRUTH, OTHER = "cached@float64", "cached+int4@float64"
"""A cache in four bits makes a difference by construction."""
KINDS = [pytest.param("hooked", marks=pytest.mark.hooked), "bridge", "native"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any) -> Any:
    return kv.load_model("zoo:gqa2-mini", kind=request.param)


def test_behind_the_last_layer_the_lens_reads_the_logits(model: Any) -> None:
    """In float64; one layer earlier it does not, or reading would show nothing."""
    table = kv.logit_lens(model, ASKED, TRUTH, OTHER, max_new_tokens=3).table
    layers = model.facts.layers
    assert sorted(table["layer"].unique()) == [*range(-1, layers + 1)]
    own, last = (table[table["layer"] == at].reset_index(drop=True) for at in (layers, layers - 1))
    pd.testing.assert_frame_equal(own.drop(columns="layer"), last.drop(columns="layer"), rtol=0, atol=1e-9)
    assert (own["kl_to_last"].abs() < 1e-12).all()
    assert (table.loc[table["layer"] == 0, "kl_to_last"] > 1e-3).all()
    later = table[table["step"] > 0]
    assert (later.loc[later["layer"] == -1, "kl"] == 0).all(), "both are fed the same token"
    assert (later.loc[later["layer"] == layers, "kl"] > 0).all()


def test_the_lens_reads_what_transformer_lens_reads(model: Any) -> None:
    """``ActivationCache.accumulated_resid`` through TransformerLens's own ln_final and unembed."""
    if model.kind != "hooked":
        pytest.skip("of the HookedTransformer")
    streams = torch.randn(3, model.facts.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = model.at(torch.float64).model
    with torch.no_grad():
        plain = wide.unembed(wide.ln_final(streams[:, None]))[:, 0]
    torch.testing.assert_close(Unembedding(model).logits(streams), plain, rtol=0, atol=1e-12)
