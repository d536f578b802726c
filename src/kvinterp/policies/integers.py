"""``int8`` and ``int4``: whole rows, a scale for each token and KV head, as most caches that
quantise a token at a time.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, Selective
from kvinterp.policies.blocks import affine, check_blocks, cut


@dataclasses.dataclass(frozen=True)
class Int8(Selective):
    """8-bit integers, scale = largest magnitude of a token's head / 127 in float32, rounded half to
    even.
    """

    SOURCE: ClassVar[str] = "LLM.int8() (arXiv 2208.07339), section 2: absmax, a row at a time"

    def element_bits(self, width: int) -> float:
        """A byte, and four bytes for each head's scale."""
        return 8 + 32 / width

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Computes in float32 and returns the tensor's dtype."""
        rows = tensor.float()
        scale = rows.abs().amax(-1, keepdim=True) / 127
        codes = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
        return (codes * scale).to(tensor.dtype)


@dataclasses.dataclass(frozen=True)
class Int4(Selective):
    """4-bit integers above the minimum of a token's head, or of groups of its elements.

    With a group of 64 and such a multiple as ``head_dim`` it is what transformers' quanto cache
    does at ``axis=0``.

    Attributes:
        group: Elements along ``head_dim`` that share a scale and a minimum; None for the whole
            head.
    """

    SOURCE: ClassVar[str] = "optimum-quanto 0.2.7, qint4, MaxOptimizer, axis 0 (per token)"

    group: int | None = None

    def __post_init__(self) -> None:
        """Checks the group."""
        check_whole("policy 'int4': group", 1 if self.group is None else self.group)
        super().__post_init__()

    def element_bits(self, width: int) -> float:
        """Four bits, and a scale and a minimum of 16 bits for each group."""
        return 4 + 32 / (self.group or width)

    def start(self, facts: ModelInfo) -> Policy:
        """Refuses heads that the groups do not fill."""
        check_blocks(self, self.group or 1, facts.head_dim, facts.name)
        return super().start(facts)

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Computes in the tensor's own dtype, as quanto does."""
        return affine(cut(tensor, self.group or tensor.shape[-1], self), 4).flatten(-2)
