"""``hadamard``: an orthonormal Walsh-Hadamard matrix turns K and V on their way into the cache, and
back on their way out.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.errors import unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, Selective, running
from kvinterp.policies.blocks import Memory, check_blocks, cut


@dataclasses.dataclass(frozen=True)
class Hadamard(Selective):
    """Spreads each outlier over a block of the head, for the quantiser that follows:
    ``hadamard+q8_0``.

    Turning K back as it is read gives the scores that turning Q too would give, and turning V back
    the output turned back: the matrix is its own inverse. In float64 it is the identity to
        rounding.

    Attributes:
        block: Elements turned together, a power of two; None for the largest that divides
            ``head_dim``, as llama.cpp turns K. It turns V in blocks of 64.
    """

    SOURCE: ClassVar[str] = "llama.cpp#21038 (April 2026); QuaRot (arXiv 2404.00456)"

    block: int | None = None
    _memory: ClassVar[Memory | None] = None

    def __post_init__(self) -> None:
        """Raises InputError where the block is no power of two."""
        if self.block is not None and (
            type(self.block) is not int or self.block < 2 or self.block & (self.block - 1)
        ):
            raise unexpected(
                "policy 'hadamard': block", self.block, "a power of two, as in hadamard(64)"
            )
        super().__post_init__()

    def start(self, facts: ModelInfo) -> Policy:
        """A copy that turns each row back once; refuses heads that the blocks do not fill."""
        check_blocks(self, self.block or 2, facts.head_dim, facts.name)
        super().start(facts)
        return running(self, _memory=Memory())

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Multiplies by sums and differences within each row, so that chunks give the same bits."""
        size = self.block or tensor.shape[-1] & -tensor.shape[-1]
        rows = cut(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), size, self)
        half = 1
        while half < size:
            left, right = rows.unflatten(-1, (-1, 2, half)).unbind(-2)
            rows = torch.stack([left + right, left - right], -2).flatten(-3)
            half *= 2
        return (rows * size**-0.5).flatten(-2).to(tensor.dtype)

    def read_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Multiplies again, since the matrix is its own inverse; in a pass each row once, however
        often it is read.
        """
        # If another policy evicts rows, positions are not those from start to stop.
        if self._memory is None or cache_rows.positions_left is not None:
            return self.write_rows(tensor, which, cache_rows)
        return self._memory.at(cache_rows, which).read(
            tensor,
            cache_rows,
            cache_rows.stop,
            lambda rows, _: self.write_rows(rows, which, cache_rows),
        )
