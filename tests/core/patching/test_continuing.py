"""A patch at a position that is yet to be written: what it changes, and what it leaves, on the three kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv
from support import nothing_left

PROMPT, OTHER = [3, 17, 44, 9, 71, 26, 58, 5], [90, 12, 64, 8, 33]
NEW, AT = 8, 10
KINDS = [
    pytest.param(kind, marks=[pytest.mark.hooked] if kind == "hooked" else []) for kind in ("native", "hooked", "bridge")
]


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any) -> Any:
    return kv.load_model("zoo:gqa2-mini", kind=request.param, dtype="float64")


def patches(donor: kv.Generation, sites: tuple[str, ...], row: int) -> list[kv.Patch]:
    layers = sorted({layer for _, layer in donor.records})
    return [kv.Patch(site, (layer,), positions=AT, donor=donor[site, layer][row]) for site in sites for layer in layers]


@pytest.mark.parametrize("sites", [("resid_post",), ("k", "v")], ids=str)
def test_a_row_of_another_run_changes_what_follows_and_nothing_before(model: Any, sites: tuple[str, ...]) -> None:
    (other,) = kv.generated(model, [OTHER], ",".join(sites), max_new_tokens=4)
    with nothing_left(model.model):
        found = kv.patched_generation(model, PROMPT, patches(other, sites, 3), max_new_tokens=NEW, record="resid_post")
    first, frame = found.first_change, found.frame
    for layer in range(model.facts.layers):
        clean, patched = (text["resid_post", layer] for text in (found.clean, found.patched))
        assert torch.equal(clean[:AT], patched[:AT])
    assert not torch.equal(clean[AT], patched[AT])
    before = frame[frame["position"] <= AT]
    assert (before["kl"] == 0).all()
    assert (frame["kl"].iloc[len(before) :] > 0).any()
    assert first is None or first > AT
    assert frame["same_context"].tolist() == [first is None or at <= first for at in frame["position"]]
    assert f"the first at position {first}" in str(found) or first is None


def test_law_5_a_runs_own_rows_change_nothing(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    (own,) = kv.generated(model, [PROMPT], "resid_post,k,v", max_new_tokens=NEW)
    for sites in (("resid_post",), ("k", "v")):
        found = kv.patched_generation(model, PROMPT, patches(own, sites, AT), max_new_tokens=NEW)
        assert found.first_change is None
        assert (found.frame["kl"] == 0).all()
        assert "changed none of" in str(found)
    assert "its donor is equal to what it replaces" in caplog.text


def test_sampling_draws_alike_and_a_position_that_is_never_written_is_refused(model: Any) -> None:
    state = torch.get_rng_state()
    patch = kv.Patch("resid_post", (1,), positions=AT, donor=lambda x: x)
    found = kv.patched_generation(model, PROMPT, patch, max_new_tokens=NEW, seed=3, do_sample=True)
    assert found.clean.tokens == found.patched.tokens
    assert torch.equal(state, torch.get_rng_state())
    patch = kv.Patch("resid_post", (1,), positions=60, donor="zero")
    with pytest.raises(kv.InputError, match="position 60 does not exist: the context held"):
        kv.patched_generation(model, PROMPT, patch, max_new_tokens=NEW)


def test_a_first_question_to_a_model_inside_a_forward_is_none_of_its_forwards() -> None:
    """Whatever an adapter asks of a model for the first time, wherever that falls."""
    model = kv.load_model("zoo:gqa2-mini", dtype="float64")
    forward, ran = model.model.model.layers[0].forward, []

    def asks(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append("")
            ran[0] = model.memory.name
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.model.layers[0], "forward", asks)
        (text,) = kv.generated(model, [PROMPT], "resid_post", max_new_tokens=3, logits="keep")
    assert ran == ["past_key_values"]
    assert text.logits is not None
    assert text.logits.argmax(-1).tolist() == list(text.tokens)
