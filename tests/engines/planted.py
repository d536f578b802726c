"""Engines made of our own model, clean and with a planted fault; each is made by hand, and by none of the judge's own ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

Engine = Callable[[Any, list[int], int], np.ndarray]
"""Of a transformers model, a text and its prompt's length: ``[position]``, log-probs."""


def chosen(logits: Tensor, ids: list[int]) -> np.ndarray:
    rows = logits.double().log_softmax(-1)
    return np.array([np.nan, *(float(rows[t - 1, ids[t]]) for t in range(1, len(ids)))])


@torch.no_grad()
def prefill(model: Any, ids: list[int], cut: int) -> np.ndarray:
    return chosen(model(torch.tensor([ids])).logits[0], ids)


@torch.no_grad()
def decode(model: Any, ids: list[int], cut: int, chunk: int = 1, spoil: Callable[[Any], None] = lambda cache: None,
           by: int = 0, later: Any = None) -> np.ndarray:  # fmt: skip
    """From a cache: the prompt, then some tokens at a time, their positions off by ``by``, by another model if given."""
    cache = DynamicCache(config=model.config)
    parts = [model(torch.tensor([ids[:cut]]), past_key_values=cache).logits[0]]
    spoil(cache)
    for at in range(cut, len(ids), chunk):
        piece = torch.tensor([ids[at : at + chunk]])
        places = torch.arange(at, at + piece.shape[1])[None] + by
        parts.append((later or model)(piece, past_key_values=cache, position_ids=places).logits[0])
    return chosen(torch.cat(parts), ids)


def chunked(model: Any, ids: list[int], cut: int) -> np.ndarray:
    return decode(model, ids, cut, 16)


def position_off(model: Any, ids: list[int], cut: int) -> np.ndarray:
    return decode(model, ids, cut, len(ids), by=1)


def repeated_block(model: Any, ids: list[int], cut: int) -> np.ndarray:
    def spoil(cache: Any) -> None:
        for held in (cache.layers[0].keys, cache.layers[0].values):
            held[:, :, 16:32] = held[:, :, :16].clone()

    return decode(model, ids, cut, len(ids), spoil)


def _blocks(bits: int) -> Callable[[Any], None]:
    """llama.cpp's q8_0 and q4_0 of what the cache holds: blocks of 32, one scale a block."""

    def spoil(cache: Any) -> None:
        for layer in cache.layers:
            for held in (layer.keys, layer.values):
                blocks = held.float().reshape(-1, 32)
                if bits == 8:
                    scale = blocks.abs().amax(-1, keepdim=True) / 127
                    made = (blocks / scale.clamp(min=1e-12)).round() * scale.half().float()
                else:
                    most = blocks.gather(1, blocks.abs().argmax(-1, keepdim=True))
                    scale = most / -8
                    whole = (blocks / torch.where(scale == 0, torch.ones_like(scale), scale) + 8.5).floor().clamp(0, 15)
                    made = (whole - 8) * scale.half().float()
                held.copy_(made.reshape(held.shape).to(held.dtype))

    return spoil


def quantised(bits: int) -> Engine:
    return lambda model, ids, cut: decode(model, ids, cut, len(ids), _blocks(bits))


def rope(scale: float) -> Engine:
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(model)
        wrong.model.rotary_emb.inv_freq.mul_(scale)
        return prefill(wrong, ids, cut)

    return engine


def rope_in(dtype: torch.dtype) -> Engine:
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(model)
        wrong.model.rotary_emb.inv_freq = wrong.model.rotary_emb.inv_freq.to(dtype)
        return prefill(wrong, ids, cut)

    return engine


def eps(value: float) -> Engine:
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(model)
        for module in wrong.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = value
        return prefill(wrong, ids, cut)

    return engine


def stale(share: float) -> Engine:
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        old, seeded = copy.deepcopy(model), torch.Generator().manual_seed(1)
        for parameter in old.parameters():
            noise = torch.randn(parameter.shape, generator=seeded).to(parameter)
            parameter.data += share * parameter.data.float().std().to(parameter) * noise
        return prefill(old, ids, cut)

    return engine


@torch.no_grad()
def warm(value: float) -> Engine:
    return lambda model, ids, cut: chosen(model(torch.tensor([ids])).logits[0].double().detach() / value, ids)


def top_k(count: int) -> Engine:
    @torch.no_grad()
    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        logits = model(torch.tensor([ids])).logits[0]
        least = logits.topk(count).values[:, -1:]
        found = chosen(logits.masked_fill(logits < least, -torch.inf), ids)
        return np.where(np.isfinite(found), found, np.nan)

    return engine


def no_bos(model: Any, ids: list[int], cut: int) -> np.ndarray:
    return np.concatenate([[np.nan], prefill(model, ids[1:], cut - 1)])


def shifted(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """One log-prob too many in front."""
    return np.concatenate([[np.nan, np.nan], prefill(model, ids, cut)[1:-1]])


CLEAN: dict[str, Engine] = {"prefill": prefill, "decode": decode, "chunked": chunked}
FAULTS: dict[str, tuple[Engine, str]] = {
    "rope 2% slow": (rope(0.98), "RoPE frequencies times 0.98"),
    "rope 3% slow, in no list": (rope(0.97), ""),
    "rope in bfloat16": (rope_in(torch.bfloat16), "RoPE frequencies in bfloat16"),
    "position off by one": (position_off, "positions +1"),
    "a cached block repeated": (repeated_block, ""),
    "q8_0 prefix": (quantised(8), "q8_0 cache"),
    "q4_0 prefix": (quantised(4), "q4_0 cache"),
    "temperature 0.9": (warm(0.9), "temperature 0.9"),
    "top-k 20": (top_k(20), "top_k=20"),
    "no BOS": (no_bos, "BOS"),
    "shift by one": (shifted, "shifted by -1"),
    "eps 1e-6": (eps(1e-6), ""),
    "weights 0.1% stale": (stale(0.001), ""),
    "weights 1% stale": (stale(0.01), ""),
}
