"""``truncate(bits)``: the low bits of every number's mantissa are dropped as it enters the cache.

What the KV cache error study says that quantising does ("truncating the least significant bits in
each value's binary representation"). The formats that are deployed divide by a scale and round:
they are policies of their own. A number moves towards zero by less than ``2**(bits - m)`` of
itself, where m is how many bits the dtype's mantissa has (float16 10, bfloat16 7, float32 23), so
keys and values shrink on average.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.errors import UnsupportedError
from kvinterp.policies.base import CacheRows, Selective

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class Truncate(Selective):
    """Sets the lowest bits of the mantissa to zero.

    Attributes:
        bits: How many.
    """

    SOURCE: ClassVar[str] = "the KV cache error study: truncating the least significant bits"

    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("truncate's bits", self.bits, 0, 52)

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Clears the low bits of rows; elements that are not finite stay."""
        mantissa = -round(math.log2(torch.finfo(tensor.dtype).eps))
        if self.bits > mantissa:
            raise UnsupportedError(
                f"policy {self} drops {self.bits} bits of {str(tensor.dtype).removeprefix('torch.')}, whose mantissa has "
                f"{mantissa}: give at most {mantissa}."
            )
        words = tensor.view(WORDS[tensor.element_size()])
        return torch.where(
            tensor.isfinite(), (words & -(1 << self.bits)).view(tensor.dtype), tensor
        )
