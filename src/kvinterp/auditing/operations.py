"""The kernels table: for each operation a model really calls, whether a row's result depends on what it is computed with.

The operations and their inputs are those of one forward of the model. Each is then called again on those inputs with other
numbers of rows, other numbers of keys (the added ones masked) and another batch, and the result of the same row is compared
bit by bit. Where it differs, each flag that may change which kernel runs is turned in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from kvinterp.auditing.inside import Finding, find
from kvinterp.auditing.ladder import prefix_plan
from kvinterp.auditing.subject import BlockTaps, Subject, prompts_for
from kvinterp.errors import InputError
from kvinterp.metrics.kv import units_in_last_place
from kvinterp.models import Adapter, wrap
from kvinterp.paths.kernels import Kernels, kernels_named
from kvinterp.provenance import provenance

__all__ = ["SIZES", "KernelsTable", "kernels_table"]

SIZES = (1, 2, 17, 64, 128, 257)
"""Numbers of rows, and of keys: one, few, and both sides of the usual tiles."""

_F = torch.nn.functional


@dataclasses.dataclass
class KernelsTable:
    """What was found.

    Attributes:
        table: One row an operation, varied dimension and size: operation, shape, where (first module), calls, varied, size,
            bitwise_equal, rows_differing (share), max_ulp (of each number itself, which is large where a sum cancels),
            max_ulp_of_row (of the row's largest number), flags_that_change, flags_that_fix.
        first: The first operation of the model whose output differs between a cached step and recomputation given equal
            inputs: layer, tensor, module, position, error; None where none does.
        about: Provenance.
    """

    table: pd.DataFrame
    first: dict[str, Any] | None
    about: dict[str, Any]

    def summary(self) -> pd.DataFrame:
        """One row an operation and varied dimension: the smallest size at which it differs, and the worst ULP."""
        rows = []
        for key, group in self.table.groupby(["operation", "shape", "varied"], sort=False):
            bad = group[~group["bitwise_equal"]]
            rows.append(
                {
                    **dict(zip(("operation", "shape", "varied"), key, strict=True)),
                    "calls": group["calls"].iloc[0],
                    "same_bits": bad.empty,
                    "first_size_that_differs": None if bad.empty else int(bad["size"].min()),
                    "max_ulp": float(group["max_ulp"].max()),
                    "max_ulp_of_row": float(group["max_ulp_of_row"].max()),
                    "flags_that_fix": ", ".join(
                        sorted({f for text in bad["flags_that_fix"] for f in text.split(", ") if f})
                    ),
                }
            )
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        variant = self.summary()
        variant = variant[~variant["same_bits"]] if len(variant) else variant
        lines = [f"{len(self.table.groupby(['operation', 'shape']))} operations; {len(variant)} depend on the shape."]
        if self.first is None:
            lines.append("Given equal inputs no operation differs between a cached step and recomputation.")
        else:
            lines.append(
                f"The divergence is born in {self.first['tensor']} ({self.first['module']}, layer {self.first['layer']}), "
                f"relative error {self.first['error']:.1e}."
            )
        return " ".join(lines)


@dataclasses.dataclass
class _Operation:
    """One kind of call with the inputs it had; ``variants`` maps what is varied to a function from size to results.

    Each function returns the newest-size result and the reference for the same rows.
    """

    name: str
    shape: str
    where: str
    dtype: torch.dtype
    variants: dict[str, Callable[[int], tuple[Tensor, Tensor]]]
    calls: int = 1


def kernels_table(
    model: Any, *, sizes: Sequence[int] = SIZES, kernels: str | Kernels = "native", seed: int = 0, length: int = 24
) -> KernelsTable:
    """Measures which of a model's operations depend on the shape they are called with.

    Args:
        model: A model of any kind or an adapter.
        sizes: Numbers of rows and of keys; the smallest is the reference for rows, the largest for keys.
        kernels: A kernel mode to measure instead of the machine's own.
        seed: Seeds the prompt whose forward gives the inputs.
        length: Tokens of that prompt.

    Raises:
        InputError: The sizes are not at least two whole numbers from 1 on.
    """
    if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise InputError(f"sizes={tuple(sizes)!r} was given: expected at least two whole numbers of at least 1.")
    adapter, kernels = wrap(model), kernels_named(kernels)
    length = min(length, adapter.facts.context - 2)
    prompt = prompts_for(adapter, 1, length + 2, seed)[0]
    tokens = torch.tensor([list(prompt[:length])], device=adapter.device)
    operations = _collect(adapter, tokens, sorted(sizes))
    mode = kernels.mode(adapter)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for operation in operations:
            for varied, call in operation.variants.items():
                rows += _measure(operation, varied, call, sorted(sizes), mode)
    first = _first(adapter, kernels, prompt, length)
    about = provenance(adapter, kernels=str(kernels), sizes=list(sizes))
    return KernelsTable(pd.DataFrame(rows), None if first is None else _described(first), about)


def _described(found: Finding) -> dict[str, Any]:
    return {n: getattr(found, n) for n in ("layer", "tensor", "module", "position", "error")}


def _first(adapter: Adapter, kernels: Kernels, prompt: Sequence[int], length: int) -> Finding | None:
    subject = Subject(adapter, kernels)
    taps = BlockTaps(subject)
    plan = prefix_plan([prompt], (length,), 2, adapter.facts.context)
    with taps.attached():
        reference = taps.reference(torch.tensor([list(prompt)], device=adapter.device))
        layers = range(-1, len(subject.blocks) + 1)
        prefill = plan.prefills[0]
        found = find(taps, reference, prefill, range(prefill, prefill + plan.steps), layers, 0.0)
    return found[min(found)][0] if found else None


# Measuring one operation -----------------------------------------------------------------------------------------------


def _measure(
    operation: _Operation, varied: str, call: Callable[[int], tuple[Tensor, Tensor]], sizes: Sequence[int], mode: Any
) -> list[dict[str, Any]]:
    rows = []
    for size in sizes if varied != "batch" else (1, 2, 4):
        with mode:
            mine, alone = call(size)
        equal = torch.equal(mine, alone)
        gap = (mine.double() - alone.double()).abs()
        unit = units_in_last_place(torch.maximum(mine.double().abs(), alone.double().abs()), operation.dtype)
        changes, fixes = ([], []) if equal else _flags(call, size, mine, mode)
        rows.append(
            {
                "operation": operation.name,
                "shape": operation.shape,
                "where": operation.where,
                "calls": operation.calls,
                "varied": varied,
                "size": size,
                "bitwise_equal": equal,
                "rows_differing": float((gap.flatten(0, -2) > 0).any(-1).double().mean())
                if gap.dim() > 1
                else float(gap.max() > 0),
                "max_ulp": float((gap / unit).max()),
                "max_ulp_of_row": float((gap / unit.amax(-1, keepdim=True)).max()),
                "flags_that_change": ", ".join(changes),
                "flags_that_fix": ", ".join(fixes),
            }
        )
    return rows


def _flags(
    call: Callable[[int], tuple[Tensor, Tensor]], size: int, native: Tensor, mode: Any
) -> tuple[list[str], list[str]]:
    """The flags under which the result has other bits, and those under which it no longer depends on the shape."""
    changes, fixes = [], []
    for name, flag in _switches(native.device).items():
        try:
            with flag(), mode:
                mine, alone = call(size)
        except RuntimeError:
            continue  # This combination of flags has no kernel for these inputs.
        if not torch.equal(mine, native):
            changes.append(name)
        if torch.equal(mine, alone):
            fixes.append(name)
    return changes, fixes


def _switches(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Every switch that may choose another kernel on this device, by name; each restores what it changed."""
    backends = {
        f"sdpa {b.name.lower()}": (lambda b=b: sdpa_kernel(b)) for b in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
    }
    if device.type != "cuda":
        return {
            **backends,
            "oneDNN off": _without_onednn,
            "deterministic algorithms": _deterministic,
        }
    backends |= {
        f"sdpa {b.name.lower()}": (lambda b=b: sdpa_kernel(b))
        for b in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    }
    matmul = torch.backends.cuda.matmul
    toggles = {
        name: (lambda n=name: _toggled(matmul, n))
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    }
    return {**backends, **toggles, "deterministic algorithms": _deterministic}


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Older names of flags that torch's own context manager sets.
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextlib.contextmanager
def _toggled(holder: Any, name: str) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, not before)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# Finding the operations ------------------------------------------------------------------------------------------------


class _Collector(TorchFunctionMode):
    def __init__(self, adapter: Adapter, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.vocabulary = sizes, adapter.facts.vocabulary
        self.found: dict[tuple[str, str], _Operation] = {}
        self.stack: list[str] = []
        self.scores: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is _F.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self.by_rows("linear", args[0], args[1].shape[0], partial(_F.linear, weight=args[1], bias=bias))
        elif func is torch.addmm and args[1].dim() == 2:
            self.by_rows("linear", args[1], args[2].shape[1], partial(torch.addmm, args[0], mat2=args[2]))
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            a, b = args[:2]
            if b.dim() == 2 and a.dim() >= 2:
                self.by_rows("linear", a, b.shape[1], partial(torch.matmul, other=b))
            elif a.dim() == 4 and b.dim() == 4:
                self.batched(a, b, result)
        elif func is _F.scaled_dot_product_attention:
            self.attention(args[0], args[1], args[2], kwargs)
        elif func in (torch.softmax, _F.softmax, Tensor.softmax) and self.scores is not None and args[0].dim() == 4:
            self.softmax(args[0], kwargs.get("dtype"))

    def add(self, name: str, shape: str, dtype: torch.dtype, variants: dict[str, Any]) -> None:
        if (name, shape) in self.found:
            self.found[name, shape].calls += 1
        else:
            self.found[name, shape] = _Operation(name, shape, self.stack[-1] if self.stack else "", dtype, variants)

    def by_rows(self, name: str, x: Tensor, outputs: int, call: Callable[[Tensor], Tensor]) -> None:
        name = "unembed" if name == "linear" and outputs == self.vocabulary else name
        rows = _longer(x.detach().reshape(-1, x.shape[-1]), 0, max(self.sizes))
        variants = {"rows": lambda n: _row_pair(call, rows, n), "batch": lambda n: _batch_pair(call, rows[None, :8], n)}
        self.add(name, f"{x.shape[-1]} to {outputs}", x.dtype, variants)

    def batched(self, a: Tensor, b: Tensor, result: Tensor) -> None:
        most = max(self.sizes)
        a, b = a.detach(), b.detach()
        if self.scores is not None and a.shape[-1] == self.scores.shape[-1]:
            weights = torch.softmax(_longer(_longer(self.scores, -1, most), -2, most).float(), -1).to(a.dtype)
            values = _longer(b, -2, most)
            self.scores = None
            variants = {
                "rows": lambda n: _attend_rows(torch.matmul, weights, values, n),
                "keys": lambda n: _padded_values(weights[..., :1, :], values, n),
                "batch": lambda n: _batch_pair(
                    lambda w: torch.matmul(w, values.expand(len(w), -1, -1, -1)), weights[..., :4, :], n
                ),
            }
            self.add("values", f"keys by {b.shape[-1]}, {b.shape[1]} heads", a.dtype, variants)
            return
        self.scores = result.detach()
        query, key = _longer(a, -2, most), _longer(b, -1, most)
        variants = {
            "rows": lambda n: _attend_rows(torch.matmul, query, key, n),
            "keys": lambda n: (
                torch.matmul(query[..., :1, :], key[..., :n]),
                torch.matmul(query[..., :1, :], key)[..., :n],
            ),
            "batch": lambda n: _batch_pair(lambda q: torch.matmul(q, key.expand(len(q), -1, -1, -1)), query[..., :4, :], n),
        }
        self.add("scores", f"{a.shape[-1]} by keys, {a.shape[1]} heads", a.dtype, variants)

    def softmax(self, x: Tensor, dtype: torch.dtype | None) -> None:
        scores = self.scores if self.scores is not None else x
        full = _longer(_longer(scores.detach(), -1, max(self.sizes)), -2, max(self.sizes))

        def call(s: Tensor) -> Tensor:
            return torch.softmax(s, -1, dtype=dtype).to(x.dtype)

        def masked(n: int) -> tuple[Tensor, Tensor]:
            hidden = full[..., :1, :].clone()
            hidden[..., n:] = -torch.inf
            return call(full[..., :1, :n]), call(hidden)[..., :n]

        rows = {"rows": lambda n: (call(full[..., :n, :])[..., :1, :], call(full[..., :1, :])), "keys": masked}
        self.add("softmax", f"over keys, {x.shape[1]} heads", x.dtype, rows)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        most = max(self.sizes)
        scale, shared = kwargs.get("scale"), kwargs.get("enable_gqa", False)
        query, key, value = (_longer(t.detach(), -2, most) for t in (query, key, value))

        def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return _F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)

        def masked(n: int) -> tuple[Tensor, Tensor]:
            seen = (torch.arange(most, device=query.device) < n)[None, None, None]
            one = query[..., :1, :]
            return call(one, key[..., :n, :], value[..., :n, :]), call(one, key, value, seen)

        variants = {
            "rows": lambda n: _attend_rows(lambda q, _: call(q, key, value), query, key, n),
            "keys": masked,
            "batch": lambda n: _batch_pair(
                lambda q: call(q, key.expand(len(q), -1, -1, -1), value.expand(len(q), -1, -1, -1)), query[..., :4, :], n
            ),
        }
        self.add(
            "attention (SDPA)",
            f"head_dim {query.shape[-1]}, {query.shape[1]} over {key.shape[1]} heads",
            query.dtype,
            variants,
        )


def _collect(adapter: Adapter, tokens: Tensor, sizes: Sequence[int]) -> list[_Operation]:
    collector, subject = _Collector(adapter, sizes), Subject(adapter)

    def enter(module: nn.Module, _: Any) -> None:
        collector.stack.append(subject.name_of(module))

    def leave(module: nn.Module, given: Any, output: Any) -> None:
        if collector.stack:
            collector.stack.pop()
        if "Norm" in type(module).__name__ and given and isinstance(output, Tensor) and given[0].shape == output.shape:
            collector.stack.append(subject.name_of(module))
            call: Any = type(module).forward.__get__(module)
            collector.by_rows("norm", given[0], output.shape[-1], lambda x: call(x[None])[0] if x.dim() == 2 else call(x))
            collector.stack.pop()

    handles = []
    try:
        for module in adapter.model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        with collector:
            subject.recompute(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return list(collector.found.values())


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
