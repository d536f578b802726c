"""A compressed cache that drops rows, and one that counts positions from those left: told apart, in a comparison and an audit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM

import kvinterp as kv
from kvinterp.models.positions import counted, counted_by
from support import random_model

COUNTED, GOES_ON = "positions are counted from the rows that are left", "positions go on"


class CountsRows(DynamicCache):
    """Keeps four rows and the newest twelve, and is asked by the model how many it has."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *given: Any, **more: Any) -> Any:
        read = super().update(key_states, value_states, layer_idx, *given, **more)
        layer = self.layers[layer_idx]
        if layer.keys.shape[2] > 16:
            layer.keys, layer.values = (torch.cat([t[:, :, :4], t[:, :, -12:]], 2) for t in (layer.keys, layer.values))
        return read


class GoesOn(CountsRows):
    """The same, and answers with how many it was given."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *given: Any, **more: Any) -> Any:
        self.given = {**getattr(self, "given", {}), layer_idx: self.get_seq_length(layer_idx) + key_states.shape[2]}
        return super().update(key_states, value_states, layer_idx, *given, **more)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return getattr(self, "given", {}).get(layer_idx, 0)

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> Any:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        rows = self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0
        return rows + new, self.get_seq_length(layer_idx) - rows


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(LlamaForCausalLM, vocab_size=131, initializer_range=0.2, max_position_embeddings=256)


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(110, 130, (1, count), generator=torch.Generator().manual_seed(1))


def _step(model: Any, cache: Any) -> Any:
    def step(ids: Any, held: Any) -> Any:
        held = cache() if held is None else held
        return model(ids, past_key_values=held).logits, held

    return step


def test_the_two_are_told_apart_and_measured(model: Any) -> None:
    adapter = kv.wrap(model)
    rows, on = (counted(adapter, cache, _tokens(42)) for cache in (CountsRows, GoesOn))
    assert rows is not None
    assert on is not None
    assert (rows.fed, rows.position, on.fed, on.position) == (41, 16, 41, 41)
    assert (on.moved, rows.told) == (0, on.told)
    assert rows.moved is not None
    assert rows.moved > 0.01
    assert counted(adapter, DynamicCache, _tokens(42)) is None
    assert counted(adapter, CountsRows, _tokens(9)) is None


def test_a_sliding_window_counts_on(model: Any) -> None:
    slides = random_model(MistralForCausalLM, vocab_size=131, num_hidden_layers=1, sliding_window=8)
    found = counted(kv.wrap(slides), lambda: DynamicCache(config=slides.config), _tokens(20))
    assert found is not None
    assert found.position == found.fed == 19
    assert found.told is not None
    assert found.told < 1e-3


@pytest.mark.parametrize(("cache", "position"), [(CountsRows, 16), (GoesOn, 41), (DynamicCache, None)])
def test_a_step_of_ones_own_is_seen_by_the_numbers_it_computes_with(model: Any, cache: Any, position: int | None) -> None:
    with torch.no_grad():
        found = counted_by(_step(model, cache), _tokens(42))
    assert (None if found is None else found.position) == position


@pytest.mark.parametrize(("cache", "said"), [(CountsRows, COUNTED), (GoesOn, GOES_ON)])
def test_a_comparison_and_an_audit_say_which_of_the_two_it_is(model: Any, cache: Any, said: str) -> None:
    other = ({COUNTED, GOES_ON} - {said}).pop()
    prompt = _tokens(30)[0].tolist()
    where = kv.compare(model, [prompt], kv.Cached(cache=cache), "recompute", max_new_tokens=3, stop="length").where()
    assert said in where
    assert other not in where
    assert "of the largest" in where
    verdict = kv.audit(
        full=lambda ids: model(ids, use_cache=False).logits, step=_step(model, cache), lengths=(24,), programs=3, seconds=10
    )
    assert verdict.verdict == "bug"
    assert said in str(verdict)
    assert other not in str(verdict)


def test_a_cache_that_keeps_all_is_told_nothing(model: Any) -> None:
    class Own(DynamicCache):
        pass

    both = kv.compare(model, [_tokens(30)[0].tolist()], kv.Cached(cache=Own), "recompute", max_new_tokens=3)
    assert "rows" not in both.where()
    assert "compressed" not in both.provenance


@pytest.mark.parametrize(("cache", "said"), [(CountsRows, COUNTED), (GoesOn, GOES_ON)])
def test_a_cache_that_may_drop_rows_may_not_count_them(model: Any, cache: Any, said: str) -> None:
    """Declared lossy, its uses are held against itself, which excused where it puts the next token."""
    verdict = kv.audit(model, cache=cache, lossy="yes", programs=2, seconds=5)
    assert said in str(verdict)
    wrong = {check.name for check in verdict.checks if check.status == "wrong"}
    assert ("positions" in wrong) == (said == COUNTED)
    assert "decode step" not in wrong
