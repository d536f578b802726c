"""The kernels table: for each operation a model really calls, whether a row's result depends on
what it is computed with.

The operations and their inputs are those of one forward of the model. Each is then called again on
those inputs with other numbers of rows, other numbers of keys (the added ones masked) and another
batch, and the result of the same row is compared bit by bit. Where it differs, each flag that may
change which kernel runs is turned in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvinterp.auditing.blocks import BlockModel, prompts_for, referenced
from kvinterp.auditing.first_difference import Feed, look
from kvinterp.auditing.ladder import part_named
from kvinterp.common.checks import check_whole, given_list, whole_number
from kvinterp.common.numbers import counted, models_of
from kvinterp.common.progress import each
from kvinterp.common.result import Contents, Result, Row, signed
from kvinterp.errors import InputError, shown
from kvinterp.metrics.kv import units_in_last_place
from kvinterp.models import wrap
from kvinterp.models.attention_calls import MATMUL, Fused, Product, Recogniser, Scores, Values
from kvinterp.models.hooks import Functions, in_order
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.paths.kernels import KernelMode, Kernels, Native, kernels_named

SIZES = (1, 2, 17, 64, 128, 257)
"""Numbers of rows, and of keys: one, few, and both sides of the usual tiles."""
STEPS = 2
"""Tokens fed one by one after the prompt, to see where the newest row first differs."""

LARGEST = 16_384
"""The most rows or keys that are worth the memory: a product of that many with itself is a gigabyte
in float32.
"""


@dataclasses.dataclass(repr=False)
class KernelsTable(Result):
    """What was found.

    Attributes:
        table: One row an operation, varied dimension and size: operation, shape, where (first
            module), calls, varied, size, bitwise_equal, rows_differing (share), max_ulp (of each
            number itself, which is large where a sum cancels), max_ulp_of_row (of the row's largest
            number), flags_that_fix.
        first: The first operation of the model whose output in the newest row differs between a
            cached step and recomputation
            given equal inputs: operation, layer, tensor, module, position, error; None where none
            does. Rows before the newest, which a recomputation makes anew among more rows, are not
            asked about.
        provenance: Provenance.
    """

    VERB: ClassVar = "kernels"

    table: pd.DataFrame
    first: Row | None
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """What it is of, in one line; the table is an attribute."""
        operations = self.table.groupby(["operation", "shape"]).ngroups
        about = self.provenance
        return f"<KernelsTable of {models_of([about])}, {about['kernels']} kernels: {operations} operations>"

    def written(self) -> Contents:
        """Its table with what it was made with, and the first operation that differs."""
        summary = {"first": self.first, "provenance": self.provenance}
        return signed({"kernels": self.table}, self.provenance), summary

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> KernelsTable:
        """The table as it was written."""
        return cls(tables["kernels"], summary["first"], tables["kernels"].attrs)

    def summary(self) -> pd.DataFrame:
        """One row an operation and varied dimension: the smallest size at which it differs, and the
        worst ULP.
        """
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

    overview = summary

    def __str__(self) -> str:
        # The back ends of SDPA that the model could use, and does not, are in the table alone.
        called = self.table[self.table["calls"] > 0]
        first, same = self.first, called.groupby(["operation", "shape"])["bitwise_equal"].all()
        depend = int((~same).sum())
        sentence = f"{counted(len(same), 'operation')}; {depend} depend{'s' * (depend == 1)} on the shape. "
        if first is None:
            return sentence + (
                f"Given equal inputs, the newest row of each of {STEPS} tokens fed after a prompt of {self.provenance['length']} "
                "has the same bits in every operation, cached and recomputed. Earlier rows, and other lengths, were not "
                "asked about: kvinterp compare runs whole prompts."
            )
        what = "" if first["tensor"] == first["module"] else f"{first['tensor']} of "
        by = f" ({first['operation']})" if first["operation"] else ""
        return sentence + (
            f"Given equal inputs, the newest row first differs in {what}{first['module']}{by}, "
            f"{part_named(first['layer'], first['tensor'])}, "
            f"relative error {first['error']:.1e}."
        )


def kernels_table(
    model: Any,
    *,
    kernels: str | Kernels = "native",
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    length: int = 24,
) -> KernelsTable:
    """Measures which of a model's operations depend on the shape they are called with.

    Args:
        model: A model of any kind or an adapter.
        kernels: The kernels to examine: native, batch_invariant, split_k(4,float16), layer_cast, ...
        sizes: The numbers of rows, and of keys, to compare.

            The smallest is the reference for rows, the largest for keys.
        seed: Seed for the random prompt.

            Its forward gives the inputs.
        length: Tokens of that prompt.

    Raises:
        InputError: The sizes are not at least two whole numbers from 1 on.
    """
    expected = f"at least two whole numbers from 1 to {LARGEST}, as in (1, 2, 17, 64)"
    sizes = [whole_number(size) or 0 for size in given_list("sizes", sizes, expected)]
    if len(sizes) < 2 or not all(1 <= size <= LARGEST for size in sizes):
        raise InputError(f"sizes={shown(tuple(sizes))} was given: expected {expected}.")
    check_whole("length", length, 2)
    adapter, kernels = wrap(model), kernels_named(kernels)
    mode = kernels.mode(adapter)
    length = min(length, adapter.facts.context - STEPS)
    tokens = torch.tensor(prompts_for(adapter, 1, length + STEPS, seed), device=adapter.device)
    rows: list[Row] = []
    with torch.no_grad(), own_threads(adapter):
        operations = _Collector(BlockModel(adapter), max(sizes)).run(tokens[:, :length])
        for operation in each(operations, "measuring", "operation"):
            # A kernel mode that takes attention over leaves no back end to choose.
            if operation.calls or isinstance(kernels, Native):
                rows += _measure(operation, sorted(sizes), mode)
        first = _first(BlockModel(adapter, kernels), tokens, length, operations)
    about = provenance(adapter, kernels=str(kernels), sizes=sizes, length=length)
    return KernelsTable(pd.DataFrame(rows), first, about)


def _first(
    model: BlockModel, tokens: Tensor, length: int, operations: Sequence[Operation]
) -> Row | None:
    """The first tensor that differs, with the operation of the table that computed it (the last one
    its module calls).
    """
    with referenced(model, tokens) as hooks:
        looked = look(
            hooks, Feed.one_by_one(length, length + STEPS), range(-1, len(model.blocks) + 1)
        )
        differing = [
            tensors[0]
            for sights in looked
            for sight in sights.values()
            if (tensors := sight.findings(0.0))
        ]
    if not differing:
        return None
    finding = min(differing, key=lambda one: one.layer)
    inner = {
        "attention output": ("attention (SDPA)", "values"),
        "attention scores": ("scores",),
    }.get(finding.tensor)
    mine = [
        o
        for o in operations
        if o.calls and any(f"{m}.".startswith(f"{finding.module}.") for m in o.modules)
    ]
    names = [f"{o.name} {o.shape}" for o in mine if inner is None or o.name in inner]
    where = {n: getattr(finding, n) for n in ("layer", "tensor", "module", "position", "error")}
    return {"operation": names[-1] if names else "", **where}


# Measuring one operation --------------------------------------------------------------------------


def _measure(operation: Operation, sizes: Sequence[int], mode: KernelMode) -> list[Row]:
    rows = []
    mode.expect(operation.name if operation.name in ("scores", "values", "unembed") else "linear")
    for varied, call in operation.variants.items():
        for size in sizes if varied != "batch" else (1, 2, 4):
            try:
                with mode:
                    mine, alone = call(size)
            except RuntimeError:
                if operation.calls:
                    raise
                continue  # A back end that has no kernel for these inputs.
            gap, equal = (mine.double() - alone.double()).abs(), torch.equal(mine, alone)
            unit = units_in_last_place(
                torch.maximum(mine.double().abs(), alone.double().abs()), operation.dtype
            )
            rows.append(
                {
                    "operation": operation.name,
                    "shape": operation.shape,
                    "where": next(iter(operation.modules), ""),
                    "calls": operation.calls,
                    "varied": varied,
                    "size": size,
                    "bitwise_equal": equal,
                    "rows_differing": float((gap > 0).any(-1).double().mean()),
                    "max_ulp": float((gap / unit).max()),
                    "max_ulp_of_row": float((gap / unit.amax(-1, keepdim=True)).max()),
                    "flags_that_fix": ""
                    if equal
                    else _fixing(operation.name, partial(call, size), mode, mine.device),
                }
            )
    return rows


def _fixing(name: str, call: Callable[[], Pair], mode: KernelMode, device: torch.device) -> str:
    """The flags under which the result no longer depends on the shape."""
    switches = _switches(device)
    if name == "attention (SDPA)":
        switches = {
            f"sdpa {kind}": partial(sdpa_kernel, backend) for kind, backend in BACKENDS.items()
        } | switches
    fixing = []
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch's own context of oneDNN's flags sets older names of them.
        for switch, flag in switches.items():
            # Some combinations of flags have no kernel for these inputs.
            with contextlib.suppress(RuntimeError), flag(), mode:
                if torch.equal(*call()):
                    fixing.append(switch)
    return ", ".join(fixing)


def _switches(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Every switch that may choose another kernel on this device, by name; each restores what it
    changed.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )

    def put(on: bool, warn_only: bool) -> None:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)

    switches = {"deterministic algorithms": partial(_set, put, before, (not before[0], True))}
    if device.type != "cuda":
        return {"oneDNN off": partial(torch.backends.mkldnn.flags, enabled=False), **switches}
    reduced = (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_tf32",
    )
    return {
        **{name: partial(_toggled, torch.backends.cuda.matmul, name) for name in reduced},
        **switches,
    }


def _toggled(holder: Any, name: str) -> contextlib.AbstractContextManager[None]:
    before = getattr(holder, name)
    # torch keeps two switches under the name of the reduction: setting it by one value turns
    # split-K on, and it refuses a reduced reduction without split-K.
    split_k = getattr(holder, f"{name}_split_k", None)
    both, turned = (
        (before, not before)
        if split_k is None
        else ((before, split_k), (not before, split_k or not before))
    )
    return _set(partial(setattr, holder, name), (both,), (turned,))


@contextlib.contextmanager
def _set(put: Callable[..., Any], before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[None]:
    put(*now)
    try:
        yield
    finally:
        put(*before)


# The operations a model calls, with the inputs it calls them with, each ready to be called again in

_F = torch.nn.functional
_GROUPED = (getattr(torch, "_grouped_mm", None), getattr(_F, "grouped_mm", None))
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

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


class _Collector:
    """Collects the operations of one forward; ``most``: how many rows or keys each will be called
    with.
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
