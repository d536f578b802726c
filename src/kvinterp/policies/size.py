"""How many bytes of K and V a real implementation stores under a policy. kvinterp itself keeps the
model's dtype.
"""

from __future__ import annotations

import torch

from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, ComposedPolicy, Policy, Selective


def bits_at(
    policy: Policy, facts: ModelInfo, plain: float, tensor: str, layer: int, head: int | None = None
) -> float:
    """Bits of an element, with its share of scales.

    Args:
        policy: The policy.
        facts: The model's.
        plain: The bits where no policy with a format of its own acts: those of the cache's dtype.
        tensor: ``"k"`` or ``"v"``.
        layer: The layer.
        head: The KV head; None for one that the policy changes.
    """
    bits = plain
    for part in policy.policies if isinstance(policy, ComposedPolicy) else (policy,):
        if isinstance(part, Selective):
            elsewhere = head is not None and part.heads and head not in part.heads
            if elsewhere or not part.applies_to(tensor, layer):
                continue
        stored = part.bits_stored(tensor, facts.head_dim)
        bits = bits if stored is None else stored
    return float(bits)


def cache_bytes(policy: Policy, facts: ModelInfo, plain: float, context: int) -> int:
    """The bytes of K and V of one text in all layers: the rows that stay, and each in its format.

    Args:
        policy: The policy.
        facts: The model's.
        plain: The bits of the cache's dtype.
        context: Positions, all of them the prompt's; a layer with a sliding window keeps no more
            than the window.
    """
    bits = 0.0
    kept = {
        window: _rows_kept(policy, facts, min(context, window or context))
        for window in set(facts.windows)
    }
    for layer, window in enumerate(facts.windows):
        rows = kept[window]
        for tensor in ("k", "v"):
            exact = min(policy.exact_rows(tensor, rows), rows)
            for head in range(facts.kv_heads):
                own = bits_at(policy, facts, plain, tensor, layer, head)
                bits += facts.head_dim * (own * (rows - exact) + plain * exact)
    return round(bits / 8)


def _rows_kept(policy: Policy, facts: ModelInfo, rows: int) -> int:
    """How many rows of a prompt a policy keeps in a layer and KV head."""
    if not policy.evicts:
        return rows
    nothing = torch.zeros(()).expand(1, facts.kv_heads, rows, facts.head_dim)
    cache_rows = CacheRows(0, 0, rows, facts.cached_keys_rotated, prompt=rows)
    kept = policy.start(facts).keep(nothing, nothing, cache_rows)
    return rows if kept is None else kept.shape[-1]
