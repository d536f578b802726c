"""A known difference put where keys and values are written, so that a search for causes can be checked."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.inputs import check_number, check_whole
from kvinterp.policies.base import KV, Place, Policy

__all__ = ["Planted", "check_size", "nudged"]


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

    def __post_init__(self) -> None:
        for name in ("layer", "until"):
            check_whole(name, getattr(self, name), 0)
        check_size(self.units, self.bits)

    def check(self, layers: int) -> None:
        """Refuses a layer that the model does not have: nothing would be planted, and nothing would say so."""
        if self.layer >= layers:
            raise InputError(f"policy {self}: layer {self.layer} does not exist; this model has layers 0 to {layers - 1}.")

    def write(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """K and V of the planted layer, moved; the others as they are."""
        if place.layer != self.layer or (self.until and place.stop > self.until):
            return keys, values
        units = float(self.units)
        return nudged(keys, units, self.bits), nudged(values, units, self.bits)


def check_size(units: object, bits: object) -> None:
    """Raises InputError where a difference is of no size: its units are no number, or the format has no such last place."""
    check_number("units", units)
    check_whole("bits", bits, 2, 53)


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
