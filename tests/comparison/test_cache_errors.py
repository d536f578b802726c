"""Errors of K and V by step and by position: the same numbers as every position at every step, in linear room."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.comparison import mean_error
from kvinterp.comparison.forecast import forecast, say
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


def test_a_row_that_ended_before_the_others_of_its_batch_gives_no_more(load: Any) -> None:
    model = load(Case("llama-gqa", "native", "eager"))
    # A token that the first prompt decides at a later step, and the second not at all, ends the text of the first alone.
    one, two = (kv.run(model, prompt, max_new_tokens=9, stop="length").tokens for prompt in PROMPTS)
    end = next(token for step, token in enumerate(one) if token not in two and one.index(token) == step > 0)
    before = model.model.generation_config.eos_token_id
    model.model.generation_config.eos_token_id = end
    try:
        together, alone = (kv.compare(model, PROMPTS, "cached", "recompute@bfloat16", batch_size=size, **SETTINGS)
                           for size in (2, 1))  # fmt: skip
    finally:
        model.model.generation_config.eos_token_id = before
    ended = together.kv_positions[together.kv_positions["example"] == 0]
    assert ended["position"].max() == len(PROMPTS[0]) + one.index(end) - 1 < together.kv_positions["position"].max()
    pd.testing.assert_frame_equal(sorted_frame(together.kv_positions), sorted_frame(alone.kv_positions), rtol=1e-12)


def test_what_it_will_take_is_said_before_it_starts(load: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = load(Case("llama-gqa", "native", "sdpa"))
    for keep in ("aggregated", "whole"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvinterp"):
            made = kv.compare(model, PROMPTS, cache_errors=keep, stop="length", **SETTINGS)
        sites = ("resid_post", "pattern", "cache_k", "cache_v")
        told = forecast(model.facts, sites, model.facts.layers, [6, 6], 9, keep)
        assert str(told) in caplog.text
        assert f"{sum(told.rows.values()):,} rows" in caplog.text
        for name in ("steps", "layers", "heads", "kv_steps", "kv"):
            assert told.rows[name] == len(getattr(made, name)), name
        # In the matched protocol a position may stand there twice, before and after a flip.
        assert len(made.kv_positions) <= told.rows["kv_positions"] == 2 * 2 * 2 * model.facts.layers * 2 * (6 + 8)
        numbers = sum(getattr(made, name).memory_usage(index=False).sum() for name in told.rows)
        assert numbers <= told.bytes


def test_a_thousand_steps_are_linear_and_what_is_much_is_a_warning(load: Any, caplog: pytest.LogCaptureFixture) -> None:
    facts = load(Case("llama-gqa", "native", "sdpa")).facts
    sites = ("cache_k", "cache_v")
    few, many = (forecast(facts, sites, 4, [16], steps, "aggregated") for steps in (500, 1000))
    assert sum(many.rows.values()) < 2.1 * sum(few.rows.values())
    whole = forecast(facts, sites, 32, [16], 1000, "whole")
    assert whole.rows["kv"] == sum(16 + step for step in range(1000)) * 32 * 2 * facts.kv_heads
    # A command that another test ran in this process may have let the package speak while the model was loaded.
    caplog.clear()
    with caplog.at_level(logging.INFO, "kvinterp"):
        say(many)
        say(whole)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "cache_errors='aggregated' is linear" in caplog.records[1].message


def test_what_is_kept_is_one_of_two(load: Any) -> None:
    with pytest.raises(kv.InputError, match="cache_errors='all' was given: expected"):
        kv.compare(load(Case("llama-gqa", "native", "sdpa")), PROMPTS, cache_errors="all", **SETTINGS)


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_rows_that_both_paths_hold_are_lined_up_by_position(load: Any, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside two traces whose rows are matched one by one, by the positions that the recorder kept of them."""
    monkeypatch.setattr("kvinterp.paths.model_cache.CHECKED_NUMBERS", 1)
    model, steps = load(Case("llama-gqa", "native", "eager")), 5
    a, b = kv.Cached("h2o(0.2,0.2)", cache=cache), kv.Cached("sinks(1,3)+low_rank(4)", cache=cache)
    given = {"max_new_tokens": steps, "stop": "length", "continuation": [4, 9, 2, 7]}
    prompt = [3, 5, 7, 9, 2, 4, 11, 6, 80, 13]
    found = kv.compare(model, prompt, a, b, progress="none", cache_errors="whole", **given)
    traces = [kv.run(model, prompt, path, record="kv", positions="all", **given) for path in (a, b)]
    rows = found.kv.set_index(["step", "tensor", "layer", "kv_head"]).sort_index()
    for (step, tensor, layer, head), together in rows.groupby(level=[0, 1, 2, 3]):
        held = [trace.records["cache_positions", layer][step][head].tolist() for trace in traces]
        both = sorted(set(held[0]) & set(held[1]))
        assert together["position"].tolist() == both
        site = {"K": "cache_k", "V": "cache_v"}[tensor]
        vectors = [
            trace.records[site, layer][step][head][[mine.index(position) for position in both]].double()
            for trace, mine in zip(traces, held, strict=True)
        ]
        wanted = (vectors[0] - vectors[1]).norm(dim=-1) / vectors[1].norm(dim=-1)
        np.testing.assert_allclose(together["relative_error"], wanted, rtol=1e-12)
        # fmt: off
        line = found.kv_steps.query(
            "step == @step and tensor == @tensor and layer == @layer and kv_head == @head").iloc[0]
        # fmt: on
        assert (line["let_go_a"], line["let_go_b"]) == tuple(len(prompt) + step - len(mine) for mine in held)
        assert line["vectors"] == len(both)
        np.testing.assert_allclose(
            line[["relative_error", "relative_error_max"]].astype(float), [wanted.mean(), wanted.max()]
        )
    assert rows.groupby(level=0).size().loc[1] < rows.groupby(level=0).size().loc[0]
    for found_table, whole in ((found.kv_steps, by_step(found.kv)), (found.kv_positions, by_position(found.kv))):
        pd.testing.assert_frame_equal(sorted_frame(found_table), sorted_frame(whole), rtol=1e-12, check_dtype=False)


def test_a_path_that_lets_go_of_rows_holds_the_others_to_the_bit(load: Any) -> None:
    """Beside a full path over the same tokens the first layer's K and V are equal, whatever was let go of in between."""
    model = load(Case("llama-gqa", "native", "eager"))
    found = kv.compare(model, [3, 5, 7, 9, 2, 4, 11, 6], "cached+sinks(1,3)", "cached", stop="length", **SETTINGS)
    first = found.kv_steps[found.kv_steps["layer"] == 0]
    assert (first["differing"] == 0).all()
    assert first.groupby("step")["let_go_a"].first().tolist() == [0, *range(4, 12)]
    assert (found.kv_steps["let_go_b"] == 0).all()
    assert found.kv_steps[found.kv_steps["layer"] == 1]["differing"].max() > 0


def test_traces_are_lined_up_by_position_as_paths_are(load: Any) -> None:
    model = load(Case("llama-gqa", "native", "eager"))
    prompt, paths = [3, 5, 7, 9, 2, 4, 11, 6, 80, 13], ("cached+h2o(0.2,0.2)", "cached+knorm(0.4)")
    given = {"max_new_tokens": 4, "stop": "length", "continuation": [4, 9, 2]}
    record: dict[str, Any] = {"record": "kv,pattern,resid_post", "logits": "keep"}
    found = kv.compare(model, prompt, *paths, record=record["record"], progress="none", cache_errors="whole", **given)
    traces = [kv.run(model, prompt, path, positions="all", **record, **given) for path in paths]
    again = kv.compare_traces(*traces, cache_errors="whole")
    for table in ("steps", "layers", "heads", "kv_steps", "kv_positions", "kv"):
        pd.testing.assert_frame_equal(getattr(again, table), getattr(found, table), check_exact=True)
    assert again.provenance["lets_go"] == found.provenance["lets_go"] == ["a", "b"]
    for how, more in (("positions='all'", {}), ("every head", {"positions": "all", "heads": [0, 1]})):
        part = kv.run(model, prompt, paths[0], **more, **record, **given)
        with pytest.raises(
            kv.InputError, match=f"lets go of rows, so .* cannot be lined up by position: record it with {how}"
        ):
            kv.compare_traces(part, part)
