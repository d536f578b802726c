"""``batch_invariant``: one fixed order for every product, norm and softmax, whatever the shape.

Source: thinking-machines-lab/batch_invariant_ops, which leaves attention's products as they are:
here they are fixed too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvinterp.models import Adapter
from kvinterp.models.derived import SDPA, sdpa_arguments
from kvinterp.models.hooks import Functions
from kvinterp.paths.kernels import fixed_order
from kvinterp.paths.kernels.base import (
    MATMUL,
    KernelMode,
    Kernels,
    Operations,
    drops_out,
    refuse_opaque_attention,
)

aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class BatchInvariant(Kernels):
    """One order of additions for every product, norm and softmax, whatever the shape (see
    ``fixed_order``).
    """

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts every reduction; raises UnsupportedError where attention is a kernel torch
        does not see.
        """
        refuse_opaque_attention(adapter, self)
        return _BatchInvariantMode()


class _BatchInvariantMode(KernelMode):
    def __init__(self) -> None:
        super().__init__()
        self._inside, self._operations = False, Operations(self._operation)

    def interceptors(self) -> list[Any]:
        return [Functions(self._function), self._operations]

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.resting:
            return NotImplemented
        if func is SDPA:
            if drops_out(*args, **kwargs):
                return NotImplemented
            return self._own(fixed_order.attention, *sdpa_arguments(*args, **kwargs))
        # torch does these as one product of many rows or as a batch of products, depending on
        # shapes and strides; the two would be added up in different orders here, so it is always
        # the first.
        if func is torch.nn.functional.linear:
            return self._own(_linear, *args, **kwargs)
        if func in MATMUL and len(args) == 2 and args[1].dim() == 2 and args[0].dim() > 2:
            return self._own(_linear, args[0], args[1].t())
        return NotImplemented

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or self.resting:
            return NotImplemented
        if func in _ELEMENTWISE:
            return self._own(
                lambda: fixed_order.in_fixed_pieces(lambda x: func(x, *args[1:], **kwargs), args[0])
            )
        fixed = _FIXED.get(func)
        return NotImplemented if fixed is None else self._own(fixed, *args, **kwargs)

    def _own(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._inside = self._inside, True
        try:
            with self._operations.aside():
                return function(*args, **kwargs)
        finally:
            self._inside = before


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return fixed_order.product(a, b).to(a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    total = fixed_order.product(a, b)
    total = total if alpha == 1 else total * alpha
    return (total if beta == 0 else total + bias.to(total.dtype) * beta).to(a.dtype)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return fixed_order.product(a, b, "one by one").to(a.dtype)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    total = fixed_order.product(a, b, "one by one") * alpha
    return (total if beta == 0 else total + bias.to(total.dtype) * beta).to(a.dtype)


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a[None], b[:, None])[0, 0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    made = _mm(rows, weight.t()) if bias is None else _addmm(bias, rows, weight.t())
    return made.reshape(*x.shape[:-1], weight.shape[0])


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    if offs is None or b.dim() != 3 or a.dim() != 2:
        return aten._grouped_mm(a, b, offs, bias, out_dtype)
    starts = [0, *offs.tolist()]
    made = [_mm(a[i:j], b[n]) for n, (i, j) in enumerate(itertools.pairwise(starts))]
    return torch.cat([*made, a.new_zeros(a.shape[0] - starts[-1], b.shape[-1])])


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return fixed_order.softmax(x, dim).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return fixed_order.log_softmax(x, dim).to(torch.float32 if half_to_float else x.dtype)


def _sum(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not (x if dtype is None else torch.empty(0, dtype=dtype)).is_floating_point():
        return (
            torch.sum(x, dim, keepdim, dtype=dtype)
            if dim is not None
            else torch.sum(x, dtype=dtype)
        )
    dims = (
        list(range(x.dim()))
        if dim is None or dim == []
        else [dim]
        if isinstance(dim, int)
        else list(dim)
    )
    dims = sorted(d % max(x.dim(), 1) for d in dims)
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = (
        x.to(fixed_order.wide(dtype or x.dtype))
        .permute(*kept, *dims)
        .reshape(*(x.shape[d] for d in kept), -1)
    )
    total = fixed_order.sum_over(rows).to(dtype or x.dtype)
    return (
        total.reshape([1 if d in dims else x.shape[d] for d in range(x.dim())])
        if keepdim
        else total
    )


def _mean(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    wide = fixed_order.wide(dtype or x.dtype)
    total = _sum(x.to(wide), dim, keepdim)
    return (total / (x.numel() // max(total.numel(), 1))).to(dtype or x.dtype)


def _rms_norm(x: Tensor, shape: Any, weight: Any, epsilon: float | None) -> tuple[Tensor, Tensor]:
    dtype = fixed_order.wide(x.dtype)
    rows = x.to(dtype)
    mean = _mean(rows * rows, list(range(-len(shape), 0)), True)
    scale = 1 / torch.sqrt(mean + (torch.finfo(dtype).eps if epsilon is None else epsilon))
    normal = rows * scale
    return (normal if weight is None else normal * weight.to(dtype)).to(x.dtype), scale


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output: Any,
    groups: int,
) -> Tensor:
    each_alone = (
        weight.dim() == 3 and weight.shape[1] == 1 and groups == weight.shape[0] == x.shape[1]
    )
    if not each_alone or transposed or list(stride) != [1] or list(dilation) != [1]:
        return aten.convolution(
            x, weight, bias, stride, padding, dilation, transposed, output, groups
        )
    return fixed_order.depthwise_convolution(x, weight, bias, padding[0])


_FIXED: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten.linear.default: _linear,
    aten._grouped_mm.default: _grouped_mm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.native_layer_norm.default: fixed_order.layer_norm,
    aten._fused_rms_norm.default: _rms_norm,
    aten.convolution.default: _convolution,
}
_ELEMENTWISE = {
    aten.exp.default,
    aten.exp2.default,
    aten.expm1.default,
    aten.log.default,
    aten.log1p.default,
    aten.sin.default,
    aten.cos.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.gelu.default,
    aten.erf.default,
    aten.softplus.default,
    aten.rsqrt.default,
    aten.pow.Tensor_Scalar,
    aten.relu.default,
}
