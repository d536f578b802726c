"""The root-cause experiments: each against what can be worked out without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvinterp as kv
from kvinterp.papers.root_causes import accumulation_error, gqa_spread, kv_write_error, precision_ladder, propagation
from kvinterp.papers.studies.root_cause import RootCause
from support import Case

pytestmark = [pytest.mark.bits, pytest.mark.slow]

PROMPT = [5, 9, 2, 30, 7, 7, 41, 12, 3, 8, 19, 22]


def model(load: Any, name: str = "mistral-mini", dtype: str = "float16") -> Any:
    return load(Case(f"zoo:{name}", "native"), dtype)


def test_the_value_products_error_grows_relative_to_the_result_and_the_scores_does_not() -> None:
    table = accumulation_error(lengths=(16, 1024), head_dims=(16,), samples=64, seeds=range(4))
    assert set(table["seed"]) == {0, 1, 2, 3}
    by = table.groupby(["product", "accumulate", "length"])[["mean_relative", "relative_to_result"]].mean()
    for dtype in ("float16", "bfloat16", "float32"):
        for product in ("scores", "values"):
            flat = by["mean_relative"]
            assert flat[product, dtype, 1024] == pytest.approx(flat[product, dtype, 16], rel=0.4)
        grows = by["relative_to_result"]
        assert grows["scores", dtype, 1024] == pytest.approx(grows["scores", dtype, 16], rel=0.6)
        # The result of n terms of random sign is sqrt(n) times smaller than what was added: eight-fold here.
        assert 4 < grows["values", dtype, 1024] / grows["values", dtype, 16] < 16
    # A unit roundoff of float32 is 2 to the 13th smaller than one of float16, and the sums are the same.
    ratio = by["mean_relative"]["values", "float16", 1024] / by["mean_relative"]["values", "float32", 1024]
    assert ratio == pytest.approx(2**13, rel=0.5)
    assert (table["terms"] == np.where(table["product"] == "scores", 16, table["length"])).all()


def test_a_running_sum_is_rounded_at_every_term() -> None:
    # In float16 2048 + 1 is 2048: ones added one by one stop there.
    from kvinterp.papers.root_causes import _added_up

    ones = torch.ones(1, 3000, dtype=torch.float64)
    assert float(_added_up(ones, ones, torch.float16)) == 2048
    assert float(_added_up(ones, ones, torch.float32)) == 3000


def test_a_rounded_block_shows_from_there_on(load: Any) -> None:
    adapter = model(load)
    table = propagation(adapter, [PROMPT], sources=[1, 3])
    assert sorted(zip(table["source"], table["layer"], strict=True)) == [(1, 1), (1, 2), (1, 3), (3, 3)]
    at_source = table["layer"] == table["source"]
    assert (table.loc[at_source, ["l2_growth", "relative_growth"]] == 1).all(axis=None)
    # At the source it is the rounding itself.
    exact = kv.run(adapter.at(torch.float64), PROMPT, "recompute", max_new_tokens=1, record="resid_post")
    stream = exact.records["resid_post", 1][0].flatten().double()
    off = (stream.half().double() - stream).norm() / stream.norm()
    row = table[(table["source"] == 1) & (table["layer"] == 1)].iloc[0]
    assert row["relative_l2"] == pytest.approx(float(off), rel=1e-6)
    # Absolute and relative are the same error, the one over the stream's length; of every layer, since it is exact elsewhere.
    assert row["l2"] == pytest.approx(float((stream.half().double() - stream).norm()), rel=1e-6)
    last = table[(table["source"] == 1) & (table["layer"] == 3)].iloc[0]
    final = exact.records["resid_post", 3][0].flatten().double()
    assert last["l2"] / last["relative_l2"] == pytest.approx(float(final.norm()), rel=1e-6)
    assert last["l2_growth"] == pytest.approx(last["l2"] / row["l2"])


def test_k_and_v_are_equal_at_write_time_under_a_fixed_order_and_differ_under_split_k(load: Any) -> None:
    table = kv_write_error(model(load), [PROMPT], kernels=("batch_invariant", "split_k(4,float16)"), steps=3)
    assert set(table["position"]) == {9, 10, 11}
    by = table.groupby("kernels")["relative_error"].max()
    assert by["batch_invariant"] == 0
    assert 0 < by["split_k(4,float16)"] < 0.01
    assert ((table["share_differing"] > 0) == (table["relative_error"] > 0)).all()
    with pytest.raises(kv.InputError, match="prompt 0 has 12 tokens: expected more than steps=12"):
        kv_write_error(model(load), [PROMPT], steps=12)


def test_the_cause_switched_on_and_off(load: Any) -> None:
    rungs = (("float16", "batch_invariant"), ("float16", "split_k(4,float16)"), ("float32", "native"))
    table = precision_ladder(model(load), [PROMPT], rungs, max_new_tokens=6)
    by = table.set_index(["dtype", "kernels"])
    assert not table["failed"].any()
    assert by.loc[("float16", "batch_invariant"), "max_abs_logit"] == 0
    assert by.loc[("float16", "batch_invariant"), "bitwise_equal_steps"] == by.loc[("float16", "batch_invariant"), "steps"]
    assert by.loc[("float16", "split_k(4,float16)"), "rms_logit"] > 100 * by.loc[("float32", "native"), "rms_logit"]


@pytest.mark.parametrize(("name", "shared"), [("llama-mini", 1), ("gqa2-mini", 2), ("mqa-mini", 8)])
def test_an_error_in_one_kv_head_touches_the_query_heads_that_share_it(load: Any, name: str, shared: int) -> None:
    table = gqa_spread([model(load, name)], [PROMPT], positions=(-1,))
    assert (table["query_heads_per_kv_head"] == shared).all()
    assert (table["heads_touched"] == shared).all()
    assert (table[["attn_out", "resid_post", "final", "kl"]] > 0).all(axis=None)


FEW: dict[str, Any] = {"prompts": "arithmetic:1", "device": "cpu"}


def test_all_of_them_at_once_with_figures(tmp_path: Any) -> None:
    asked = RootCause(
        ("zoo:mistral-mini", "zoo:mqa-mini"),
        **FEW,
        ladder_prompts=1,
        ladder_steps=1,
    )
    outcome = asked.run(tmp_path, progress="none")
    tables = outcome.tables
    assert set(tables) == {
        "findings",
        "accumulation",
        "propagation",
        "kv_write",
        "ladder",
        "gqa",
    }
    assert set(tables["gqa"]["query_heads_per_kv_head"]) == {4, 8}
    drawn = {path.stem for path in outcome.files}
    assert {f"root_cause_{name}" for name in ("accumulation", "propagation", "kv_write", "ladder", "gqa")} <= drawn
    with pytest.raises(kv.InputError, match="the list of models is empty"):
        RootCause(()).run(None)
