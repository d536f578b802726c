"""Which attention rows are kept, that they are what the paths computed, and what decided each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.comparison import Comparison, attention_rows, compare_each
from kvinterp.models import Adapter
from kvinterp.paths import strategy_named

OTHER = "cached+int4"
PROMPTS = ["What is one and one? The answer is", "Anna has 3 apples. She buys"]
SHORT: dict[str, Any] = {"max_new_tokens": 6, "stop": "length"}


@pytest.fixture(scope="module")
def model() -> Adapter:
    return kv.load_model("zoo:mistral-mini", kind="native", device="cpu", attention="eager")


@pytest.fixture(scope="module")
def both(model: Adapter) -> Comparison:
    return kv.compare(model, PROMPTS, b=OTHER, record="pattern", **SHORT)


def test_the_rows_are_those_that_the_paths_computed(model: Adapter, both: Comparison) -> None:
    rows = both.attention_rows
    assert set(rows["example"]) == {0, 1}
    step = int(rows.loc[rows["example"] == 0, "step"].iloc[0])
    fed = both.steps.loc[both.steps["example"] == 0, "token_a"].tolist()[: SHORT["max_new_tokens"] - 1]
    for side, path in (("a", "cached"), ("b", OTHER)):
        trace = kv.run(model, PROMPTS[0], path, record="pattern", steps=[step], continuation=fed, **SHORT)
        kept = rows[(rows["example"] == 0) & (rows["step"] == step)]
        for (layer, head), found in kept.groupby(["layer", "head"]):
            whole = trace.records["pattern", layer][0][head].flatten()
            assert found["position"].tolist() == [*range(len(whole))]
            assert found[side].tolist() == whole.float().tolist()


def test_kept_are_the_first_flip_and_the_largest_kl(both: Comparison) -> None:
    for example, steps in both.steps.groupby("example"):
        flips = steps.loc[steps["flipped"] & ~steps["after_flip"], "step"].tolist()
        ranked = steps.sort_values(["kl", "step"], ascending=[False, True])["step"].tolist()
        wanted = [*flips, *(step for step in ranked if step not in flips)][: attention_rows.STEPS]
        rows = both.attention_rows
        assert sorted(set(rows.loc[rows["example"] == example, "step"])) == sorted(wanted)


def test_after_a_flip_another_text_is_not_kept(model: Adapter) -> None:
    free = kv.compare(model, PROMPTS, b="cached+normal(2)", record="pattern", protocol="free", **SHORT)
    assert free.steps["after_flip"].any(), "noise of twice the size of K and V must change a token"
    assert not free.attention_rows["after_flip"].any()
    assert {*free.examples.dropna(subset="flip_index")["flip_index"]} <= {*free.attention_rows["step"]}


def test_batches_and_parts_keep_the_same(model: Adapter, both: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, Comparison] = {}
    compare_each(made.__setitem__, model, PROMPTS, b=OTHER, record="pattern", **SHORT)
    parts = [made[number] for number in sorted(made)]
    for table in ("attention_rows", "tokens", "steps"):
        pd.testing.assert_frame_equal(getattr(Comparison.joined(parts), table), getattr(both, table), check_exact=True)
    # Nothing waits for long: every step's KL is asked for at once, and the same rows are kept.
    monkeypatch.setattr(attention_rows, "WAITING", 0)
    hasty = kv.compare(model, PROMPTS, b=OTHER, record="pattern", **SHORT)
    pd.testing.assert_frame_equal(hasty.attention_rows, both.attention_rows, check_exact=True)


def test_the_distance_is_to_where_another_token_begins() -> None:
    """Moved by less than the distance the draw falls on the same token, moved by more it falls on another."""
    logits, rng = torch.randn(200, 9, generator=torch.Generator().manual_seed(0)), np.random.default_rng(0)
    uniform = torch.from_numpy(rng.uniform(size=200))
    for text in ("top_k(4,1.0)", "top_p(0.8,0.7)"):
        strategy = strategy_named(text)
        chosen, distance = strategy.drawn(logits, uniform)
        moved = [
            strategy.choose(logits, (uniform + by).clamp(0, 1 - 1e-12)) for by in (0.999 * distance, -0.999 * distance)
        ]
        assert all(torch.equal(chosen, tokens) for tokens in moved)
        beyond = [
            strategy.choose(logits, (uniform + by).clamp(0, 1 - 1e-12)) for by in (1.001 * distance, -1.001 * distance)
        ]
        assert bool(((beyond[0] != chosen) | (beyond[1] != chosen) | distance.isinf()).all())
        assert int(distance.isfinite().sum()) > 100
