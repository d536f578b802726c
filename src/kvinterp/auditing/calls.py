"""The operations a model really calls, with the inputs it calls them with, each ready to be called again in other shapes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from kvinterp.auditing.attention import MATMUL, Fused, Product, Recogniser, Scores, Values
from kvinterp.auditing.subject import Subject
from kvinterp.models import Adapter

__all__ = ["BACKENDS", "Operation", "Variant", "collect"]

_F = torch.nn.functional
_GROUPED = (getattr(torch, "_grouped_mm", None), getattr(_F, "grouped_mm", None))
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

Variant = Callable[[int], tuple[Tensor, Tensor]]
"""From a size to the results of the same rows: computed in that size, and as they are compared with."""


@dataclasses.dataclass
class Operation:
    """One kind of call with the inputs it had.

    Attributes:
        name: Such as ``"linear"``, ``"scores"`` or ``"attention (SDPA)"``.
        shape: What tells it from others of the name.
        modules: The modules that called it, in order.
        dtype: The dtype of its input.
        variants: What is varied (``"rows"``, ``"keys"``, ``"batch"``), and how.
        calls: How often the model called it; 0 for an SDPA back end that the model could use but that was asked for here.
    """

    name: str
    shape: str
    modules: list[str]
    dtype: torch.dtype
    variants: dict[str, Variant]
    calls: int = 1

    @property
    def kind(self) -> str:
        """Which of the kernel modes' operations it is (see ``kernels.OPERATIONS``)."""
        return self.name if self.name in ("scores", "values", "unembed") else "linear"


def collect(adapter: Adapter, tokens: Tensor, sizes: Sequence[int]) -> list[Operation]:
    """The operations of one forward of a model.

    Args:
        adapter: The model.
        tokens: ``[1, position]``.
        sizes: The sizes they will be called with, in order.
    """
    collector, subject = _Collector(adapter, sizes), Subject(adapter)

    def enter(module: nn.Module, _: Any) -> None:
        collector.stack.append(subject.name_of(module))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if "Norm" in type(module).__name__ and isinstance(output, Tensor):
            collector.norm(module, [*args, *kwargs.values()], output)
        if collector.stack:
            collector.stack.pop()

    with contextlib.ExitStack() as hooks:
        for module in adapter.model.modules():
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        with collector:
            subject.recompute(tokens)
    collector.product(collector.attention.product)
    return list(collector.found.values())


class _Collector(TorchFunctionMode):
    def __init__(self, adapter: Adapter, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.vocabulary = sizes, adapter.facts.vocabulary
        self.found: dict[tuple[str, str], Operation] = {}
        self.stack: list[str] = []
        self.attention = Recogniser()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = self.attention.told(func, args, kwargs, result)
        if isinstance(found, Fused):
            self.fused(found)
        elif isinstance(found, Product):
            self.product(found.before)
        elif isinstance(found, Scores):
            self.softmax(found)
        elif isinstance(found, Values):
            self.values(found)
        elif func is _F.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self.by_rows("linear", args[0], weight.shape[0], partial(_F.linear, weight=weight, bias=bias))
        elif func is torch.addmm and args[1].dim() == 2:
            # torch takes two dimensions here and no more, so a batch reaches it as more rows.
            self.by_rows("linear", args[1], args[2].shape[1], partial(_added, args[0], args[2]))
        elif func in _GROUPED and func is not None and args[1].dim() == 3:
            expert = args[1][0].detach()
            self.by_rows("linear", args[0], expert.shape[1], partial(_grouped, func, args[1].detach()), "expert, ")
        elif func in MATMUL and len(args) == 2 and args[1].dim() == 2 and args[0].dim() >= 2:
            self.by_rows("linear", args[0], args[1].shape[1], partial(torch.matmul, other=args[1].detach()))
        elif (
            func in (torch.conv1d, _F.conv1d) and kwargs.get("groups", args[6] if len(args) > 6 else 1) == args[0].shape[1]
        ):
            self.convolution(args, kwargs)

    def add(self, name: str, shape: str, dtype: torch.dtype, variants: dict[str, Variant], calls: int = 1) -> None:
        if (name, shape) in self.found:
            self.found[name, shape].calls += calls
        else:
            self.found[name, shape] = Operation(name, shape, [], dtype, variants, calls)
        self.found[name, shape].modules += self.stack[-1:]

    def by_rows(self, name: str, x: Tensor, outputs: int, call: Callable[[Tensor], Tensor], what: str = "") -> None:
        name = "unembed" if name == "linear" and outputs == self.vocabulary else name
        rows = _longer(x.detach().reshape(-1, x.shape[-1]), 0, max(self.sizes))
        variants: dict[str, Variant] = {
            "rows": lambda n: _row_pair(call, rows, n),
            "batch": lambda n: _batch_pair(call, rows[None, :8], n),
        }
        self.add(name, f"{what}{x.shape[-1]} to {outputs}", x.dtype, variants)

    def norm(self, module: nn.Module, given: Sequence[Any], output: Tensor) -> None:
        """A norm, and whatever else of the same shape it was given (a gate)."""
        rows = [t.detach() for t in given if isinstance(t, Tensor) and t.shape == output.shape]
        if not rows or output.dim() < 2:
            return
        forward: Any = type(module).forward.__get__(module)
        width = output.shape[-1]

        def call(x: Tensor) -> Tensor:
            # Some norms take a batch of sequences and nothing less.
            parts = (x[None] if x.dim() == 2 else x).split(width, -1)
            return forward(*parts).reshape(*x.shape[:-1], width)

        joined = torch.cat(rows, -1)
        rows_of = _longer(joined.reshape(-1, joined.shape[-1]), 0, max(self.sizes))
        variants: dict[str, Variant] = {
            "rows": lambda n: _row_pair(call, rows_of, n),
            "batch": lambda n: _batch_pair(call, rows_of[None, :8], n),
        }
        self.add("norm", f"{width}" + (", gated" if len(rows) > 1 else ""), output.dtype, variants)

    # Products of activations -----------------------------------------------------------------------------------------

    def product(self, found: Product | None) -> None:
        """A product that no softmax followed: part of a recurrence, or an expert's."""
        if found is None:
            return
        a, b = _heads(found.a), _heads(found.b)
        query = _longer(a, -2, max(self.sizes))
        variants: dict[str, Variant] = {
            "rows": lambda n: _attend_rows(torch.matmul, query, b, n),
            "batch": lambda n: _batch_pair(lambda q: torch.matmul(q, b.expand(len(q), *b.shape[1:])), query[..., :4, :], n),
        }
        self.add("product", f"{a.shape[-1]} to {b.shape[-1]}, {a.shape[-3]} at once", a.dtype, variants)

    def softmax(self, found: Scores) -> None:
        """Probabilities, and the product of queries and keys that they were made of."""
        scores, dtype = _heads(found.product.made), found.given.dtype
        self.queries_by_keys(_heads(found.product.a), _heads(found.product.b))
        full = _longer(_longer(scores, -1, max(self.sizes)), -2, max(self.sizes))

        def call(s: Tensor) -> Tensor:
            return torch.softmax(s, -1, dtype=found.dtype).to(dtype)

        def masked(n: int) -> tuple[Tensor, Tensor]:
            hidden = full[..., :1, :].clone()
            hidden[..., n:] = -torch.inf
            return call(full[..., :1, :n]), call(hidden)[..., :n]

        rows: dict[str, Variant] = {
            "rows": lambda n: (call(full[..., :n, :])[..., :1, :], call(full[..., :1, :])),
            "keys": masked,
            "batch": lambda n: _batch_pair(call, full[..., :4, :], n),
        }
        self.add("softmax", f"over keys, {scores.shape[1]} heads", dtype, rows)

    def queries_by_keys(self, a: Tensor, b: Tensor) -> None:
        query, key = _longer(a, -2, max(self.sizes)), _longer(b, -1, max(self.sizes))
        variants: dict[str, Variant] = {
            "rows": lambda n: _attend_rows(torch.matmul, query, key, n),
            "keys": lambda n: (
                torch.matmul(query[..., :1, :], key[..., :n]),
                torch.matmul(query[..., :1, :], key)[..., :n],
            ),
            "batch": lambda n: _batch_pair(lambda q: torch.matmul(q, key.expand(len(q), -1, -1, -1)), query[..., :4, :], n),
        }
        self.add("scores", f"{a.shape[-1]} by keys, {a.shape[1]} heads", a.dtype, variants)

    def values(self, found: Values) -> None:
        """Probabilities by values."""
        a, b, scores = (_heads(t) for t in (found.weights, found.values, found.scores.product.made))
        most = max(self.sizes)
        weights = torch.softmax(_longer(_longer(scores, -1, most), -2, most).float(), -1).to(a.dtype)
        values = _longer(b, -2, most)
        variants: dict[str, Variant] = {
            "rows": lambda n: _attend_rows(torch.matmul, weights, values, n),
            "keys": lambda n: _padded_values(weights[..., :1, :], values, n),
            "batch": lambda n: _batch_pair(
                lambda w: torch.matmul(w, values.expand(len(w), -1, -1, -1)), weights[..., :4, :], n
            ),
        }
        self.add("values", f"keys by {b.shape[-1]}, {b.shape[1]} heads", a.dtype, variants)

    def fused(self, found: Fused) -> None:
        """SDPA as the model calls it, and each back end that it could call, one by one."""
        most = max(self.sizes)
        scale, shared = found.options.get("scale"), found.options.get("enable_gqa", False)
        query, key, value = (_longer(t.detach(), -2, most) for t in (found.query, found.key, found.value))
        shape = f"head_dim {query.shape[-1]}, {query.shape[1]} over {key.shape[1]} heads"

        def run(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            if backend is None:
                return _F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
            with sdpa_kernel(backend):
                return _F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)

        def variants(backend: SDPBackend | None) -> dict[str, Variant]:
            call = partial(run, backend)

            def masked(n: int) -> tuple[Tensor, Tensor]:
                seen = (torch.arange(most, device=query.device) < n)[None, None, None]
                one = query[..., :1, :]
                return call(one, key[..., :n, :], value[..., :n, :]), call(one, key, value, seen)

            return {
                "rows": lambda n: _attend_rows(lambda q, _: call(q, key, value), query, key, n),
                "keys": masked,
                "batch": lambda n: _batch_pair(
                    lambda q: call(q, key.expand(len(q), -1, -1, -1), value.expand(len(q), -1, -1, -1)),
                    query[..., :4, :],
                    n,
                ),
            }

        self.add("attention (SDPA)", shape, query.dtype, variants(None))
        for name, backend in BACKENDS.items():
            self.add(f"attention (SDPA {name})", shape, query.dtype, variants(backend), 0)

    def convolution(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A causal convolution of each channel: the first positions must not depend on how many follow."""
        x = _longer(args[0].detach(), -1, max(self.sizes))

        def call(part: Tensor) -> Tensor:
            return _F.conv1d(part.contiguous(), *args[1:], **kwargs)

        variants: dict[str, Variant] = {
            "rows": lambda n: (call(x[..., :n])[..., :n], call(x)[..., :n]),
            "batch": lambda n: _batch_pair(call, x[..., :8], n),
        }
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        self.add("convolution", f"{x.shape[1]} channels, {weight.shape[-1]} taps", x.dtype, variants)


# Calling again in other shapes -------------------------------------------------------------------------------------------


def _added(bias: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return torch.addmm(bias, x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def _grouped(func: Any, weights: Tensor, x: Tensor) -> Tensor:
    """Every row through the first expert, the others getting none."""
    rows = x.flatten(0, -2)
    stops = torch.full((weights.shape[0],), len(rows), dtype=torch.int32, device=x.device)
    return func(rows.contiguous(), weights, offs=stops).unflatten(0, x.shape[:-1])


def _heads(tensor: Tensor) -> Tensor:
    """``[batch, head, row, column]``, whatever came before the last two dimensions."""
    tensor = tensor.detach()
    if tensor.dim() == 3:
        return tensor[None]
    return tensor if tensor.dim() == 4 else tensor.flatten(1, -3)


def _longer(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor's own slices over again until there are ``size`` of them."""
    index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, index)


def _row_pair(call: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Some rows of a product of ``size`` rows, and the same rows each computed alone."""
    looked = sorted({0, size // 2, size - 1})
    return call(rows[:size])[looked], torch.cat([call(rows[i : i + 1]) for i in looked])


def _attend_rows(call: Callable[[Tensor, Tensor], Tensor], query: Tensor, key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    looked = sorted({0, size // 2, size - 1})
    alone = [call(query[..., i : i + 1, :].contiguous(), key) for i in looked]
    return call(query[..., :size, :].contiguous(), key)[..., looked, :], torch.cat(alone, -2)


def _batch_pair(call: Callable[[Tensor], Tensor], one: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first sequence of a batch, and the same alone."""
    return call(one.expand(size, *one.shape[1:]).contiguous())[:1], call(one)


def _padded_values(weights: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """One row of probabilities by ``size`` values, and the same with more values whose probability is zero."""
    masked = weights.clone()
    masked[..., size:] = 0
    return torch.matmul(weights[..., :size].contiguous(), values[..., :size, :].contiguous()), torch.matmul(masked, values)
