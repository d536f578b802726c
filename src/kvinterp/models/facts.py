"""What is true of a model whatever runs it, apart from what runs it: hooks ask it, and adapters have it."""

from __future__ import annotations

import dataclasses

from kvinterp.errors import in_one_line
from kvinterp.models.sites import layout_of


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What is true of a model whatever runs it.

    Attributes:
        name: Where it came from, for tables.
        architecture: The transformers class name, or the nearest there is.
        layers: Number of blocks.
        query_heads: Query heads in a block.
        kv_heads: Key/value heads in a block; equal to query_heads without grouped-query attention. The most of any block
            where blocks differ (Gemma 4).
        head_dim: Width of one head; the widest where blocks differ.
        width: Width of the residual stream.
        vocabulary: Number of logits.
        context: Most positions the model may be given.
        windows: For each layer the sliding window in positions, or None where attention sees everything.
        cached_keys_rotated: Whether the cache holds keys after RoPE (transformers) or before it (HookedTransformer).
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
        # It is in every sentence and table, and came from a folder or a hub.
        object.__setattr__(self, "name", in_one_line(self.name))

    def heads_of(self, site: str) -> tuple[int, str]:
        """How many heads a site or a group of sites has and what they are called; ``(0, "")`` where it has none."""
        kind = layout_of(site).head_kind
        return {"query": self.query_heads, "KV": self.kv_heads, "": 0}[kind], f"{kind} head" if kind else ""
