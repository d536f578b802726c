"""``layer_cast``: 16-bit weights, everything computed in float32 (Yuan et al. 2025, LayerCast)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvinterp.models import Adapter
from kvinterp.paths.kernels import fixed_order
from kvinterp.paths.kernels.base import KernelMode, Kernels, Operations

aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class LayerCast(Kernels):
    """Weights stay in 16 bits; every activation, every cached key and value and every sum is
    float32.
    """

    def mode(self, adapter: Adapter) -> KernelMode:
        """Widens every 16-bit tensor as it is used."""
        return _LayerCastMode()

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Float32 for 16-bit weights, else the dtype itself."""
        return fixed_order.wide(dtype)


_NARROW = (torch.float16, torch.bfloat16)


class _LayerCastMode(KernelMode):
    def interceptors(self) -> list[Any]:
        return [Operations(self._operation)]

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_view(func):
            return NotImplemented
        if kwargs.get("dtype") in _NARROW:
            kwargs = {**kwargs, "dtype": torch.float32}
        if func is aten.embedding.default:
            return _widened(func(*args, **kwargs))
        written = _written(func)
        args = tuple(a if index in written else _widened(a) for index, a in enumerate(args))
        return func(*args, **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _NARROW else value
    return type(value)(map(_widened, value)) if isinstance(value, list | tuple) else value


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _written(func: Any) -> set[int]:
    return {
        i
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    }
