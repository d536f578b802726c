"""Computes attention scores and patterns beside a fused kernel, which does not return them.

SDPA returns the values that the heads read, and no probabilities. Eager attention would return
them, but it is another kernel with other rounding. So SDPA runs as it is, and the pattern is
computed a second time from SDPA's queries, keys, mask and scale, in float64, where the order of
additions hardly matters: paths with equal queries and keys have equal patterns. The result is
float32 (float64 in a float64 model), is called *derived* wherever it is shown, and cannot be
patched, since SDPA does not read it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SDPA = torch.nn.functional.scaled_dot_product_attention
DERIVED = ("attn_scores", "pattern")
"""The sites that are derived under SDPA."""


class Call(NamedTuple):
    """SDPA's arguments by name."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """SDPA's arguments as they are, whether they were given by name or by place."""
    return Call(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def sdpa_arguments(
    *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]:
    """SDPA's arguments, with the KV heads repeated so that every query head has its own."""
    query, key, value, mask, is_causal, scale, enable_gqa = sdpa_call(*args, **kwargs)
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = (
            repeat(t, "... kv_head key dim -> ... (kv_head shared) key dim", shared=shared)
            for t in (key, value)
        )
    return query, key, value, mask, is_causal, scale


def derived_attention(
    site: str,
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: str = "all",
) -> Float[Tensor, "batch head row key"]:
    """Computes the scores or the pattern from the arguments of an attention kernel.

    Args:
        site: ``"attn_scores"`` or ``"pattern"``.
        query: Queries as the kernel reads them, after RoPE.
        key: Keys as the kernel reads them, one for every query head or for every group of them.
        mask: SDPA's mask: true where a key is read, or numbers that are added to the scores; None
            for no mask.
        is_causal: SDPA's own argument: whether query i reads keys 0 to i only.
        scale: The factor of the scores; None for one over the square root of the head's width.
        rows: ``"all"`` query positions, or the ``"newest"`` alone.

    Returns:
        Scores, -inf where a key is masked, or probabilities; 0 in a row that reads no key. Float32,
        or float64 for float64.
    """
    # Apple's GPUs have no float64.
    wide = torch.float32 if query.device.type == "mps" else torch.float64
    count, keys = query.shape[-2], key.shape[-2]
    first = count - 1 if rows == "newest" else 0
    # Neither the modes of a path's kernels nor autocast may change what is only looked at.
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.autocast(query.device.type, enabled=False),
    ):
        # The query heads of a group are rows of one product with the keys that they share.
        rows_of_group = query[..., first:, :].to(wide)
        rows_of_group = rows_of_group.reshape(*key.shape[:2], -1, query.shape[-1])
        scores = rows_of_group @ key.to(wide).transpose(-1, -2)
        scores = scores.view(*query.shape[:2], count - first, keys)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            reads = torch.ones(count, keys, dtype=torch.bool, device=query.device).tril()[first:]
            scores = scores.masked_fill(~reads, -torch.inf)
        if mask is not None:
            mask = mask[..., first:, :] if mask.dim() > 1 and mask.shape[-2] == count else mask
            scores = (
                scores.masked_fill(~mask, -torch.inf)
                if mask.dtype == torch.bool
                else scores + mask.to(wide)
            )
        if site == "pattern":
            masked = scores if is_causal or mask is not None else None
            scores = scores.softmax(-1)
            if masked is not None:
                reads_nothing = (masked == -torch.inf).all(-1, keepdim=True)
                scores = scores.masked_fill(reads_nothing, 0.0)
        return scores.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
