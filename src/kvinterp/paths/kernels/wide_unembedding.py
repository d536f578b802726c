"""``wide_unembedding``: the last product, of the residual stream with the unembedding, in float32 over 16-bit streams.

Logits in 16 bits stand on a grid: between 16 and 32 bfloat16 has steps of 0.125. Two of them are then often exactly equal, and
which is chosen hangs on where each is rounded. In float32 they are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvinterp.models import Adapter
from kvinterp.paths.kernels import fixed_order
from kvinterp.paths.kernels.base import KernelMode, Kernels, Operations

aten: Any = torch.ops.aten
_PRODUCTS = {aten.mm.default: 1, aten.addmm.default: 2, aten.bmm.default: 1}
"""The operations that an unembedding can be, and which argument of each is the weights."""


@dataclasses.dataclass(frozen=True)
class WideUnembedding(Kernels):
    """Weights and streams stay in 16 bits; the logits are computed and kept in float32."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """Widens the products that come behind the last block."""
        return _WideUnembeddingMode(adapter.facts.layers)


class _WideUnembeddingMode(KernelMode):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.behind = False
        self.listeners = {("resid_pre", 0): self._begin, ("resid_post", layers - 1): self._end}
        self._wide: tuple[Any, Tensor] | None = None

    def _begin(self, _: Tensor) -> None:
        self.behind = False

    def _end(self, _: Tensor) -> None:
        self.behind = True

    def interceptors(self) -> list[Any]:
        self.behind = False
        return [Operations(self._operation)]

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.behind or func not in _PRODUCTS or args[0].dtype == fixed_order.wide(args[0].dtype):
            return NotImplemented
        place = _PRODUCTS[func]
        return func(*(self._widened(a, index == place) for index, a in enumerate(args)), **kwargs)

    def _widened(self, tensor: Tensor, kept: bool) -> Tensor:
        """In float32; the weights' copy is kept for the next step, as long as they are the same."""
        wide = fixed_order.wide(tensor.dtype)
        if not kept:
            return tensor.to(wide)
        which = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version)
        if self._wide is None or self._wide[0] != which:
            self._wide = which, tensor.to(wide)
        return self._wide[1]
