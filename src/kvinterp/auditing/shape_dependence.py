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
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kvinterp.auditing.blocks import BlockModel, prompts_for, referenced
from kvinterp.auditing.first_difference import Feed, look
from kvinterp.auditing.ladder import part_named
from kvinterp.auditing.model_operations import BACKENDS, Operation, OperationCollector, Pair
from kvinterp.common.checks import check_whole, given_list, whole_number
from kvinterp.common.numbers import counted, models_of
from kvinterp.common.progress import each
from kvinterp.common.result import Contents, Result, Row, signed
from kvinterp.errors import InputError, shown
from kvinterp.metrics.kv import units_in_last_place
from kvinterp.models import wrap
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
        operations = OperationCollector(BlockModel(adapter), max(sizes)).run(tokens[:, :length])
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
