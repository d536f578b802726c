"""Which arithmetic a path computes with: the machine's own kernels, or ones whose order of additions is known.

A kernel mode is part of an :class:`ExecutionPath`, and like it only a description. The loops in ``runner.py`` enter it
around every forward. It works by torch's own interception of calls (``TorchFunctionMode`` and ``TorchDispatchMode``), so it
reaches a HookedTransformer, a bridge and a transformers model alike, and leaves nothing behind.

=====================================  ==========================================================================
``native``                             the machine's kernels
``split_k(parts,accumulate)``          a product of one row is added up in parts, as GPU libraries do: the order
                                       then depends on the number of rows, which is what a cache changes
``flash_decoding(parts,accumulate)``   attention of one row is computed over parts of the keys, each with a softmax
                                       of its own, merged by their log-sum-exp
``batch_invariant``                    one fixed order for every product, norm and softmax, whatever the shape
``layer_cast``                         16-bit weights, everything computed in float32 (Yuan et al. 2025, LayerCast)
=====================================  ==========================================================================

Which library does which stands in ``docs/kernels.md``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, ClassVar

from kvinterp.errors import InputError, unknown
from kvinterp.inputs import check_text
from kvinterp.models import Adapter
from kvinterp.paths.batch_invariant import BatchInvariant
from kvinterp.paths.flash_decoding import FlashDecoding
from kvinterp.paths.kernel_mode import KernelMode, Kernels
from kvinterp.paths.layer_cast import LayerCast
from kvinterp.paths.split_k import OPERATIONS, SplitK

__all__ = [
    "KERNELS",
    "OPERATIONS",
    "BatchInvariant",
    "FlashDecoding",
    "KernelMode",
    "Kernels",
    "LayerCast",
    "Native",
    "SplitK",
    "kernels_named",
]


@dataclasses.dataclass(frozen=True)
class Native(Kernels):
    """The machine's own kernels; nothing is intercepted."""

    name: ClassVar[str] = "native"

    def mode(self, adapter: Adapter) -> KernelMode:
        """A mode that does nothing."""
        return KernelMode()


KERNELS: dict[str, type[Kernels]] = {mode.name: mode for mode in (Native, SplitK, FlashDecoding, BatchInvariant, LayerCast)}


def kernels_named(text: str | Kernels) -> Kernels:
    """Reads a kernel mode's text form: ``native``, ``batch_invariant``, ``split_k(4,float16,linear+unembed,0+2)``.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    if isinstance(text, Kernels):
        return text
    text = check_text("kernels", text, "'batch_invariant', or a kernel mode such as SplitK(4)")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None or match.group(1) not in KERNELS:
        raise unknown("kernel mode", text, KERNELS, "Values go in brackets, as in split_k(4,float16).")
    name, given = match.groups()
    values = [_value(part.strip()) for part in given.split(",")] if given else []
    fields = dataclasses.fields(KERNELS[name])
    for index, field in enumerate(fields[: len(values)]):
        if str(field.type).startswith("tuple"):
            values[index] = () if values[index] == "all" else tuple(map(_value, str(values[index]).split("+")))
    try:
        return KERNELS[name](*values)
    except TypeError as error:
        known = ", ".join(field.name for field in fields) or "no values"
        raise InputError(f"kernel mode {text!r} cannot be read: {name} takes {known}.") from error


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
