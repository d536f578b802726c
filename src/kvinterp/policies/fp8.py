"""``fp8``: K and V in eight-bit floating point, with fields for the rule of the scale and for
overflow.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_choice
from kvinterp.errors import InputError, unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, Selective, running
from kvinterp.policies.blocks import Memory, Settled

FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 464.0, math.nan),
    "e5m2": (torch.float8_e5m2, 61440.0, math.inf),
}
"""By name: the dtype, the magnitude halfway between its largest number and the next one, and the
code for larger magnitudes.

The largest e4m3 number is even, so a tie rounds down to it; that of e5m2 is odd, so a tie rounds up
(OCP 8-bit floating point, 5.3).
"""


@dataclasses.dataclass(frozen=True)
class Fp8(Selective):
    """8-bit floating point, after division by a scale.

    Attributes:
        format: ``"e4m3"`` (largest 448, has no Inf) or ``"e5m2"`` (largest 57344).
        scale: A number, 1.0 as in vLLM; or ``"prefill"``: the scale that brings the largest
            magnitude of the prefill to the format's largest, used from then on.
        per: ``"tensor"`` or ``"head"``: the range of the largest magnitude; layers, and K and V,
            always have their own.
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
        """Raises InputError where a field names no format or no way of scaling."""
        check_choice("policy 'fp8': format", self.format, FORMATS)
        check_choice("policy 'fp8': per", self.per, ("tensor", "head"))
        check_choice("policy 'fp8': overflow", self.overflow, ("saturate", "nonfinite"))
        if not self.reads and not (
            type(self.scale) in (int, float) and 0 < float(self.scale) < math.inf
        ):
            raise unexpected("policy 'fp8': scale", self.scale, "a number above 0, or prefill")
        if not self.reads and self.per == "head":
            raise InputError(
                "policy fp8 has per=head with one scale for all heads: give scale=prefill too."
            )
        super().__post_init__()

    def element_bits(self, width: int) -> float:
        """Eight bits; a scale belongs to a whole tensor or head."""
        return 8.0

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The end of the prompt, if the scale is the prompt's largest magnitude."""
        return ("prompt",) if self.reads else ()

    @property
    def reads(self) -> bool:
        """Whether rows are kept exact because the scale is known only at the end of the prefill."""
        return self.scale == "prefill"

    def start(self, facts: ModelInfo) -> Policy:
        """A copy that finds the scale, if it is ``"prefill"``."""
        super().start(facts)
        return running(self, _largest={}, _settled=Memory()) if self.reads else self

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Rounds rows if the scale is a number; else keeps them exact and notes their largest
        magnitude.
        """
        if not isinstance(self.scale, str):
            return self.rounded(tensor, self.scale)
        if self._largest is not None and (cache_rows.layer, which) not in self._settled:
            self._largest.setdefault((cache_rows.layer, which), []).append(self.largest(tensor))
        return tensor

    def read_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Rounds rows with the scale of the prefill; outside a pass with the scale of the rows
        themselves.
        """
        if not self.reads:
            return tensor
        if self._largest is None:
            return self.rounded(tensor, self.scale_of(self.largest(tensor)))
        at = cache_rows.layer, which
        largest = self._largest[at]
        if at not in self._settled:
            largest[:] = [torch.stack(largest[:-1] or largest).amax(0)]
            self._settled[at] = Settled()
        scale = self.scale_of(largest[0])
        if cache_rows.positions_left is not None:
            return self.rounded(tensor, scale)
        return self._settled.at(cache_rows, which).read(
            tensor, cache_rows, cache_rows.stop, lambda rows, _: self.rounded(rows, scale)
        )

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest magnitude of each sequence, ``[batch, 1 or kv_head, 1, 1]``, so that a batch
        changes no number.
        """
        return tensor.abs().amax((2, 3) if self.per == "head" else (1, 2, 3), keepdim=True).float()

    def scale_of(self, largest: Tensor) -> Tensor:
        """The scale that brings a magnitude to the format's largest; 1 for zeros."""
        return (largest / torch.finfo(FORMATS[self.format][0]).max).masked_fill(largest == 0, 1)

    def rounded(self, tensor: Tensor, scale: float | Tensor) -> Tensor:
        """Rounds to the format and back. Saturates before the cast, because torch versions differ
        in casts that overflow.
        """
        dtype, limit, beyond = FORMATS[self.format]
        most = torch.finfo(dtype).max
        scaled = tensor.float() / scale
        result = scaled.clamp(-most, most).to(dtype).float() * scale
        if self.overflow == "nonfinite":
            over = scaled.abs() > limit if math.isnan(beyond) else scaled.abs() >= limit
            result = torch.where(over, scaled.sign() * beyond, result)
        return result.to(tensor.dtype)
