"""Call plans as checks of an audit: clean models pass, planted faults fail where they are."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvinterp as kv
from kvinterp.auditing import exercises
from kvinterp.auditing.called import plans_of
from kvinterp.paths.calls import call_named

PROMPTS = [list(range(3, 40)), list(range(7, 44))]


@pytest.fixture
def checked(monkeypatch):
    """The checks of all plans of a model, and no others."""
    monkeypatch.setattr(exercises, "CHECKS", {})
    return lambda model, calls="all": {one.name: one for one in exercises.exercise(model, PROMPTS, calls=plans_of(calls))}


def native(name="zoo:gqa2-mini"):
    return kv.load_model(name, dtype="float64", kind="native")


@pytest.mark.parametrize("name", ["zoo:gqa2-mini", pytest.param("zoo:gemma2-mini", marks=pytest.mark.slow)])
def test_a_clean_model_passes_every_plan(checked, name):
    # Compiled code is tried elsewhere: here every signature is checked as it is called, which torch.compile cannot trace.
    plans = [plan for plan in plans_of("all") if call_named(plan).kernels]
    found = checked(native(name), ",".join(plans))
    # Gemma 2 in float64 gives NaN for rows of pads alone, with a cache or without.
    unclear = {"call=padded(left,5)"} if "gemma2" in name else set()
    assert {name for name, one in found.items() if one.status != "passed"} == unclear
    assert len(found) == len(plans) > 7


def test_a_crop_that_leaves_rows_fails_drafts_and_a_reused_prefix(checked, monkeypatch):
    monkeypatch.setattr(DynamicCache, "crop", lambda cache, count: None)
    found = checked(native(), "forked(4),verified(3),generate")
    failed = {name for name, one in found.items() if one.status == "failed"}
    assert {"call=forked(4)", "call=verified(3)"} == failed
    assert found["call=generate"].status == "passed"


def test_a_fault_behind_pads_is_placed_in_its_layer(checked, monkeypatch):
    update = DynamicCache.update

    def rolled(cache, keys, values, layer, *args, **kwargs):
        given = update(cache, keys, values, layer, *args, **kwargs)
        if layer == 2 and keys.shape[2] > 1 and torch.equal(keys[:, :, 0], keys[:, :, 1]):
            cache.layers[2].values = values.roll(1, 2)
        return given

    monkeypatch.setattr(DynamicCache, "update", rolled)
    found = checked(native(), "padded(left,5),beams(3)")
    assert (found["call=padded(left,5)"].status, found["call=padded(left,5)"].layer) == ("failed", 2)
    assert found["call=beams(3)"].status == "passed"


def test_a_plan_that_was_named_and_cannot_be_run_is_refused_before_anything_runs():
    """One of "all" that a model cannot run is listed as not run; of one that was asked for a PASS would say nothing."""
    with pytest.raises(kv.InputError, match="reuses 10000 tokens"):
        kv.audit(native(), calls="beams(3),forked(10000)")
    hooked = kv.load_model("zoo:gqa2-mini", kind="bridge")
    with pytest.raises(kv.KvinterpError, match="cannot be told"):
        kv.audit(hooked, calls="padded(left,5)")
