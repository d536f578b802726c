"""The facts of a model, whichever library runs it. Hooks read them, and every adapter has them."""

from __future__ import annotations

import dataclasses

from kvinterp.errors import in_one_line
from kvinterp.models.sites import layout_of


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """The facts of a model, whichever library runs it.

    Attributes:
        name: The name or folder that it was loaded from, for tables.
        architecture: The transformers class name, or the nearest there is.
        layers: Number of blocks.
        query_heads: Query heads in a block.
        kv_heads: Key/value heads in a block; equal to query_heads without grouped-query attention.
            Where blocks differ (Gemma 4), the largest number.
        head_dim: Width of one head; where blocks differ, the largest.
        width: Width of the residual stream.
        vocabulary: Number of logits.
        context: The largest number of positions that the model takes.
        windows: For each layer the sliding window in positions, or None where attention sees
            everything.
        cached_keys_rotated: Whether the cache holds keys after RoPE (transformers) or before it
            (HookedTransformer).
        attention: The attention implementation: eager, sdpa, flash_attention_2, ...
    """

    name: str
    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    context: int
    windows: tuple[int | None, ...]
    cached_keys_rotated: bool
    attention: str

    def __post_init__(self) -> None:
        # Every sentence and table shows the name, and it may be any text.
        object.__setattr__(self, "name", in_one_line(self.name))

    def cache_bytes(self, context: int, bits: float = 16) -> int:
        """The bytes of K and V of one text; at most, where blocks differ or do not all attend.

        Args:
            context: Positions in the cache; a layer with a sliding window keeps no more than the
                window.
            bits: Those of a number, with its share of scales: see ``kvinterp list policies``.
        """
        positions = sum(min(context, window or context) for window in self.windows)
        return int(2 * positions * self.kv_heads * self.head_dim * bits / 8)

    def heads_of(self, site: str) -> tuple[int, str]:
        """The number of heads of a site or a group of sites, and their name; ``(0, "")`` where
        there are none.
        """
        kind = layout_of(site).head_kind
        return {"query": self.query_heads, "KV": self.kv_heads, "": 0}[
            kind
        ], f"{kind} head" if kind else ""
