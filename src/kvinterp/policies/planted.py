"""A known difference put where keys and values are written, so that a search for causes can be checked."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvinterp.policies.base import KV, Place, Policy

__all__ = ["Planted", "nudged"]


@dataclasses.dataclass(frozen=True)
class Planted(Policy):
    """Moves K and V of one layer by a few units in the last place as they are written (docs/laws.md, law 6).

    Attributes:
        layer: The layer whose cache writes are changed.
        units: How many units in the last place of ``bits``.
        bits: Significant bits of the format whose last place is meant: 11 is float16, 8 bfloat16, 24 float32.
        until: Only writes of positions before this one are changed; every write for 0.
    """

    layer: int = 0
    units: float = 4.0
    bits: int = 11
    until: int = 0

    def write(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """K and V of the planted layer, moved; the others as they are."""
        if place.layer != self.layer or (self.until and place.stop > self.until):
            return keys, values
        units = float(self.units)
        return nudged(keys, units, self.bits), nudged(values, units, self.bits)


def nudged(tensor: Tensor, units: float, bits: int) -> Tensor:
    """A tensor whose elements are moved by ``units`` in the last of ``bits`` significant bits, signs alternating.

    Args:
        tensor: Any float tensor.
        units: How far.
        bits: Significant bits of the format whose last place is meant.
    """
    _, exponent = torch.frexp(tensor)
    last_place = torch.ldexp(torch.ones_like(tensor), exponent - bits)
    sign = 1 - 2 * (torch.arange(tensor.shape[-1], device=tensor.device) % 2)
    return tensor + units * last_place * sign.to(tensor.dtype)
