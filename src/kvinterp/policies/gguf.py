"""The block formats of llama.cpp and gguf: 32 elements along ``head_dim`` share a scale, and for
``_1`` a minimum.

Bit for bit those of the ``gguf`` package, the reference of ``ggml-quants.c``: the integers come of
the scale in float32, the values of the same scale in float16. llama.cpp's vector kernels round
otherwise (docs/policies.md).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, Selective
from kvinterp.policies.blocks import check_blocks, cut

BLOCK = 32
SOURCE = "llama.cpp: ggml-quants.c, as in gguf 0.19 quants.py"


@dataclasses.dataclass(frozen=True)
class _Blocks(Selective):
    """Rounds new rows, block by block, as they are written."""

    SOURCE: ClassVar[str] = SOURCE
    BYTES: ClassVar[int]
    """Bytes of a block."""

    @abc.abstractmethod
    def rounded(self, blocks: Tensor) -> Tensor:
        """Blocks in float32 as they are read back, ``[..., 32]``."""

    def element_bits(self, width: int) -> float:
        """The bits of a block, divided by its elements."""
        return 8 * self.BYTES / BLOCK

    def start(self, facts: ModelInfo) -> Policy:
        """Refuses heads that blocks of 32 do not fill."""
        check_blocks(self, BLOCK, facts.head_dim, facts.name)
        return super().start(facts)

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Computes in float32, as the reference does, and returns the tensor's dtype."""
        return self.rounded(cut(tensor.float(), BLOCK, self)).flatten(-2).to(tensor.dtype)


@dataclasses.dataclass(frozen=True)
class Q8_0(_Blocks):  # noqa: N801  # the format's own name
    """8-bit integers, scale = largest magnitude / 127, rounded half away from zero."""

    BYTES: ClassVar[int] = 34

    def rounded(self, blocks: Tensor) -> Tensor:
        """Rounds as the class says."""
        scale = _over(blocks.abs().amax(-1, keepdim=True), 127)
        exact = blocks * _inverse(scale)
        # trunc(2 x fraction) is 1 from a half on, without the sum that rounds 0.49999997 up; + 0.0
        # for an integer's one zero.
        return (exact.trunc() + (2 * exact.frac()).trunc() + 0.0) * _half(scale)


@dataclasses.dataclass(frozen=True)
class _Signed(_Blocks):
    """Integers around 0; the element of largest magnitude, sign and all, is the most negative
    one.
    """

    LOWEST: ClassVar[int]

    def rounded(self, blocks: Tensor) -> Tensor:
        """The first of equal magnitudes counts; an element as large with the other sign is
        clipped.
        """
        scale = _over(blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)), self.LOWEST)
        codes = (
            (blocks * _inverse(scale) + (0.5 - self.LOWEST)).trunc().clamp(0, -2 * self.LOWEST - 1)
        )
        return (codes + self.LOWEST) * _half(scale)


@dataclasses.dataclass(frozen=True)
class Q4_0(_Signed):  # noqa: N801
    """4-bit integers from -8 to 7, scale = the element of largest magnitude / -8."""

    BYTES: ClassVar[int] = 18
    LOWEST: ClassVar[int] = -8


@dataclasses.dataclass(frozen=True)
class Q5_0(_Signed):  # noqa: N801
    """5-bit integers from -16 to 15, scale = the element of largest magnitude / -16."""

    BYTES: ClassVar[int] = 22
    LOWEST: ClassVar[int] = -16


@dataclasses.dataclass(frozen=True)
class _Affine(_Blocks):
    """Integers from 0 on, above the block's minimum."""

    HIGHEST: ClassVar[int]

    def rounded(self, blocks: Tensor) -> Tensor:
        """Scale and minimum are rounded to float16 after the integers were found; a constant block
        has scale 0.
        """
        least = blocks.amin(-1, keepdim=True)
        scale = _over(blocks.amax(-1, keepdim=True) - least, self.HIGHEST)
        codes = ((blocks - least) * _inverse(scale) + 0.5).trunc().clamp(0, self.HIGHEST)
        return codes * _half(scale) + _half(least)


@dataclasses.dataclass(frozen=True)
class Q4_1(_Affine):  # noqa: N801
    """4-bit integers above the minimum, scale = (max - min) / 15."""

    BYTES: ClassVar[int] = 20
    HIGHEST: ClassVar[int] = 15


@dataclasses.dataclass(frozen=True)
class Q5_1(_Affine):  # noqa: N801
    """5-bit integers above the minimum, scale = (max - min) / 31."""

    BYTES: ClassVar[int] = 24
    HIGHEST: ClassVar[int] = 31


def _over(tensor: Tensor, number: int) -> Tensor:
    """Divides by a tensor, because torch on CUDA multiplies by the reciprocal of a plain number
    instead.
    """
    return tensor / torch.full_like(tensor, number)


def _inverse(scale: Tensor) -> Tensor:
    """The reciprocal of a scale; 0 if the scale is too small to have one, as it is stored as 0
    anyway.
    """
    return scale.reciprocal().masked_fill(scale.abs() < torch.finfo(torch.float32).tiny, 0)


def _half(tensor: Tensor) -> Tensor:
    """Rounds to float16, the stored form."""
    return tensor.half().float()
