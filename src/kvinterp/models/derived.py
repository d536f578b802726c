"""Scores and patterns worked out beside a fused kernel, which never shows its own.

SDPA hands back what the heads read and keeps the probabilities to itself. Running eager attention instead would show them
and take away the very kernel whose rounding is looked for. So the kernel runs as it is, and from the queries, keys, mask and
scale that it was given the pattern is worked out once more, in float64, where the order of the additions hardly tells: paths
whose queries and keys are equal have equal patterns. What comes out is in float32 (float64 in a float64 model), is called
*derived* wherever it is shown, and cannot be patched, since the kernel does not read it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SDPA = torch.nn.functional.scaled_dot_product_attention
DERIVED = ("attn_scores", "pattern")
"""The sites that are derived where attention is SDPA."""


def sdpa_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]:
    """SDPA's arguments by name, with every query head given its own KV head."""
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    return query, key, value, attn_mask, is_causal, scale


def derived_attention(
    site: str,
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: str = "all",
) -> Float[Tensor, "batch head row key"]:
    """The scores or the pattern that belong to what an attention kernel was given.

    Args:
        site: ``"attn_scores"`` or ``"pattern"``.
        query: Queries as the kernel reads them, after RoPE.
        key: Keys as the kernel reads them, one for every query head.
        mask: What SDPA takes: true where a key is read, or numbers that are added to the scores; None for no mask.
        is_causal: Whether query i reads keys 0 to i only, as SDPA's own argument says.
        scale: What scores are multiplied by; one over the square root of the head's width for None.
        rows: ``"all"`` query positions, or the ``"newest"`` alone.

    Returns:
        Scores, -inf where a key is masked, or probabilities; 0 in a row that reads no key. Float32, or float64 for float64.
    """
    # Apple's GPUs have no float64.
    wide = torch.float32 if query.device.type == "mps" else torch.float64
    count, keys = query.shape[-2], key.shape[-2]
    first = count - 1 if rows == "newest" else 0
    # Neither the modes of a path's kernels nor autocast are to reach what is only looked at.
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.autocast(query.device.type, enabled=False),
    ):
        scores = query[..., first:, :].to(wide) @ key.to(wide).transpose(-1, -2)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            reads = torch.ones(count, keys, dtype=torch.bool, device=query.device).tril()[first:]
            scores = scores.masked_fill(~reads, -torch.inf)
        if mask is not None:
            given = mask[..., first:, :] if mask.dim() > 1 and mask.shape[-2] == count else mask
            scores = scores.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else scores + given.to(wide)
        if site == "pattern":
            nothing = (scores == -torch.inf).all(-1, keepdim=True)
            scores = scores.softmax(-1).masked_fill(nothing, 0.0)
        return scores.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
