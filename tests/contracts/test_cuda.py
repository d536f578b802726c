"""The laws on a GPU, in float16: `pytest -m cuda`."""

from __future__ import annotations

import pytest

import kvinterp as kv
from kvinterp.paths.runner import CHECKED_SITES
from support import assert_bitwise

PROMPT = [3, 9, 27, 81, 5, 15, 45, 8, 24, 72]
KINDS = ("native", "bridge", pytest.param("hooked", marks=pytest.mark.hooked))

pytestmark = pytest.mark.cuda


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> kv.Adapter:
    return kv.load_model("zoo:mistral-mini", kind=request.param, dtype="float16", device="cuda")


@pytest.mark.parametrize("path", ["cached", "recompute"])
def test_a_path_against_itself_is_bitwise_zero(model: kv.Adapter, path: str) -> None:
    same = kv.compare(model, PROMPT, path, path, max_new_tokens=8, progress="none")
    assert (same.steps["max_abs_logit"] == 0).all()
    assert (same.layers["l2"] == 0).all()
    assert (same.kv["relative_error"] == 0).all()


def test_recording_changes_nothing(model: kv.Adapter) -> None:
    sites = [site for site in CHECKED_SITES if model.supports(site, 0)]
    for path in ("cached", "recompute"):
        bare, recorded = (kv.run(model, PROMPT, path, max_new_tokens=8, record=r, logits="keep") for r in ("", sites))
        assert_bitwise(bare.logits, recorded.logits, f"logits of {path}")


def test_step_0_is_bitwise_equal(model: kv.Adapter) -> None:
    both = kv.compare(model, PROMPT, max_new_tokens=4, record="", progress="none")
    assert both.steps.loc[both.steps["step"] == 0, "max_abs_logit"].item() == 0


def test_in_float64_the_paths_agree_to_rounding(model: kv.Adapter) -> None:
    if model.kind == "bridge":
        pytest.skip("the bridge's eager attention casts its softmax to float32")
    both = kv.compare(model, PROMPT, "cached@float64", "recompute@float64", max_new_tokens=8, record="", progress="none")
    assert both.steps["max_abs_logit"].max() < 1e-11


def test_a_patch_of_its_own_tensors_is_a_no_op_and_leaves_no_hook(model: kv.Adapter) -> None:
    made = kv.sweep(model, PROMPT, "resid_post", max_new_tokens=6, controls="quick", progress="none")
    own = made.controls[made.controls["control"] == "self"]
    assert ((own["recovery"] == 0) | own["recovery"].isna()).all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.source.modules()) or (
        model.kind != "native"
    )


def test_the_audit_finds_no_bug(model: kv.Adapter) -> None:
    verdict = kv.audit(model, lengths=(5, 63, 64, 65), steps=2)
    assert verdict.exit_code == 0, verdict.reading
