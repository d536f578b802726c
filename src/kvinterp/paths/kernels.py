"""Which arithmetic a path computes with: the machine's own kernels, or ones whose order of additions is known.

A kernel mode is part of an :class:`ExecutionPath`, and like it only a description. The loops in ``runner.py`` enter it
around every forward. It works by torch's own interception of calls (``TorchFunctionMode`` and ``TorchDispatchMode``), so it
reaches a HookedTransformer, a bridge and a transformers model alike, and leaves nothing behind.

==================================  ==========================================================================
``native``                          the machine's kernels
``split_k(parts,accumulate)``       a product of one row is added up in parts, as GPU libraries do: the order
                                    then depends on the number of rows, which is what a cache changes
``batch_invariant``                 one fixed order for every product, norm and softmax, whatever the shape
``layer_cast``                      16-bit weights, everything computed in float32 (Yuan et al. 2025, LayerCast)
==================================  ==========================================================================

Sources: split-K and its reduced-precision sum, pytorch#123157; fixed orders, thinking-machines-lab/batch_invariant_ops,
which leaves attention's products as they are: here they are fixed too.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvinterp.errors import InputError, UnsupportedError, unknown
from kvinterp.models import Adapter
from kvinterp.models.adapter import Listener, Site
from kvinterp.paths import fixed_order

__all__ = [
    "KERNELS",
    "OPERATIONS",
    "BatchInvariant",
    "KernelMode",
    "Kernels",
    "LayerCast",
    "Native",
    "SplitK",
    "kernels_named",
]

aten: Any = torch.ops.aten
OPERATIONS = {
    "linear": "projections and the MLP's products",
    "scores": "queries by keys",
    "values": "attention probabilities by values",
    "unembed": "the last residual stream to logits",
}
ACCUMULATE = ("float16", "float32")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A kernel mode, as data; :meth:`mode` is the same thing in motion."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """What the runner enters around each forward of this model."""
        raise NotImplementedError

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype activations have in a model whose weights have ``dtype``."""
        return dtype

    def __str__(self) -> str:
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        while values and values[-1] == ():
            values.pop()
        shown = ",".join("+".join(map(str, v)) or "all" if isinstance(v, tuple) else str(v) for v in values)
        name = next(name for name, mode in KERNELS.items() if mode is type(self))
        return f"{name}({shown})" if shown else name


class KernelMode:
    """A kernel mode while a model runs under it: a context manager that can be entered again for every forward.

    Attributes:
        listeners: Hooks that tell it which layer is running; empty where it does not need to know.
    """

    def __init__(self) -> None:
        self.listeners: Mapping[Site, Listener] = {}
        self._open: list[ExitStack] = []

    def interceptors(self) -> list[Any]:
        """The torch modes to enter, outermost first."""
        return []

    def expect(self, operation: str) -> None:
        """Told which of :data:`OPERATIONS` is called next, where it is called alone and no model runs around it."""

    def __enter__(self) -> KernelMode:
        stack = ExitStack()
        for interceptor in self.interceptors():
            stack.enter_context(interceptor)
        self._open.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


@dataclasses.dataclass(frozen=True)
class Native(Kernels):
    """The machine's own kernels; nothing is intercepted."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """A mode that does nothing."""
        return KernelMode()


@dataclasses.dataclass(frozen=True)
class BatchInvariant(Kernels):
    """One order of additions for every product, norm and softmax, whatever the shape (see ``fixed_order``)."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts every reduction; raises UnsupportedError where attention is a kernel torch does not see."""
        _refuse_opaque_attention(adapter, self)
        return _BatchInvariantMode()


@dataclasses.dataclass(frozen=True)
class SplitK(Kernels):
    """A product of one row is added up in parts whose sums are rounded before they are added together.

    What GPU libraries do when there are too few rows to fill the machine. Products of more rows keep the machine's
    kernels, and that is what makes the order depend on the shape.

    Attributes:
        parts: How many pieces the shared dimension is cut into.
        accumulate: ``"float16"``: in a 16-bit model the parts' sums are rounded to the model's own 16 bits (what
            ``allow_fp16_reduced_precision_reduction`` lets a library do); ``"float32"``: they are added in float32. A
            32- or 64-bit model adds them in its own dtype either way.
        operations: Which of :data:`OPERATIONS`; empty for all.
        layers: Which layers; empty for all. The unembedding belongs to no layer and is chosen by operation only.
    """

    parts: int = 4
    accumulate: str = "float16"
    operations: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int) or self.parts < 2:
            raise InputError(f"split_k's parts={self.parts!r}: expected a whole number of at least 2.")
        if self.accumulate not in ACCUMULATE:
            raise unknown("split_k accumulate dtype", self.accumulate, ACCUMULATE)
        for operation in self.operations:
            if operation not in OPERATIONS:
                raise unknown("operation", operation, OPERATIONS)
        if any(not isinstance(layer, int) or layer < 0 for layer in self.layers):
            raise InputError(f"split_k's layers={self.layers!r}: expected layer numbers from 0, such as 0+2.")

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts products of one row; raises InputError for a layer the model does not have."""
        _refuse_opaque_attention(adapter, self)
        beyond = [layer for layer in self.layers if layer >= adapter.facts.layers]
        if beyond:
            raise InputError(
                f"{self} names layer {beyond[0]}: {adapter.facts.name} has layers 0 to {adapter.facts.layers - 1}."
            )
        return _SplitKMode(self, adapter)


@dataclasses.dataclass(frozen=True)
class LayerCast(Kernels):
    """Weights stay in 16 bits; every activation, every cached key and value and every sum is float32."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """Widens every 16-bit tensor as it is used."""
        return _LayerCastMode()

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Float32 for 16-bit weights, else the dtype itself."""
        return fixed_order.wide(dtype)


KERNELS: dict[str, type[Kernels]] = {
    "native": Native,
    "split_k": SplitK,
    "batch_invariant": BatchInvariant,
    "layer_cast": LayerCast,
}


def kernels_named(text: str | Kernels) -> Kernels:
    """Reads a kernel mode's text form: ``native``, ``batch_invariant``, ``split_k(4,float16,linear+unembed,0+2)``.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    if isinstance(text, Kernels):
        return text
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None or match.group(1) not in KERNELS:
        raise unknown("kernel mode", text, KERNELS, "Values go in brackets, as in split_k(4,float16).")
    name, given = match.groups()
    values = [_value(part.strip()) for part in given.split(",")] if given else []
    if name == "split_k":
        values[2:] = [() if v == "all" else tuple(map(_value, str(v).split("+"))) for v in values[2:]]
    try:
        return KERNELS[name](*values)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(KERNELS[name])) or "no values"
        raise InputError(f"kernel mode {text!r} cannot be read: {name} takes {fields}.") from error


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _refuse_opaque_attention(adapter: Adapter, kernels: Kernels) -> None:
    if adapter.facts.attention.startswith(("flash_attention", "flex_attention", "paged")):
        raise UnsupportedError(
            f"kernels={kernels} cannot reach inside attention {adapter.facts.attention!r}, a kernel torch only hands "
            "tensors to: load the model with attention='sdpa' or 'eager'."
        )


# Interception ----------------------------------------------------------------------------------------------------------

_SDPA = torch.nn.functional.scaled_dot_product_attention
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Functions(TorchFunctionMode):
    """Sees torch's functions as they are called; ``replace`` returns NotImplemented to let one through."""

    def __init__(self, replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.replace(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


class _Operations(TorchDispatchMode):
    """Sees torch's operations underneath its functions; ``replace`` returns NotImplemented to let one through."""

    def __init__(self, replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.replace(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _sdpa_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]:
    """SDPA's arguments by name, with every query head given its own KV head."""
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    return query, key, value, attn_mask, is_causal, scale


def _drops_out(*args: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Whether a call of SDPA leaves out some of the keys at random, which no order of additions can stand for."""
    return (args[4] if len(args) > 4 else dropout_p) > 0


# batch_invariant -------------------------------------------------------------------------------------------------------


class _BatchInvariantMode(KernelMode):
    def __init__(self) -> None:
        super().__init__()
        self._inside = False

    def interceptors(self) -> list[Any]:
        return [_Functions(self._function), _Operations(self._operation)]

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _SDPA:
            if _drops_out(*args, **kwargs):
                return NotImplemented
            return self._own(fixed_order.attention, *_sdpa_arguments(*args, **kwargs))
        # torch does these as one product of many rows or as a batch of products, depending on shapes and strides; the two
        # would be added up in different orders here, so it is always the first.
        if func is torch.nn.functional.linear:
            return self._own(_linear, *args, **kwargs)
        if func in _MATMUL and len(args) == 2 and args[1].dim() == 2 and args[0].dim() > 2:
            return self._own(_linear, args[0], args[1].t())
        return NotImplemented

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return NotImplemented
        if func in _ELEMENTWISE:
            return self._own(lambda: fixed_order.in_fixed_pieces(lambda x: func(x, *args[1:], **kwargs), args[0]))
        fixed = _FIXED.get(func)
        return NotImplemented if fixed is None else self._own(fixed, *args, **kwargs)

    def _own(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._inside = self._inside, True
        try:
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


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if offs is None or b.dim() != 3 or a.dim() != 2:
        return aten._grouped_mm(a, b, offs, bias, out_dtype)
    starts = [0, *offs.tolist()]
    made = [_mm(a[i:j], b[n]) for n, (i, j) in enumerate(itertools.pairwise(starts))]
    return torch.cat([*made, a.new_zeros(a.shape[0] - starts[-1], b.shape[-1])])


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return fixed_order.softmax(x, dim).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return fixed_order.log_softmax(x, dim).to(torch.float32 if half_to_float else x.dtype)


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not (x if dtype is None else torch.empty(0, dtype=dtype)).is_floating_point():
        return torch.sum(x, dim, keepdim, dtype=dtype) if dim is not None else torch.sum(x, dtype=dtype)
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted(d % max(x.dim(), 1) for d in dims)
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.to(fixed_order.wide(dtype or x.dtype)).permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1)
    total = fixed_order.sum_over(rows).to(dtype or x.dtype)
    return total.reshape([1 if d in dims else x.shape[d] for d in range(x.dim())]) if keepdim else total


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    wide = fixed_order.wide(dtype or x.dtype)
    total = _sum(x.to(wide), dim, keepdim)
    return (total / (x.numel() // max(total.numel(), 1))).to(dtype or x.dtype)


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return fixed_order.layer_norm(x, shape, weight, bias, epsilon)


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
    each_alone = weight.dim() == 3 and weight.shape[1] == 1 and groups == weight.shape[0] == x.shape[1]
    if not each_alone or transposed or list(stride) != [1] or list(dilation) != [1]:
        return aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output, groups)
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
    aten.native_layer_norm.default: _layer_norm,
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


# split_k ---------------------------------------------------------------------------------------------------------------


class _SplitKMode(KernelMode):
    def __init__(self, kernels: SplitK, adapter: Adapter) -> None:
        super().__init__()
        self.kernels = kernels
        self.operations = kernels.operations or tuple(OPERATIONS)
        self.layer: int | None = None
        self.last = False
        self.after_softmax = False
        self.alone: str | None = None
        count = adapter.facts.layers
        places = [(site, layer) for layer in range(count) for site in ("resid_pre", "resid_post")]
        self.listeners = {place: self._follow(*place, last=count - 1) for place in places}

    def interceptors(self) -> list[Any]:
        self.layer, self.last, self.after_softmax = None, False, False
        return [_Functions(self._function), _Operations(self._operation)]

    def _follow(self, site: str, layer: int, last: int) -> Listener:
        def listener(_: Tensor) -> None:
            self.layer = layer if site == "resid_pre" else None
            self.last = site == "resid_post" and layer == last
            self.after_softmax = False

        return listener

    def expect(self, operation: str) -> None:
        self.alone = operation

    def _chosen(self, operation: str) -> bool:
        if operation not in self.operations:
            return False
        if self.alone is not None or operation == "unembed" or not self.kernels.layers:
            return True
        return self.layer in self.kernels.layers

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not _SDPA or _drops_out(*args, **kwargs):
            return NotImplemented
        query, key, value, mask, _, scale = _sdpa_arguments(*args, **kwargs)
        if query.shape[-2] != 1 or not (self._chosen("scores") or self._chosen("values")):
            return NotImplemented
        wide = fixed_order.wide(query.dtype)
        parts = self.kernels.parts
        scores = self._split(query, key.transpose(-1, -2), parts if self._chosen("scores") else 1).to(wide)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
        weights = torch.softmax(scores, -1).to(query.dtype)
        return self._split(weights, value, parts if self._chosen("values") else 1).to(query.dtype)

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self.kernels.parts
        if func is aten._softmax.default:
            self.after_softmax = True
        elif func is aten.mm.default and args[0].shape[0] == 1 and self._chosen(self._linear):
            return self._split(args[0], args[1], parts).to(args[0].dtype)
        elif func is aten.addmm.default and args[1].shape[0] == 1 and self._chosen(self._linear):
            bias, a, b = args
            made = self._split(a, b, parts) * kwargs.get("alpha", 1)
            return (made + bias.to(made.dtype) * kwargs.get("beta", 1)).to(a.dtype)
        elif func is aten.bmm.default:
            operation = self.alone or ("values" if self.after_softmax else "scores")
            self.after_softmax = False
            if args[0].shape[1] == 1 and self._chosen(operation):
                return self._split(args[0], args[1], parts).to(args[0].dtype)
        return NotImplemented

    @property
    def _linear(self) -> str:
        return self.alone or ("unembed" if self.last else "linear")

    def _split(self, a: Tensor, b: Tensor, parts: int) -> Tensor:
        """``a @ b`` in parts of the shared dimension; each part's sum is rounded, then they are added in order."""
        wide = fixed_order.wide(a.dtype)
        between = a.dtype if self.kernels.accumulate == "float16" else wide
        size = -(-a.shape[-1] // parts)
        pieces = zip(a.to(wide).split(size, -1), b.to(wide).split(size, -2), strict=True)
        sums = [torch.matmul(x, y).to(between) for x, y in pieces]
        total = sums[0]
        for term in sums[1:]:
            total = total + term
        return total.to(wide)


# layer_cast ------------------------------------------------------------------------------------------------------------

_NARROW = (torch.float16, torch.bfloat16)


class _LayerCastMode(KernelMode):
    def interceptors(self) -> list[Any]:
        return [_Operations(self._operation)]

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
    return {i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write}
