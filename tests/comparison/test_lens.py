"""The logit lens and direct logit attribution of the difference: parts that sum, the last layer, and the model's own numbers."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.comparison.attribution import REST
from kvinterp.errors import InputError
from kvinterp.models.unembedding import Unembedding
from support import TINY

ASKED = "12 + 30 ="
TRUTH, OTHER = "cached@float64", "cached+int4@float64"
"""A cache in four bits makes a difference by construction."""
KINDS = [pytest.param("hooked", marks=pytest.mark.hooked), "bridge", "native"]
EXACT = {"hooked": 1e-11, "bridge": 1e-4, "native": 1e-4}
"""Largest residual of a logit: transformers computes its norms in float32 whatever the dtype."""


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


def test_the_parts_sum_to_the_difference(model: Any) -> None:
    """In float64, up to the residual, which is of the size of the reading's own rounding; heads sum to their attention."""
    found = kv.logit_attribution(model, ASKED, TRUTH, OTHER, max_new_tokens=3)
    assert found.provenance["heads"] == ""
    layers, heads = model.facts.layers, model.facts.query_heads
    for (_, step), rows in found.table.groupby(["example", "step"]):
        by_part = rows.groupby("part")["logit_difference"].sum()
        summed = by_part.drop(["total", "head", "head_rest"]).sum()
        assert summed == pytest.approx(by_part["total"], abs=1e-12)
        limit = EXACT[model.kind]
        assert rows.loc[rows["part"] == "residual", "l2"].item() < limit
        for part in ("additions", "unembedding", "softcap"):
            assert rows.loc[rows["part"] == part, "l2"].max() < 1e-11, part
        assert rows.loc[rows["part"] == "head_rest", "l2"].max() < limit
        assert by_part["head"] + by_part["head_rest"] == pytest.approx(by_part["attn"], abs=limit)
        assert len(rows[rows["part"] == "head"]) == layers * heads
        if step:
            assert rows.loc[rows["part"] == "total", "l2"].item() > 1e-3
            assert rows.loc[rows["part"] == "head", "l2"].max() > 1e-3
        else:
            assert (rows["l2"] == 0).all(), "step 0 is the prefill's on both paths"


def test_in_sixteen_bits_the_parts_still_sum(model: Any) -> None:
    """What rounding the stream, the norm and the head left has parts of its own."""
    found = kv.logit_attribution(model, ASKED, "cached", "cached+int4", max_new_tokens=2, answers=(5, 9))
    assert set(found.table["token"]) == {5}
    rows = found.table[found.table["step"] == 1].groupby("part")["logit_difference"].sum()
    trace = [
        kv.run(model, ASKED, path, logits="keep", max_new_tokens=2, continuation=[int(t) for t in lead])
        for path in ("cached", "cached+int4")
        for lead in [kv.run(model, ASKED, "cached", max_new_tokens=1).tokens]
    ]
    one, other = (each.logits[1].double() for each in trace)
    assert rows["total"] == pytest.approx(float((one - other)[5] - (one - other)[9]), abs=1e-12)
    assert rows.drop(["total", "head", "head_rest"]).sum() == pytest.approx(rows["total"], abs=1e-12)


def test_a_soft_cap_and_a_norm_behind_attention_are_said() -> None:
    """Gemma 2 caps its logits and norms what attention adds: the cap is a part, and heads are none."""
    found = kv.logit_attribution(kv.load_model("zoo:gemma2-mini", kind="native"), ASKED, TRUTH, OTHER, max_new_tokens=2)
    rows = found.table[found.table["step"] == 1].set_index("part")["l2"]
    assert rows["softcap"] > 1e-4
    assert rows["residual"] < 1e-4
    assert "head" not in rows
    assert "no sum over its heads" in " ".join(found.sentences())


def test_they_are_kept_and_shown_as_any_result(model: Any, tmp_path: Any) -> None:
    if model.kind != "native":
        pytest.skip("of one kind")
    for made in (
        kv.logit_lens(model, ASKED, TRUTH, OTHER, max_new_tokens=2),
        kv.logit_attribution(model, ASKED, TRUTH, OTHER, max_new_tokens=2),
    ):
        page = made.report(tmp_path / made.VERB)
        read = kv.load(page.parent)
        pd.testing.assert_frame_equal(made.table, read.table, check_exact=True)
        assert read.provenance == made.provenance
        assert len(read.figures()) == 1
        assert made.sentences()[0].replace("'", "&#39;") in page.read_text()


def test_nothing_is_said_where_nothing_differs(model: Any) -> None:
    lens = kv.logit_lens(model, ASKED, "recompute", "recompute", max_new_tokens=2)
    found = kv.logit_attribution(model, ASKED, "recompute", "recompute", max_new_tokens=2)
    assert "equal behind every layer" in lens.sentences()[0]
    assert "nothing wrote a difference" in found.sentences()[0]
    assert (found.table.loc[found.table["part"].isin(["attn", "mlp", "head", *REST]), "l2"] < 1e-4).all()
    for each in (lens, found):
        assert each.figures()


@pytest.mark.parametrize("answers", [(1,), (1, 10**9), ("two words here", 2)])
def test_answers_that_are_none(answers: Any) -> None:
    with pytest.raises(InputError, match=r"expected two answers of one token each"):
        kv.logit_attribution(kv.load_model("zoo:gqa2-mini", kind="native"), ASKED, answers=list(answers))


def test_a_layer_norm_is_parted_too() -> None:
    """GPT-2's final norm takes the mean off, which an RMSNorm does not: the scale is of what is left."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    config = TINY["gpt2"]()
    config.eos_token_id = None
    gpt2 = GPT2LMHeadModel(config).eval()
    found = kv.logit_attribution(gpt2, [[3, 5, 7, 9]], TRUTH, OTHER, max_new_tokens=2)
    rows = found.table[found.table["step"] == 1].groupby("part")["l2"].max()
    assert rows["residual"] < 1e-12 < 1e-3 < rows["total"]
    assert rows["scale"] > 1e-4
