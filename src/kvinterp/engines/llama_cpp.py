"""Attention as llama.cpp computes it on a processor, in place of a model's own: what its caches do
to queries, too.

Keys of a quantised cache meet queries in q8_0, those of a 16-bit cache queries in float16. Since
llama.cpp#21038 (April 2026) a quantised cache holds keys and values that a Hadamard matrix turned,
keys in the largest block that divides the head, values in blocks of 64. Its Llamas have a pair's
two halves beside each other, so that other elements share a scale. Without flash attention
probabilities are float16 where values are; with it a single row adds values up in float16, a key
after another.
Sources: llama.cpp src/llama-kv-cache.cpp, ggml/src/ggml-cpu/ops.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.errors import UnsupportedError
from kvinterp.models.transformers_api import register_attention
from kvinterp.models.transformers_cache import text_config
from kvinterp.policies.gguf import BLOCK, Q4_0, Q8_0

NAME = "kvinterp_llama_cpp"
KINDS = {"q8_0": Q8_0, "q4_0": Q4_0}
MOST = 2**34
"""So many steps of adding one number are made at most where values are added up one after
another.
"""
ADDED = "added up in float16"


def llama_cpp(
    cache: str, turned: str = "", way: str = ""
) -> Callable[[nn.Module], list[tuple[Any, str, Any]]]:
    """The attribute of a model's config by which its attention is llama.cpp's: the config, its name
    and the value.

    Args:
        cache: ``"float16"``, ``"q8_0"`` or ``"q4_0"``.
        turned: ``"turned"``: by a Hadamard matrix, as llama.cpp does where 64 divides the head.
        way: ``"rounded"``: probabilities are float16; :data:`ADDED`: so are sums of values, a key
            after another.
    """

    def attributes(model: nn.Module) -> list[tuple[Any, str, Any]]:
        config = text_config(model)
        width = getattr(config, "head_dim", None) or 0
        if not width or (cache != "float16" and width % (64 if turned else BLOCK)):
            return []
        pairs = getattr(config, "model_type", "") in ("llama", "mistral")
        register_attention(NAME, _attention(cache, turned, way, pairs))
        return [(config, "_attn_implementation", NAME)]

    return attributes


def _attention(
    cache: str, turned: str, way: str, pairs: bool
) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if (
            any(more.get(name) is not None for name in ("sliding_window", "softcap", "s_aux"))
            or mask is not None
        ):
            raise UnsupportedError(
                "attention with a window, a cap or sinks is not computed as llama.cpp does: use another."
            )
        query, key = (
            _turn(_paired(each, pairs), turned, each.shape[-1] & -each.shape[-1])
            for each in (query, key)
        )
        value = _turn(value, turned, 64)
        query = _rounded(query, "float16" if cache == "float16" else "q8_0")
        group = query.shape[1] // key.shape[1]
        key, value = (_rounded(each, cache).repeat_interleave(group, 1) for each in (key, value))
        length = query.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(later, -torch.inf)
        if way == ADDED:
            read = _added(scores.float(), value.float()).to(value.dtype)
        else:
            weights = scores.softmax(-1)
            read = (_rounded(weights, "float16") if way else weights) @ value
        return _turn(read, turned, 64).transpose(1, 2).contiguous(), None

    return attention


def _added(scores: Tensor, value: Tensor) -> Tensor:
    """Softmax over one key after another, its sums of values rounded to float16 at each;
    ``[batch, head, row, width]``.
    """
    if scores.numel() * value.shape[-1] > MOST:
        raise UnsupportedError(
            "these texts are too long to be added up a key at a time: give shorter ones."
        )
    most, total = torch.full_like(scores[..., 0], -torch.inf), torch.zeros_like(scores[..., 0])
    sums = torch.zeros(
        *scores.shape[:-1], value.shape[-1], dtype=torch.float16, device=value.device
    )
    for at in range(scores.shape[-1]):
        # A row sees no key behind it.
        score, above = scores[:, :, at:, at], most[:, :, at:]
        now = torch.maximum(above, score)
        shrunk, weight = (above - now).exp(), (score - now).exp()
        here = torch.where(
            (score > above)[..., None],
            (sums[:, :, at:].float() * shrunk[..., None]).half(),
            sums[:, :, at:],
        )
        sums[:, :, at:] = (here.float() + value[:, :, at, None] * weight[..., None]).half()
        total[:, :, at:], most[:, :, at:] = total[:, :, at:] * shrunk + weight, now
    return sums.float() / total[..., None]


def _rounded(tensor: Tensor, kind: str) -> Tensor:
    if kind == "float16":
        return tensor.half().to(tensor.dtype)
    return (
        KINDS[kind]()
        .rounded(tensor.float().unflatten(-1, (-1, BLOCK)))
        .flatten(-2)
        .to(tensor.dtype)
    )


def _paired(tensor: Tensor, pairs: bool) -> Tensor:
    return tensor.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if pairs else tensor


def _turn(tensor: Tensor, turned: str, size: int) -> Tensor:
    """By a symmetric orthonormal Hadamard matrix: twice is not at all."""
    if not turned:
        return tensor
    matrix = torch.ones(1, 1, dtype=tensor.dtype, device=tensor.device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (tensor.unflatten(-1, (-1, size)) @ (matrix * size**-0.5)).flatten(-2)
