"""The operations of one forward of a model, with the inputs that it calls them with, each ready to be
called again in another shape.

:mod:`kvinterp.auditing.shape_dependence` measures whether their results depend on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvinterp.auditing.blocks import BlockModel
from kvinterp.models.attention_calls import MATMUL, Fused, Product, Recogniser, Scores, Values
from kvinterp.models.hooks import Functions, in_order

_F = torch.nn.functional
_GROUPED = (getattr(torch, "_grouped_mm", None), getattr(_F, "grouped_mm", None))
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""The kernels that torch may choose for SDPA, by the names that the table has for them."""

Pair = tuple[Tensor, Tensor]
Variant = Callable[[int], Pair]
"""From a size to the results of the same rows: computed in that size, and as they are compared
with.
"""


@dataclasses.dataclass
class Operation:
    """One kind of call with the inputs it had.

    Attributes:
        name: Such as ``"linear"``, ``"scores"`` or ``"attention (SDPA)"``.
        shape: What tells it from others of the name.
        modules: The modules that called it, in order.
        dtype: The dtype of its input.
        variants: What is varied (``"rows"``, ``"keys"``, ``"batch"``), and how.
        calls: How often the model called it; 0 for an SDPA back end that the model could use but
            that was asked for here.
    """

    name: str
    shape: str
    modules: list[str]
    dtype: torch.dtype
    variants: dict[str, Variant]
    calls: int


class OperationCollector:
    """Collects the operations of one forward.

    Args:
        model: The model.
        most: How many rows or keys each operation will be called with.
    """

    def __init__(self, model: BlockModel, most: int) -> None:
        self.model, self.most = model, most
        self.found: dict[tuple[str, str], Operation] = {}
        self.stack: list[str] = []
        self.attention = Recogniser()

    def run(self, tokens: Tensor) -> list[Operation]:
        """Those of one forward without a cache, of ``[1, position]`` tokens."""

        def enter(module: nn.Module, _: Any) -> None:
            self.stack.append(self.model.name_of(module))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if "Norm" in type(module).__name__ and isinstance(output, Tensor):
                self.norm(module, [*args, *kwargs.values()], output)
            if self.stack:
                self.stack.pop()

        with contextlib.ExitStack() as hooks:
            for module in self.model.model.modules():
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
            with Functions(self.called):
                self.model.recompute(tokens)
        self.product(self.attention.product)
        return list(self.found.values())

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Adds the operation of a call of torch; returns its result."""
        result = func(*args, **kwargs)
        part = self.attention.recognise(func, args, kwargs, result)
        args, kwargs = in_order(args, kwargs)
        if isinstance(part, Fused):
            self.fused(part)
        elif isinstance(part, Product):
            self.product(part.before)
        elif isinstance(part, Scores):
            self.softmax(part)
        elif isinstance(part, Values):
            self.values(part)
        elif func is _F.linear:
            self.linear(args[0], result.shape[-1], lambda x: func(x, *args[1:], **kwargs))
        elif func is torch.addmm and args[1].dim() == 2:
            # torch takes two dimensions here and no more, so a batch reaches it as more rows.
            bias, x, weight = args
            self.linear(
                x,
                weight.shape[1],
                lambda x: func(bias, x.flatten(0, -2), weight).unflatten(0, x.shape[:-1]),
            )
        elif func in _GROUPED and func is not None and args[1].dim() == 3:
            self.linear(args[0], args[1].shape[2], partial(_grouped, func, args[1]), "expert, ")
        elif func in MATMUL and len(args) == 2 and args[1].dim() == 2 and args[0].dim() >= 2:
            self.linear(args[0], args[1].shape[1], lambda x: torch.matmul(x, args[1]))
        elif (
            func in (torch.conv1d, _F.conv1d)
            and kwargs.get("groups", args[6] if len(args) > 6 else 1) == args[0].shape[1]
        ):
            self.convolution(args, kwargs)
        return result

    def add(
        self,
        name: str,
        shape: str,
        dtype: torch.dtype,
        variants: dict[str, Variant],
        calls: int = 1,
    ) -> None:
        """Adds an operation, or one more call of it."""
        mine = self.found.setdefault((name, shape), Operation(name, shape, [], dtype, variants, 0))
        mine.calls += calls
        mine.modules += self.stack[-1:]

    def by_rows(
        self,
        name: str,
        shape: str,
        call: Callable[..., Tensor],
        x: Tensor,
        *others: Tensor,
        keys: Variant | None = None,
        calls: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adds what computes each row of ``x`` by itself, with the same ``others``; ``keys`` varies
        how many those are.
        """
        one = x[None, :8] if x.dim() == 2 else x[..., :4, :]

        def beside(batch: Tensor) -> Tensor:
            return call(batch, *(other.expand(len(batch), *other.shape[1:]) for other in others))

        def some(size: int) -> Pair:
            """Some rows of what is computed of ``size`` rows, and the same rows each computed
            alone.
            """
            looked = sorted({0, size // 2, size - 1})
            alone = [call(x[..., i : i + 1, :].contiguous(), *others) for i in looked]
            return call(x[..., :size, :].contiguous(), *others)[..., looked, :], torch.cat(
                alone, -2
            )

        variants: dict[str, Variant] = {"rows": some} | ({} if keys is None else {"keys": keys})
        self.add(
            name,
            shape,
            dtype or x.dtype,
            variants | {"batch": partial(_batch_pair, beside, one)},
            calls,
        )

    def linear(
        self, x: Tensor, outputs: int, call: Callable[[Tensor], Tensor], what: str = ""
    ) -> None:
        """A product with weights."""
        name = "unembed" if outputs == self.model.adapter.facts.vocabulary else "linear"
        rows = _longer(x.reshape(-1, x.shape[-1]), 0, self.most)
        self.by_rows(name, f"{what}{x.shape[-1]} to {outputs}", call, rows)

    def norm(self, module: nn.Module, arguments: Sequence[Any], output: Tensor) -> None:
        """A norm, and whatever else of the same shape it was given (a gate)."""
        parts = [t for t in arguments if isinstance(t, Tensor) and t.shape == output.shape]
        if not parts or output.dim() < 2:
            return
        forward, width = type(module).forward.__get__(module), output.shape[-1]

        def call(x: Tensor) -> Tensor:
            # Some norms take a batch of sequences and nothing less.
            return forward(*(x[None] if x.dim() == 2 else x).split(width, -1)).reshape(
                *x.shape[:-1], width
            )

        joined = torch.cat(parts, -1)
        rows = _longer(joined.reshape(-1, joined.shape[-1]), 0, self.most)
        self.by_rows(
            "norm",
            f"{width}" + (", gated" if len(parts) > 1 else ""),
            call,
            rows,
            dtype=output.dtype,
        )

    # Products of activations ----------------------------------------------------------------------

    def product(self, found: Product | None) -> None:
        """A product that no softmax followed: part of a recurrence, or an expert's."""
        if found is None:
            return
        a, b = _heads(found.a), _heads(found.b)
        shape = f"{a.shape[-1]} to {b.shape[-1]}, {a.shape[-3]} at once"
        self.by_rows("product", shape, torch.matmul, _longer(a, -2, self.most), b)

    def softmax(self, scores_seen: Scores) -> None:
        """Probabilities, and the product of queries and keys that they were made of."""
        scores, dtype = _heads(scores_seen.product.result), scores_seen.scaled.dtype
        a, b = _heads(scores_seen.product.a), _heads(scores_seen.product.b)
        query, key = _longer(a, -2, self.most), _longer(b, -1, self.most)

        def fewer(n: int) -> Pair:
            one = query[..., :1, :]
            return torch.matmul(one, key[..., :n]), torch.matmul(one, key)[..., :n]

        self.by_rows(
            "scores",
            f"{a.shape[-1]} by keys, {a.shape[1]} heads",
            torch.matmul,
            query,
            key,
            keys=fewer,
        )
        full = _longer(_longer(scores, -1, self.most), -2, self.most)

        def call(s: Tensor) -> Tensor:
            return torch.softmax(s, -1, dtype=scores_seen.dtype).to(dtype)

        def masked(n: int) -> Pair:
            hidden = full[..., :1, :].clone()
            hidden[..., n:] = -torch.inf
            return call(full[..., :1, :n]), call(hidden)[..., :n]

        self.by_rows(
            "softmax", f"over keys, {scores.shape[1]} heads", call, full, keys=masked, dtype=dtype
        )

    def values(self, values_seen: Values) -> None:
        """Multiplies the probabilities by the values."""
        a, b, scores = (
            _heads(t)
            for t in (values_seen.weights, values_seen.values, values_seen.scores.product.result)
        )
        square = _longer(_longer(scores, -1, self.most), -2, self.most)
        weights, values = torch.softmax(square.float(), -1).to(a.dtype), _longer(b, -2, self.most)

        def fewer(n: int) -> Pair:
            """One row of probabilities by so many values, and the same with more values whose
            probability is zero.
            """
            one = weights[..., :1, :]
            masked = one.clone()
            masked[..., n:] = 0
            return torch.matmul(
                one[..., :n].contiguous(), values[..., :n, :].contiguous()
            ), torch.matmul(masked, values)

        self.by_rows(
            "values",
            f"keys by {b.shape[-1]}, {b.shape[1]} heads",
            torch.matmul,
            weights,
            values,
            keys=fewer,
        )

    def fused(self, found: Fused) -> None:
        """SDPA as the model calls it, and each back end that it could call, one by one."""
        scale, shared = found.options.get("scale"), found.options.get("enable_gqa", False)
        query, key, value = (
            _longer(t, -2, self.most) for t in (found.query, found.key, found.value)
        )
        shape = f"head_dim {query.shape[-1]}, {query.shape[1]} over {key.shape[1]} heads"

        def run(
            backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
        ) -> Tensor:
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                return _F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared
                )

        def fewer(call: Callable[..., Tensor], n: int) -> Pair:
            seen = (torch.arange(self.most, device=query.device) < n)[None, None, None]
            one = query[..., :1, :]
            return call(one, key[..., :n, :], value[..., :n, :]), call(one, key, value, seen)

        for name, backend in {"": None, **BACKENDS}.items():
            call, known = partial(run, backend), f"attention (SDPA{name and f' {name}'})"
            self.by_rows(
                known,
                shape,
                call,
                query,
                key,
                value,
                keys=partial(fewer, call),
                calls=int(not name),
            )

    def convolution(self, args: Any, kwargs: Any) -> None:
        """A causal convolution of each channel: the first positions must not depend on how many
        follow.
        """
        x = _longer(args[0], -1, self.most)

        def call(part: Tensor) -> Tensor:
            return _F.conv1d(part.contiguous(), *args[1:], **kwargs)

        def some(size: int) -> Pair:
            return call(x[..., :size])[..., :size], call(x)[..., :size]

        variants: dict[str, Variant] = {
            "rows": some,
            "batch": partial(_batch_pair, call, x[..., :8]),
        }
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        self.add(
            "convolution", f"{x.shape[1]} channels, {weight.shape[-1]} taps", x.dtype, variants
        )


# Calling again in other shapes --------------------------------------------------------------------


def _grouped(func: Any, weights: Tensor, x: Tensor) -> Tensor:
    """Every row through the first expert, the others getting none."""
    rows = x.flatten(0, -2)
    stops = torch.full((weights.shape[0],), len(rows), dtype=torch.int32, device=x.device)
    return func(rows.contiguous(), weights, offs=stops).unflatten(0, x.shape[:-1])


def _heads(tensor: Tensor) -> Tensor:
    """``[batch, head, row, column]``, whatever came before the last two dimensions."""
    if tensor.dim() == 3:
        return tensor[None]
    return tensor if tensor.dim() == 4 else tensor.flatten(1, -3)


def _longer(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor's own slices over again until there are ``size`` of them."""
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])


def _batch_pair(call: Callable[[Tensor], Tensor], one: Tensor, size: int) -> Pair:
    """The first sequence of a batch, and the same alone."""
    return call(one.expand(size, *one.shape[1:]).contiguous())[:1], call(one)
