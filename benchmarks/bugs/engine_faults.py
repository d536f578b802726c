"""Kinds of engine faults that no rule of the judge was chosen beside: each made by hand on a transformers model.

Of each: what makes it, and the words or causes that would be right to name (none: nothing of ours reproduces it, so that only
"unexplained" and "cannot tell" are right).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

Engine = Callable[[Any, list[int], int], np.ndarray]


def chosen(logits: Tensor, ids: list[int]) -> np.ndarray:
    rows = logits.double().log_softmax(-1)
    return np.array([np.nan, *(float(rows[t - 1, ids[t]]) for t in range(1, len(ids)))])


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0]


@torch.no_grad()
def from_cache(model: Any, ids: list[int], cut: int, spoil: Callable[[Any], None], first: Any = None) -> np.ndarray:
    """The prompt, what ``spoil`` does to its cache, and the rest at once; ``first`` computes the prompt where it is given."""
    cache = DynamicCache(config=model.config)
    head = (first or model)(torch.tensor([ids[:cut]]), past_key_values=cache).logits[0]
    spoil(cache)
    return chosen(torch.cat([head, model(torch.tensor([ids[cut:]]), past_key_values=cache).logits[0]]), ids)


def of_model(change: Callable[[Any], None]) -> Engine:
    """A forward of a model that was changed."""

    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        wrong = copy.deepcopy(model)
        change(wrong)
        return chosen(logits_of(wrong, ids), ids)

    return engine


def of_logits(change: Callable[[Tensor, list[int]], Tensor]) -> Engine:
    """Log-probs of changed logits; a token that was cut has none."""

    def engine(model: Any, ids: list[int], cut: int) -> np.ndarray:
        found = chosen(change(logits_of(model, ids).double(), ids), ids)
        return np.where(np.isfinite(found), found, np.nan)

    return engine


def row_zeroed(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys[:, :, 7] = 0


def fp8(cache: Any) -> None:
    for layer in cache.layers:
        for held in (layer.keys, layer.values):
            held.copy_(held.to(torch.float8_e4m3fn).to(held.dtype))


def attention_scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.02


def heads_tiled(model: Any) -> None:
    """Query heads in the order of tiled, not of repeated, KV heads."""
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    order = torch.arange(heads).reshape(groups, -1).T.reshape(-1)
    for layer in model.model.layers:
        for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
            rows = weight.data.reshape(groups, -1, weight.shape[1])
            weight.data = rows[order[:groups] % groups if groups > 1 else [0]].roll(1, 0).reshape(weight.shape).clone()


def interleaved(model: Any) -> None:
    """RoPE of neighbours on weights that were made for halves."""
    for layer in model.model.layers:
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            rows = weight.data.reshape(-1, 2, model.model.layers[0].self_attn.head_dim // 2, weight.shape[1])
            weight.data = rows.transpose(1, 2).reshape(weight.shape).contiguous()


def int8_weights(model: Any) -> None:
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.data.float().abs().amax(-1, keepdim=True) / 127
            module.weight.data = ((module.weight.data.float() / scale).round() * scale).to(module.weight.dtype)


def cast_of(pick: Callable[[Any], list[nn.Module]], dtype: torch.dtype) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for module in pick(model):
            module.register_forward_hook(lambda _, __, out: (out[0] if isinstance(out, tuple) else out).to(dtype).to(
                (out[0] if isinstance(out, tuple) else out).dtype))  # fmt: skip

    return change


def layer_skipped(model: Any) -> None:
    del model.model.layers[-1]


def norm_without_weight(model: Any) -> None:
    model.model.norm.weight.data.fill_(float(model.model.norm.weight.data.float().mean()))


def embedding_scaled(model: Any) -> None:
    tied = model.model.embed_tokens.weight is model.lm_head.weight
    if tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())
    model.model.embed_tokens.weight.data *= 1.05


def adapter_left_out(model: Any) -> None:
    seeded = torch.Generator().manual_seed(2)
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        a, b = (torch.randn(n, 1, generator=seeded) for n in weight.shape)
        weight.data += (0.3 * weight.data.float().std() * a @ b.T / 1.0).to(weight.dtype)


@torch.no_grad()
def window(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """A window of 32 that the model does not have."""
    places = torch.arange(len(ids))
    seen = (places[:, None] >= places) & (places[:, None] - places < 32)
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    return chosen(model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0], ids)


@torch.no_grad()
def pads_attended(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """Eight pads in front, which the mask lets through; positions are right."""
    places = torch.cat([torch.zeros(8, dtype=torch.long), torch.arange(len(ids))])[None]
    out = model(torch.tensor([[ids[0]] * 8 + ids]), position_ids=places).logits[0, 8:]
    return chosen(out, ids)


@torch.no_grad()
def chunk_positions(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """In chunks of 32, each of which counts its positions from one too early."""
    cache, parts = DynamicCache(config=model.config), []
    for number, at in enumerate(range(0, len(ids), 32)):
        piece = torch.tensor([ids[at : at + 32]])
        places = torch.arange(at, at + piece.shape[1])[None] - number
        parts.append(model(piece, past_key_values=cache, position_ids=places).logits[0])
    return chosen(torch.cat(parts), ids)


def two_bos(model: Any, ids: list[int], cut: int) -> np.ndarray:
    return chosen(logits_of(model, [ids[0], *ids])[1:], ids)


def of_another(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """A block of 16 cached rows is another request's."""
    other = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids[:1] + ids[::-1][: cut - 1]]), past_key_values=other)

    def spoil(cache: Any) -> None:
        for layer, alien in zip(cache.layers, other.layers, strict=True):
            layer.keys[:, :, 16:32], layer.values[:, :, 16:32] = alien.keys[:, :, 16:32], alien.values[:, :, 16:32]

    return from_cache(model, ids, cut, spoil)


def few_wrong(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """One token in 40 has the log-prob of the most likely one."""
    logits = logits_of(model, ids)
    found = chosen(logits, ids)
    best = logits.double().log_softmax(-1).amax(-1).numpy()
    found[20::40] = best[19:-1:40]
    return found


def stale_prefix(model: Any, ids: list[int], cut: int) -> np.ndarray:
    old, seeded = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for parameter in old.parameters():
        noise = torch.randn(parameter.shape, generator=seeded).to(parameter)
        parameter.data += 0.01 * parameter.data.float().std().to(parameter) * noise
    return from_cache(model, ids, cut, lambda cache: None, old)


def linear_rope_later(model: Any, ids: list[int], cut: int) -> np.ndarray:
    """Behind the prompt positions go on at half the pace."""
    places = torch.arange(len(ids)).float()
    places[cut:] = cut + (places[cut:] - cut) / 2
    with torch.no_grad():
        return chosen(model(torch.tensor([ids]), position_ids=places[None].long()).logits[0], ids)


def penalised(logits: Tensor, ids: list[int]) -> Tensor:
    for row in range(len(ids)):
        seen = torch.tensor(sorted(set(ids[: row + 1])))
        part = logits[row, seen]
        logits[row, seen] = torch.where(part > 0, part / 1.1, part * 1.1)
    return logits


def min_p(logits: Tensor, ids: list[int]) -> Tensor:
    rows = logits.softmax(-1)
    return logits.masked_fill(rows < 0.05 * rows.amax(-1, keepdim=True), -torch.inf)


def top_p(logits: Tensor, ids: list[int]) -> Tensor:
    ordered = logits.softmax(-1).sort(-1, descending=True)
    cut = (ordered.values.cumsum(-1) - ordered.values) >= 0.9
    return logits.masked_fill(cut.gather(-1, ordered.indices.argsort(-1)), -torch.inf)


def padded_vocabulary(logits: Tensor, ids: list[int]) -> Tensor:
    return torch.cat([logits, logits.new_zeros(len(logits), 64)], -1)


FAULTS: dict[str, tuple[Engine, tuple[str, ...]]] = {
    "a cached row zeroed": (lambda m, i, c: from_cache(m, i, c, row_zeroed), ()),
    "prefix of weights 1% stale": (stale_prefix, ()),
    "attention scale 2% large": (of_model(attention_scale), ()),
    "KV heads in another order": (of_model(heads_tiled), ()),
    "RoPE interleaved": (of_model(interleaved), ()),
    "soft cap of 15": (of_logits(lambda x, ids: 15 * (x / 15).tanh()), ()),
    "repetition penalty 1.1": (of_logits(penalised), ()),
    "min_p 0.05": (of_logits(min_p), ("after",)),
    "top_p 0.9": (of_logits(top_p), ("top_p=0.9",)),
    "64 padded logits in the softmax": (of_logits(padded_vocabulary), ()),
    "two BOS": (two_bos, ("BOS",)),
    "chunks of 32 one position early": (chunk_positions, ("positions -1",)),
    "8 pads attended": (pads_attended, ()),
    "int8 weights": (of_model(int8_weights), ()),
    "logits in bfloat16": (of_model(cast_of(lambda m: [m.lm_head], torch.bfloat16)), ()),
    "residual stream in bfloat16": (of_model(cast_of(lambda m: list(m.model.layers), torch.bfloat16)), ("bfloat16",)),
    "last layer skipped": (of_model(layer_skipped), ()),
    "a block of another request": (of_another, ()),
    "one token in 40 wrong": (few_wrong, ()),
    "fp8 prefix": (lambda m, i, c: from_cache(m, i, c, fp8), ()),
    "final norm without its weights": (of_model(norm_without_weight), ()),
    "embedding 5% large": (of_model(embedding_scaled), ()),
    "a window of 32": (window, ()),
    "an adapter left out": (of_model(adapter_left_out), ()),
    "half pace behind the prompt": (linear_rope_later, ()),
}
