"""``split_k``: a product of one row is added up in parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvinterp.common.checks import check_known, check_whole
from kvinterp.common.words import dtype_word
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener
from kvinterp.models.derived import SDPA, sdpa_arguments
from kvinterp.models.hooks import Functions
from kvinterp.paths.kernels import fixed_order
from kvinterp.paths.kernels.base import (
    KernelMode,
    Kernels,
    Operations,
    drops_out,
    refuse_opaque_attention,
)

aten: Any = torch.ops.aten
OPERATIONS = {
    "linear": "projections and the MLP's products",
    "scores": "queries by keys",
    "values": "attention probabilities by values",
    "unembed": "the last residual stream to logits",
}
ACCUMULATE = ("float16", "float32")


@dataclasses.dataclass(frozen=True)
class SplitK(Kernels):
    """A product of one row is added up in parts whose sums are rounded before they are added
    together.

    What GPU libraries do when there are too few rows to fill the machine. Products of more rows
    keep the machine's kernels, and that is what makes the order depend on the shape.

    Attributes:
        parts: How many pieces the shared dimension is cut into.
        accumulate: ``"float16"``: in a 16-bit model the parts' sums are rounded to the model's own
            16 bits (what ``allow_fp16_reduced_precision_reduction`` lets a library do);
            ``"float32"``: they are added in float32. A 32- or 64-bit model adds them in its own
            dtype either way.
        operations: Which of :data:`OPERATIONS`; empty for all.
        layers: Which layers; empty for all. The unembedding belongs to no layer and is chosen by
            operation only.
    """

    parts: int = 4
    accumulate: str = "float16"
    operations: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for operation in self.operations:
            check_known("operation", operation, OPERATIONS)

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts products of one row; raises InputError for a layer the model does not have."""
        check_layers(self, adapter)
        return _SplitKMode(self, adapter)


def check_fields(kernels: Any) -> None:
    """Checks the number of parts, the dtype of their sums and the layers of a mode that has
    these.
    """
    check_whole(f"{kernels.name}'s parts", kernels.parts, 2)
    object.__setattr__(kernels, "accumulate", dtype_word(kernels.accumulate))
    check_known(f"{kernels.name} accumulate dtype", kernels.accumulate, ACCUMULATE)
    for layer in kernels.layers:
        check_whole(f"{kernels.name}'s layer", layer, 0)


def check_layers(kernels: Any, adapter: Adapter) -> None:
    """Raises where attention is a kernel torch does not see into, or the model lacks a layer that a
    mode names.
    """
    refuse_opaque_attention(adapter, kernels)
    beyond = [layer for layer in kernels.layers if layer >= adapter.facts.layers]
    if beyond:
        raise InputError(
            f"{kernels} names layer {beyond[0]}: {adapter.facts.name} has layers 0 to {adapter.facts.layers - 1}."
        )


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
        hook_points = [
            (site, layer) for layer in range(count) for site in ("resid_pre", "resid_post")
        ]
        self.listeners = {
            hook_point: self._follow(*hook_point, last=count - 1) for hook_point in hook_points
        }

    def interceptors(self) -> list[Any]:
        self.layer, self.last, self.after_softmax = None, False, False
        return [Functions(self._function), Operations(self._operation)]

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
        if func is not SDPA or drops_out(*args, **kwargs):
            return NotImplemented
        query, key, value, mask, _, scale = sdpa_arguments(*args, **kwargs)
        if query.shape[-2] != 1 or not (self._chosen("scores") or self._chosen("values")):
            return NotImplemented
        wide = fixed_order.wide(query.dtype)
        parts = self.kernels.parts
        scores = self._split(
            query, key.transpose(-1, -2), parts if self._chosen("scores") else 1
        ).to(wide)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -torch.inf)
                if mask.dtype == torch.bool
                else scores + mask.to(wide)
            )
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
        """``a @ b`` in parts of the shared dimension; each part's sum is rounded, then they are
        added in order.
        """
        wide = fixed_order.wide(a.dtype)
        # A product that is not split has no sums to round: what a kernel holds between its steps is
        # float32.
        between = a.dtype if self.kernels.accumulate == "float16" and parts > 1 else wide
        size = -(-a.shape[-1] // parts)
        pieces = zip(a.to(wide).split(size, -1), b.to(wide).split(size, -2), strict=True)
        sums = [torch.matmul(x, y).to(between) for x, y in pieces]
        total = sums[0]
        for term in sums[1:]:
            total = total + term
        return total.to(wide)
