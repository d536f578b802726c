"""More right models by one who had not read the audit: pages, wider caches, wider decodes, a memory that is attended, folded heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.llama.modeling_llama import LlamaAttention

from bank.clean_blind import _Attention, _of, plain, seen
from bank.planting import around, rotate
from bank.small import small


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _WideCache(_Attention):
    """The cache holds float32, which a 16-bit model attends in float32."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is None:
            return plain(query, key, value, mask, self.scaling)
        key, value = cache.update(_wide(key), _wide(value), self.layer_idx)
        return plain(_wide(query), key, value, mask, self.scaling).to(query.dtype)


class _WideDecode(_Attention):
    """One token attends in float32, a prompt in the model's dtype."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if query.shape[-2] > 1:
            return plain(query, key, value, mask, self.scaling)
        return plain(_wide(query), _wide(key), _wide(value), mask, self.scaling).to(query.dtype)


class _Paged(_Attention):
    """Keys and values stand in pages of four, the pages in another order, what is left of the last full of old numbers."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is None:
            return plain(query, key, value, mask, self.scaling)
        key, value = cache.update(key, value, self.layer_idx)
        visible, left = seen(query, key, mask), -key.shape[-2] % 4
        order = torch.arange(key.shape[-2] + left).view(-1, 4).flip(0).flatten()
        key, value = (F.pad(each, (0, 0, 0, left), value=3.0)[..., order, :] for each in (key, value))
        return plain(query, key, value, F.pad(visible, (0, left))[..., order], self.scaling)


class _Doubled(_Attention):
    """Two queries' scores are one product with keys and their turned halves: rotary positions as complex numbers."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if query.shape[-2] > 1:
            return plain(query, key, value, mask, self.scaling)
        half = self.head_dim // 2
        key, value = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (key, value))
        scores = query[..., half:] @ key[..., half:].transpose(-1, -2) + query[..., :half] @ key[..., :half].transpose(
            -1, -2
        )
        scores = (scores * self.scaling).masked_fill(~seen(query, key, mask), torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ value


def _one_hot(**config: Any) -> nn.Module:
    """The embedding of one token is a product with the whole table."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if args[0].shape[1] > 1:
            return forward(*args, **keywords)
        return F.one_hot(args[0], len(self.weight)).to(self.weight.dtype) @ self.weight

    model: Any = small("qwen2", **config)
    around(model.model.embed_tokens, wrapper)
    return model


def _folded_head(**config: Any) -> nn.Module:
    """The last norm leaves its weight to the head, where one token comes."""

    def norm(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        stream = args[0]
        if stream.shape[1] > 1:
            return forward(*args, **keywords)
        wide = stream.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(stream.dtype)

    def head(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if args[0].shape[1] > 1:
            return forward(*args, **keywords)
        return F.linear(args[0], self.weight * self.of_the_norm)

    model: Any = small("mistral", **config)
    model._supports_logits_to_keep = lambda: False  # One row that is kept of many is none that came alone.
    model.lm_head.of_the_norm = model.model.norm.weight
    around(model.model.norm, norm)
    around(model.lm_head, head)
    return model


def _memory(**config: Any) -> nn.Module:
    """A decoder that attends to a memory, whose keys and values are made anew at each call; the cache holds its own alone."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        ids = args[0] if args else keywords["input_ids"]
        memory = self.memory.to(self.embed_tokens.weight.dtype).expand(len(ids), -1, -1)
        cache = keywords.get("past_key_values")
        if cache is None and keywords.get("use_cache"):
            cache = DynamicCache(config=self.config)
        both = None if cache is None else EncoderDecoderCache(cache, DynamicCache(config=self.config))
        out = forward(*args, **keywords | {"encoder_hidden_states": memory, "past_key_values": both})
        if cache is not None:
            out.past_key_values = cache
        return out

    model: Any = small("bart", **config)
    decoder = model.model.decoder
    drawn = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(2))
    decoder.register_buffer("memory", drawn)
    around(decoder, wrapper)
    return model


def _llama(made: type, dtype: str = "float32") -> tuple[Callable[[], nn.Module], str, bool]:
    return partial(_of, "llama", LlamaAttention, made, dtype=dtype), dtype, False


BUILDS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "llama-cache-in-float32": _llama(_WideCache, "float16"),
    "llama-decode-in-float32": _llama(_WideDecode, "bfloat16"),
    "llama-pages": _llama(_Paged),
    "llama-pages-float16": _llama(_Paged, "float16"),
    "llama-scores-by-halves": _llama(_Doubled),
    "qwen2-one-hot": (_one_hot, "float32", False),
    "mistral-folded-head": (_folded_head, "float32", False),
    "bart-with-a-memory": (_memory, "float32", False),
}
"""As in ``clean_blind.py``."""
