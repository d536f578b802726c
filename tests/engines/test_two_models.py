"""One checkpoint in two libraries: rounding where nothing else differs, and the layer of a fault where something does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import kvinterp as kv


def run(model: Any, ids: list[int]) -> kv.Trace:
    return kv.run(model, ids, "recompute", record="resid_post", max_new_tokens=3, stop="length", logits="keep")


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [kv.load_model("zoo:gemma2-mini", kind=kind, dtype="float32") for kind in ("hooked", "native")]


@pytest.mark.parametrize("fault", ["", "no soft cap in layer 2"])
def test_the_layer_where_two_libraries_part_is_named(fault: str, models: list[Any]) -> None:
    """SAELens#469: one Gemma 2 in two libraries gave other outputs, and layer 0 was named, whose difference is rounding."""
    ids = list(models[0].encode("Question: Ben has 3 pens and buys 4 more. How many pens does Ben have?"))
    attention = models[1].model.model.layers[2].self_attn
    scaling = attention.scaling
    try:
        attention.scaling = scaling * (1.05 if fault else 1)
        found = kv.compare_traces(*(run(model, ids) for model in models))
    finally:
        attention.scaling = scaling
    said = found.where()
    assert "recompute (hooked) against recompute (native)" in said
    if fault:
        assert "differ by more than rounding from resid_post of layer 2 on" in said, said
        assert "up to resid_post of layer 1 they differ by rounding" in said
        assert "layer 2, resid_post: first recorded tensor that differs by more than rounding" in said
        assert "layer 0" not in said
    else:
        assert "hooked and native differ by rounding" in said, said
        assert "first recorded tensor" not in said


def test_without_its_model_a_trace_says_that_rounding_is_not_known(models: list[Any], tmp_path: Any) -> None:
    traces = [run(model, [1, 20, 30, 40]) for model in models]
    assert traces[0].model() is models[0]
    assert pickle.loads(pickle.dumps(traces[0])).model() is None
    assert copy.copy(traces[0]).model() is None
    traces[1].save(tmp_path)
    assert "is not known: run both in this process" in kv.compare_traces(traces[0], kv.Trace.load(tmp_path)).where()
