"""Errors of K and V by step and by position: the same numbers as every position at every step, in linear room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.comparison import mean_error
from support import Case, cases
from synthetic import by_position, by_step

PROMPTS = [[3, 5, 7, 9, 2, 4], [8, 10, 6, 1, 3, 7]]
SETTINGS = {"max_new_tokens": 9, "progress": "none"}


def sorted_frame(frame: pd.DataFrame) -> pd.DataFrame:
    keys = ["tensor", "layer", "example", "kv_head", *(c for c in ("step", "position") if c in frame), "after_flip"]
    values = ["vectors", "differing", "relative_error", "relative_error_max", "ulp_mean", "ulp_max"]
    return frame[[*keys, *values]].sort_values(keys, ignore_index=True)


@pytest.mark.slow
@cases([Case("llama-gqa", "native", "eager"), Case("mistral-window", "native", "sdpa"), Case("gemma2", "hooked")])
@pytest.mark.parametrize("more", [
    {"b": "recompute@bfloat16", "protocol": "free", "strategy": "top_p(0.99,3.0)", "stop": "length"},
    {"b": "recompute@bfloat16", "strategy": "top_p(0.99,3.0)", "batch_size": 2, "record": "kv,cache_k_pre"},
])  # fmt: skip
def test_the_sums_are_those_of_every_position_at_every_step(load: Any, case: Case, more: dict[str, Any]) -> None:
    """Windows that let go of positions, flips, rows of a batch that end before the others, three tensors."""
    model = load(case, "float32")
    whole = kv.compare(model, PROMPTS, cache_errors="whole", **SETTINGS, **more)
    parts = kv.compare(model, PROMPTS, **SETTINGS, **more)
    assert parts.kv.empty
    assert list(parts.kv.columns) == list(whole.kv.columns)
    for found, wanted in ((parts.kv_steps, by_step(whole.kv)), (parts.kv_positions, by_position(whole.kv))):
        pd.testing.assert_frame_equal(sorted_frame(found), sorted_frame(wanted), rtol=1e-12, check_dtype=False)
    later = whole.kv[whole.kv["step"] > 0]
    for keys in (["tensor", "layer"], ["layer", "position"]):
        wanted_means = later.groupby(keys)["relative_error"].mean()
        np.testing.assert_allclose(mean_error(parts.kv_positions, keys).sort_index(), wanted_means, rtol=1e-12)
    for table in ("steps", "layers", "heads"):
        pd.testing.assert_frame_equal(getattr(parts, table), getattr(whole, table), check_exact=True)
