"""What values say: how far apart two tensors are, whether they lie on a narrower dtype's grid, where NaN or Inf first appears."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.blocks import BlockModel
from kvinterp.auditing.ladder import dtype_name
from kvinterp.models.hooks import first_of

TINY = torch.finfo(torch.float32).tiny
"""The least magnitude that a difference is divided by."""


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Difference of each number, in float64; 0 where both are the same infinity, inf where only one is a number."""
    x, y = a.double(), b.double()
    return (x - y).abs().masked_fill(x == y, 0.0).nan_to_num(math.inf, posinf=math.inf)


def magnitude(values: Tensor) -> float:
    """The largest finite magnitude, or 0."""
    finite = values.double()[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest finite magnitude of ``b``, which may be all zero; inf where one is no number."""
    if torch.equal(a, b) or not a.numel():
        return 0.0
    return gap(a, b).max().item() / max(magnitude(b), TINY)


def row_errors(mine: Tensor, theirs: Tensor) -> Tensor:
    """As :func:`difference`, row by row, over the newest rows that both have."""
    count = min(len(mine), len(theirs))
    a, b = (t[len(t) - count :].double().flatten(1) for t in (mine, theirs))
    return (gap(a, b).amax(-1) / b.abs().amax(-1).clamp(min=TINY)).nan_to_num(math.inf, posinf=math.inf)


def first_wrong(errors: Tensor) -> int:
    """The first that is as wrong as any, to within a factor of ten: not one that differs by rounding only."""
    return int((errors >= errors.max() / 10).int().argmax())


# What values say by themselves ----------------------------------------------------------------------------------------


def narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a floating-point dtype rounds more coarsely: bfloat16 is narrower than float16."""
    return torch.finfo(dtype).eps > torch.finfo(than).eps


def on_grid(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every number is exactly one of a narrower dtype's."""
    return narrower(dtype, values.dtype) and torch.equal(values.to(dtype).to(values.dtype), values)


def logit_grid(logits: Tensor) -> str:
    """The 16-bit dtype that holds every logit exactly, though they claim more bits; bfloat16 first, whose grid is coarser.

    Logits that are all zero lie on every grid and say nothing.
    """
    if not bool(logits.any()) or torch.finfo(logits.dtype).bits < 32:
        return ""
    grids = [d for d in (torch.bfloat16, torch.float16) if on_grid(logits, d)]
    return dtype_name(grids[0]) if grids else ""


@contextlib.contextmanager
def _told_outputs(model: BlockModel, tell: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Tells every module's name and floating-point output, for as long as the context lasts."""

    def hook(module: Any, _: Any, output: Any) -> None:
        result = first_of(getattr(output, "logits", output))
        if isinstance(result, Tensor) and result.is_floating_point():
            tell(model.name_of(module), result)

    with contextlib.ExitStack() as hooks:
        for module in model.adapter.source.modules():
            hooks.enter_context(module.register_forward_hook(hook))
        yield


def grid_module(model: BlockModel, tokens: Tensor, dtype: torch.dtype) -> str:
    """The module from which on every output lies on a narrower dtype's grid.

    What went before may have been there by chance (16-bit weights).
    """
    outputs: list[tuple[str, bool]] = []

    def tell(name: str, output: Tensor) -> None:
        if output.numel() > 1:
            outputs.append((name or type(model.adapter.source).__name__, on_grid(output, dtype)))

    with _told_outputs(model, tell):
        model.recompute(tokens)
    last_off = max((i for i, (_, on) in enumerate(outputs) if not on), default=-1)
    return outputs[min(last_off + 1, len(outputs) - 1)][0] if outputs else ""


def first_nonfinite(model: BlockModel, tokens: Tensor, prefill: int | None) -> dict[str, Any]:
    """The first module whose output holds NaN or Inf, on a second run of the same tokens with every module hooked.

    Args:
        model: The model.
        tokens: ``[1, position]``.
        prefill: How many are fed at once before the others one by one; None recomputes them without a cache.
    """
    named = model.model.named_parameters()
    weights = next((name for name, p in named if p.is_floating_point() and not bool(p.isfinite().all())), "")
    path = "recompute" if prefill is None else "cached"
    answer = {"path": path, "module": "", "value": "NaN or Inf", "position": None, "weights": weights}
    first: dict[str, Any] = {}
    fed: int | None = None

    def tell(name: str, output: Tensor) -> None:
        if not first and not bool(output.isfinite().all()):
            rows = (~output.isfinite()).flatten(2).any(-1)[0] if output.dim() >= 3 and output.shape[0] == 1 else None
            position = fed if fed is not None or rows is None else int(rows.int().argmax())
            first.update(module=name, value="NaN" if bool(output.isnan().any()) else "Inf", position=position)

    with _told_outputs(model, tell):
        if prefill is None:
            model.recompute(tokens)
        else:
            _, cache = model.feed(tokens[:, :prefill])
            for fed in range(prefill, tokens.shape[1]):
                if not first:
                    _, cache = model.feed(tokens[:, fed : fed + 1], cache, fed)
    name = first.get("module", "")
    blocks = {model.name_of(block): layer for layer, block in enumerate(model.blocks)}
    first["layer"] = next((layer for block, layer in blocks.items() if name == block or name.startswith(block + ".")), None)
    return answer | first
