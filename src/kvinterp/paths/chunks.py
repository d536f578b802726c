"""Where a prompt is cut that a path feeds in pieces: the one place that says it."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor


def in_chunks(tokens: Int[Tensor, "batch position"], chunk: int | None) -> tuple[Tensor, ...]:
    """The tokens in pieces, of so many positions each but the last, which may have fewer; in one piece for None."""
    return tokens.split(min(chunk or tokens.shape[1], tokens.shape[1]), 1)
