"""``fp8``: K and V in eight-bit floating point, with the scale's rule and what becomes of an overflow as fields."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_choice
from kvinterp.errors import InputError, unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import TENSORS, Place, Policy, Selective, running
from kvinterp.policies.blocks import Memory, Settled

FORMATS = {"e4m3": (torch.float8_e4m3fn, 464.0, math.nan), "e5m2": (torch.float8_e5m2, 61440.0, math.inf)}
"""By name: the dtype, the magnitude halfway between its largest and what would come next, and what stands for more than that.

e4m3 is even at its largest, so a tie goes back to it; e5m2 is odd there, so a tie goes up (OCP 8-bit floating point, 5.3).
"""


@dataclasses.dataclass(frozen=True)
class Fp8(Selective):
    """8-bit floating point, after division by a scale.

    Attributes:
        format: ``"e4m3"`` (largest 448, has no Inf) or ``"e5m2"`` (largest 57344).
        scale: A number, 1.0 as in vLLM; or ``"prefill"``: what brings the largest magnitude of the prefill to the format's
            largest, frozen from then on.
        per: ``"tensor"`` or ``"head"``: over what the largest magnitude is taken; layers and K and V always have their own.
        overflow: ``"saturate"`` at the largest, or ``"nonfinite"``: NaN in e4m3, Inf in e5m2.
    """

    SOURCE: ClassVar[str] = "OCP 8-bit floating point 1.0; vLLM and transformers: fp8 KV cache"

    format: str = "e4m3"
    scale: float | int | str = dataclasses.field(default=1.0, kw_only=True)
    per: str = dataclasses.field(default="tensor", kw_only=True)
    overflow: str = dataclasses.field(default="saturate", kw_only=True)
    _largest: ClassVar[dict[tuple[int, str], list[Tensor]] | None] = None
    _settled: ClassVar[Memory]

    def __post_init__(self) -> None:
        """Refuses words and scales that mean nothing."""
        check_choice("policy 'fp8': format", self.format, FORMATS)
        check_choice("policy 'fp8': per", self.per, ("tensor", "head"))
        check_choice("policy 'fp8': overflow", self.overflow, ("saturate", "nonfinite"))
        if not self.reads and not (type(self.scale) in (int, float) and 0 < float(self.scale) < math.inf):
            raise unexpected("policy 'fp8': scale", self.scale, "a number above 0, or prefill")
        if not self.reads and self.per == "head":
            raise InputError("policy fp8 has per=head with one scale for all heads: give scale=prefill too.")
        super().__post_init__()

    def bits_stored(self, tensor: str, width: int) -> float | None:
        """Eight: a scale belongs to a whole tensor or head."""
        return 8.0 if tensor in TENSORS[self.on] else None

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Where the prompt ends, if its largest magnitude is the scale."""
        return ("prompt",) if self.reads else ()

    @property
    def reads(self) -> bool:
        """Whether rows wait, exact, for a scale that only the end of the prefill gives."""
        return self.scale == "prefill"

    def start(self, facts: ModelInfo) -> Policy:
        """A twin that finds the scale, where it is to be found."""
        super().start(facts)
        return running(self, _largest={}, _settled=Memory()) if self.reads else self

    def written(self, tensor: Tensor, which: str, place: Place) -> Tensor:
        """With a scale that is known, at once; else as it is, its largest magnitude kept until the scale is frozen."""
        if not isinstance(self.scale, str):
            return self.rounded(tensor, self.scale)
        if self._largest is not None and (place.layer, which) not in self._settled:
            self._largest.setdefault((place.layer, which), []).append(self.largest(tensor))
        return tensor

    def seen(self, tensor: Tensor, which: str, place: Place) -> Tensor:
        """With the scale of all that was written before the forward that first reads; of what is held where there is no other."""
        if not self.reads:
            return tensor
        if self._largest is None:
            return self.rounded(tensor, self.scale_of(self.largest(tensor)))
        at = place.layer, which
        found = self._largest[at]
        if at not in self._settled:
            found[:] = [torch.stack(found[:-1] or found).amax(0)]
            self._settled[at] = Settled()
        scale = self.scale_of(found[0])
        if place.rows is not None:
            return self.rounded(tensor, scale)
        return self._settled.at(place, which).read(tensor, place, place.stop, lambda rows, _: self.rounded(rows, scale))

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest magnitude, ``[batch, 1 or kv_head, 1, 1]``: of each sequence, so that a batch changes no number."""
        return tensor.abs().amax((2, 3) if self.per == "head" else (1, 2, 3), keepdim=True).float()

    def scale_of(self, largest: Tensor) -> Tensor:
        """What brings it to the format's largest; 1 of nothing but zeros."""
        return (largest / torch.finfo(FORMATS[self.format][0]).max).masked_fill(largest == 0, 1)

    def rounded(self, tensor: Tensor, scale: float | Tensor) -> Tensor:
        """As it is read back. The casts themselves differ: torch on a CPU saturates where it once gave NaN."""
        dtype, limit, beyond = FORMATS[self.format]
        most = torch.finfo(dtype).max
        scaled = tensor.float() / scale
        kept = scaled.clamp(-most, most).to(dtype).float() * scale
        if self.overflow == "nonfinite":
            over = scaled.abs() > limit if math.isnan(beyond) else scaled.abs() >= limit
            kept = torch.where(over, scaled.sign() * beyond, kept)
        return kept.to(tensor.dtype)
