"""What benchmarks/scale.py computes: its fit on numbers that are known, and a model cut to its first layers."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("scale")


def test_a_known_exponent_is_found_and_a_zero_is_left_out(scale: ModuleType) -> None:
    noise = np.random.default_rng(0)
    rows = [
        {
            "sweep": "depth",
            "dtype": "float32",
            "size": size,
            "prompt": at,
            "mean": 3 * size**0.5 * np.exp(noise.normal(0, 0.05)),
        }
        for at in range(8)
        for size in (1, 2, 4, 8, 16)
    ]
    rows[0]["mean"] = 0.0
    (fit,) = scale.exponents(pd.DataFrame(rows))
    assert fit["low"] < 0.5 < fit["high"]
    assert fit["high"] - fit["low"] < 0.1
    assert (fit["n"], fit["zeros"]) == (8, 1)


def test_a_model_cut_to_all_its_layers_is_itself_and_to_fewer_is_what_they_give(scale: ModuleType) -> None:
    model, ids = scale.random_llama(64, 0, 97).double(), torch.arange(8)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, output_hidden_states=True)
        with scale.cut(model, 2) as same:
            assert torch.equal(same(input_ids=ids).logits, whole.logits)
        with scale.cut(model, 1) as first:
            expected = model.lm_head(model.model.norm(whole.hidden_states[1]))
            assert torch.equal(first(input_ids=ids).logits, expected)
    assert len(model.model.layers) == 2


def test_both_paths_are_the_same_steps_of_one_text(scale: ModuleType) -> None:
    model, ids = scale.random_llama(64, 0, 97).double(), torch.arange(10)[None]
    cached, whole = scale.both(model, ids)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, -scale.STEPS :]
    torch.testing.assert_close(cached, expected)
    torch.testing.assert_close(whole, expected)
    assert scale.measured(model, ids, model)["error"] < 1e-12
