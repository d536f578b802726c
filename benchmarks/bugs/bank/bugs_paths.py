"""Bugs that one kind of call reaches: several tokens at once, padding, generate, a static cache, crop, reordered rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from bank.bug import Bug
from bank.planting import Now, around, bend, blocks, cache_of, length, watched


def _lookahead_from_third_chunk(model: nn.Module, monkeypatch: Any) -> None:
    # From 8 cached tokens on, tokens fed at once see each other's future: a mask that was made for the first chunk's length.
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        past, rows = length(cache_of(keywords), 1), (args[0] if args else keywords["hidden_states"]).shape[1]
        if past >= 8 and rows > 1:
            keywords = keywords | {"attention_mask": torch.ones(1, 1, rows, past + rows, dtype=torch.bool)}
        return forward(*args, **keywords)

    around(blocks(model)[1], wrapper)


def _own_chunk_only(model: nn.Module, monkeypatch: Any) -> None:
    # Several tokens at once see their own chunk and nothing of the cache.
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        past, rows = length(cache_of(keywords), 0), (args[0] if args else keywords["hidden_states"]).shape[1]
        if past and rows > 1:
            mask = torch.ones(rows, past + rows, dtype=torch.bool).tril(past)
            mask[:, :past] = False
            keywords = keywords | {"attention_mask": mask[None, None]}
        return forward(*args, **keywords)

    around(blocks(model)[0], wrapper)


def _chunk_positions(model: nn.Module, monkeypatch: Any) -> None:
    # Every token of a chunk on a cache gets the position of its first.
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past and Now.rows > 1:
            ids = keywords["position_ids"]
            keywords = keywords | {"position_ids": ids[:, :1].expand_as(ids)}
        return forward(*args, **keywords)

    around(watched(model).get_submodule("model.rotary_emb"), wrapper)


def _head_reads_the_row_before(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        hidden = args[0]
        return forward(hidden.roll(1, 1) if Now.past and hidden.shape[1] > 1 else hidden)

    around(watched(model).get_output_embeddings(), wrapper)


def _padding_ignored(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if (
            length(cache_of(keywords))
            and keywords.get("attention_mask") is not None
            and keywords["attention_mask"].ndim == 2
        ):
            keywords = keywords | {"attention_mask": torch.ones_like(keywords["attention_mask"])}
        return forward(*args, **keywords)

    around(model, wrapper)


def _first_row_for_all(model: nn.Module, monkeypatch: Any) -> None:
    bend(model, 1, read=lambda k, v, past, cache: (k[:1].expand_as(k), v[:1].expand_as(v)) if past else (k, v))


def generate_positions(model: nn.Module, monkeypatch: Any) -> None:
    """Makes `generate()` alone give each decoded token the position behind its own."""
    base = type(model)

    @functools.wraps(base.prepare_inputs_for_generation)
    def prepare(self: nn.Module, *args: Any, **keywords: Any) -> dict[str, Any]:
        inputs = base.prepare_inputs_for_generation(self, *args, **keywords)
        past, ids = length(inputs.get("past_key_values")), inputs.get("input_ids")
        if past and ids is not None:
            positions = inputs.get("position_ids")
            if positions is None:
                positions = torch.arange(past, past + ids.shape[1])[None]
            inputs["position_ids"] = positions + 1
        return inputs

    model.__class__ = type(
        base.__name__, (base,), {"prepare_inputs_for_generation": prepare, "__module__": base.__module__}
    )


def _static_writes_one_early(model: nn.Module, monkeypatch: Any) -> None:
    update = StaticLayer.update

    def wrong(self: StaticLayer, keys: Tensor, values: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        past = int(self.get_seq_length()) if self.is_initialized else 0
        found = update(self, keys, values, *args, **keywords)
        if past:
            self.values[:, :, past - 1] = self.values[:, :, past]
        return found

    monkeypatch.setattr(StaticLayer, "update", wrong)


def _crop_keeps_the_wrong_slot(model: nn.Module, monkeypatch: Any) -> None:
    crop = DynamicLayer.crop

    def wrong(self: DynamicLayer, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.is_initialized:
            gone = abs(tokens_to_remove)
            last = self.keys.shape[-2] - gone
            self.keys = self.keys.clone()
            self.keys[..., last - 1, :] = self.keys[..., last, :]
        crop(self, tokens_to_remove)

    monkeypatch.setattr(DynamicLayer, "crop", wrong)


def _values_not_reordered(model: nn.Module, monkeypatch: Any) -> None:
    def wrong(self: DynamicLayer, beam_idx: Tensor) -> None:
        self.keys = self.keys.index_select(0, beam_idx)

    monkeypatch.setattr(DynamicLayer, "reorder_cache", wrong)


BUGS = (
    Bug(
        "lookahead-from-the-third-chunk-on",
        "llama",
        _lookahead_from_third_chunk,
        (1,),
        ("attention",),
        3.6e-02,
        path="chunks",
    ),
    Bug("a-chunk-sees-itself-only", "qwen3", _own_chunk_only, (0,), ("attention",), 6.1e-01, path="chunks"),
    Bug("a-chunk-has-one-position", "olmo", _chunk_positions, (0,), ("Q", "K"), 8.6e-02, path="chunks"),
    Bug("head-reads-the-row-before", "granite", _head_reads_the_row_before, (None, 1, 2), (), 7.1e-01, path="chunks"),
    Bug("padding-ignored-in-decode", "llama", _padding_ignored, (0,), ("attention",), 2.6e-01, path="batch"),
    Bug("padding-ignored-in-decode-qwen2", "qwen2", _padding_ignored, (0,), ("attention",), 1.7e-01, path="batch"),
    Bug("rows-read-the-first-rows-cache", "llama", _first_row_for_all, (1,), ("K", "V"), 6.9e-01, path="batch"),
    Bug("positions-of-generate", "llama", generate_positions, (0, None), (), 1.5e-01, path="generate"),
    Bug("positions-of-generate-qwen3", "qwen3", generate_positions, (0, None), (), 4.0e-01, path="generate"),
    Bug("static-cache-overwrites-the-slot-before", "llama", _static_writes_one_early, (0,), ("V",), 4.1e-02, path="static"),
    Bug("crop-keeps-a-removed-key", "llama", _crop_keeps_the_wrong_slot, (0,), ("K",), 5.0e-02, path="crop"),
    Bug(
        "values-not-reordered",
        "mistral",
        _values_not_reordered,
        (0,),
        ("V",),
        1.1e00,
        config={"sliding_window": None},
        path="reorder",
    ),
)
