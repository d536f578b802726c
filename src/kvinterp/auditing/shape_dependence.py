"""The kernels table: for each operation a model really calls, whether a row's result depends on what it is computed with.

The operations and their inputs are those of one forward of the model. Each is then called again on those inputs with other
numbers of rows, other numbers of keys (the added ones masked) and another batch, and the result of the same row is compared
bit by bit. Where it differs, each flag that may change which kernel runs is turned in turn.
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
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kvinterp.auditing.blocks import BlockModel, prompts_for, referenced
from kvinterp.auditing.first_difference import Feed, Finding, look
from kvinterp.auditing.operations import BACKENDS, Operation, Variant, collect
from kvinterp.common.kept import Kept, signed
from kvinterp.common.progress import each
from kvinterp.errors import InputError, shown
from kvinterp.metrics.kv import units_in_last_place
from kvinterp.models import Adapter, wrap
from kvinterp.models.inputs import check_whole, given_list, whole_number
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.paths.kernels import KernelMode, Kernels, Native, kernels_named

SIZES = (1, 2, 17, 64, 128, 257)
"""Numbers of rows, and of keys: one, few, and both sides of the usual tiles."""
STEPS = 2
"""Tokens fed one by one after the prompt, to see where the newest row first differs."""

LARGEST = 16_384
"""The most rows or keys that are worth the memory: a product of that many with itself is a gigabyte in float32."""


@dataclasses.dataclass(repr=False)
class KernelsTable(Kept):
    """What was found.

    Attributes:
        table: One row an operation, varied dimension and size: operation, shape, where (first module), calls, varied, size,
            bitwise_equal, rows_differing (share), max_ulp (of each number itself, which is large where a sum cancels),
            max_ulp_of_row (of the row's largest number), flags_that_change, flags_that_fix.
        first: The first operation of the model whose output in the newest row differs between a cached step and recomputation
            given equal inputs: operation, layer, tensor, module, position, error; None where none does. Rows before the newest,
            which a recomputation makes anew among more rows, are not asked about.
        provenance: Provenance.
    """

    VERB: ClassVar = "kernels"

    table: pd.DataFrame
    first: dict[str, Any] | None
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """What it is of, in one line; the table is an attribute."""
        operations = self.table.groupby(["operation", "shape"]).ngroups
        about = self.provenance
        return f"<KernelsTable of {about['model']}, {about['dtype']}, {about['kernels']} kernels: {operations} operations>"

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its table with what it was made with, the first operation that differs, and what they say."""
        summary = {"first": self.first, "reading": str(self).splitlines(), "provenance": self.provenance}
        return signed({"kernels": self.table}, self.provenance), summary

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> KernelsTable:
        """The table as it was written."""
        return cls(tables["kernels"], summary["first"], tables["kernels"].attrs)

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

    overview = summary

    def __str__(self) -> str:
        first, same = self.first, self.table.groupby(["operation", "shape"])["bitwise_equal"].all()
        said = f"{len(same)} operations; {int((~same).sum())} depend on the shape. "
        if first is None:
            return said + (
                f"Given equal inputs, the newest row of each of {STEPS} tokens fed after a prompt of {self.provenance['length']} "
                "has the same bits in every operation, cached and recomputed. Earlier rows, and other lengths, were not "
                "asked about: kvinterp compare runs whole prompts."
            )
        what = "" if first["tensor"] == first["module"] else f"{first['tensor']} of "
        by = f" ({first['operation']})" if first["operation"] else ""
        return said + (
            f"Given equal inputs, the newest row first differs in {what}{first['module']}{by}, layer {first['layer']}, "
            f"relative error {first['error']:.1e}."
        )


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
    expected = f"at least two whole numbers from 1 to {LARGEST}, as in (1, 2, 17, 64)"
    sizes = [whole_number(size) or 0 for size in given_list("sizes", sizes, expected)]
    if len(sizes) < 2 or not all(1 <= size <= LARGEST for size in sizes):
        raise InputError(f"sizes={shown(tuple(sizes))} was given: expected {expected}.")
    check_whole("length", length, 2)
    adapter, kernels = wrap(model), kernels_named(kernels)
    length = min(length, adapter.facts.context - STEPS)
    prompt = prompts_for(adapter, 1, length + STEPS, seed)[0]
    tokens = torch.tensor([list(prompt[:length])], device=adapter.device)
    mode = kernels.mode(adapter)
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), own_threads(adapter):
        operations = collect(adapter, tokens, sorted(sizes))
        for operation in each(operations, "measuring", "operation"):
            # A kernel mode that takes attention over leaves no back end to choose.
            if operation.calls or isinstance(kernels, Native):
                rows += _measure(operation, sorted(sizes), mode)
        first = _first(adapter, kernels, prompt, length)
    about = provenance(adapter, kernels=str(kernels), sizes=list(sizes), length=length)
    return KernelsTable(pd.DataFrame(rows), None if first is None else _described(first, operations), about)


def _described(found: Finding, operations: Sequence[Operation]) -> dict[str, Any]:
    """The first that differs, with the operation of the table that computed it (the last one its module calls)."""
    inner = {"attention output": ("attention (SDPA)", "values"), "attention scores": ("scores",)}.get(found.tensor)
    mine = [o for o in operations if o.calls and any(f"{m}.".startswith(f"{found.module}.") for m in o.modules)]
    names = [f"{o.name} {o.shape}" for o in mine if inner is None or o.name in inner]
    where = {n: getattr(found, n) for n in ("layer", "tensor", "module", "position", "error")}
    return {"operation": names[-1] if names else "", **where}


def _first(adapter: Adapter, kernels: Kernels, prompt: Sequence[int], length: int) -> Finding | None:
    model, tokens = BlockModel(adapter, kernels), torch.tensor([list(prompt)], device=adapter.device)
    with referenced(model, tokens) as hooks:
        first: dict[int, Finding] = {}
        for sights in look(hooks, Feed.one_by_one(length, length + STEPS), range(-1, len(model.blocks) + 1)):
            for layer, sight in sights.items():
                if layer not in first and (tensors := sight.findings(0.0)):
                    first[layer] = tensors[0]
    return first[min(first)] if first else None


# Measuring one operation -----------------------------------------------------------------------------------------------


def _measure(operation: Operation, sizes: Sequence[int], mode: KernelMode) -> list[dict[str, Any]]:
    rows = []
    mode.expect(operation.kind)
    for varied, call in operation.variants.items():
        for size in sizes if varied != "batch" else (1, 2, 4):
            try:
                with mode:
                    mine, alone = call(size)
            except RuntimeError:
                if operation.calls:
                    raise
                continue  # A back end that has no kernel for these inputs.
            rows.append(
                {
                    "operation": operation.name,
                    "shape": operation.shape,
                    "where": next(iter(operation.modules), ""),
                    "calls": operation.calls,
                    "varied": varied,
                    "size": size,
                    **_apart(mine, alone, operation.dtype),
                    **_flags(operation, call, size, mine, alone, mode),
                }
            )
    return rows


def _apart(mine: Tensor, alone: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    gap = (mine.double() - alone.double()).abs()
    unit = units_in_last_place(torch.maximum(mine.double().abs(), alone.double().abs()), dtype)
    return {
        "bitwise_equal": torch.equal(mine, alone),
        "rows_differing": float((gap > 0).any(-1).double().mean()),
        "max_ulp": float((gap / unit).max()),
        "max_ulp_of_row": float((gap / unit.amax(-1, keepdim=True)).max()),
    }


def _flags(operation: Operation, call: Variant, size: int, mine: Tensor, alone: Tensor, mode: KernelMode) -> dict[str, str]:
    """The flags under which the result has other bits, and those under which it no longer depends on the shape."""
    changes, fixes = [], []
    chooses = operation.name == "attention (SDPA)"
    switches = {} if torch.equal(mine, alone) else _switches(mine.device, "sdpa" if chooses else "")
    for name, flag in switches.items():
        try:
            with flag(), mode:
                again, again_alone = call(size)
        except RuntimeError:
            continue  # This combination of flags has no kernel for these inputs.
        if not torch.equal(again, mine):
            changes.append(name)
        if torch.equal(again, again_alone):
            fixes.append(name)
    return {"flags_that_change": ", ".join(changes), "flags_that_fix": ", ".join(fixes)}


def _switches(device: torch.device, also: str) -> dict[str, Callable[[], Any]]:
    """Every switch that may choose another kernel on this device, by name; each restores what it changed."""
    backends: dict[str, Callable[[], Any]] = (
        {f"sdpa {name}": partial(sdpa_kernel, backend) for name, backend in BACKENDS.items()} if also == "sdpa" else {}
    )
    if device.type != "cuda":
        return {**backends, "oneDNN off": _without_onednn, "deterministic algorithms": _deterministic}
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    toggles: dict[str, Callable[[], Any]] = {name: partial(_toggled, matmul, name) for name in names}
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
    # torch keeps two switches under the name of the reduction: setting it by one value turns split-K on, and it refuses a
    # reduced reduction without split-K.
    split_k = getattr(holder, f"{name}_split_k", None)
    setattr(holder, name, not before if split_k is None else (not before, split_k or not before))
    try:
        yield
    finally:
        setattr(holder, name, before if split_k is None else (before, split_k))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(not before, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
