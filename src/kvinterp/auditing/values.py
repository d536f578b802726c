"""What values say: how far apart two tensors are, whether they lie on a narrower dtype's grid,
where NaN or Inf first appears.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.blocks import BlockModel
from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.programs.first_difference import Heard, heard

TINY = torch.finfo(torch.float32).tiny
"""The least magnitude that a difference is divided by."""


def row_errors(mine: Tensor, theirs: Tensor) -> Tensor:
    """Each row's largest difference over the largest finite magnitude of ``theirs``, in the newest
    rows that both have.

    0 where both are the same infinity, inf where only one is a number; the magnitude may be all
    zero.
    """
    count = min(len(mine), len(theirs))
    a, b = (t[len(t) - count :] for t in (mine, theirs))
    if a.dtype == b.dtype and torch.equal(a, b):
        return a.new_zeros(count, dtype=torch.float64)
    a, b = (t.double().flatten(1) for t in (a, b))
    apart = (a - b).abs().masked_fill(a == b, 0.0).nan_to_num(math.inf, posinf=math.inf)
    return apart.amax(-1) / b.masked_fill(~b.isfinite(), 0.0).abs().amax(-1).clamp(min=TINY)


def difference(a: Tensor, b: Tensor) -> float:
    """The same of all numbers together."""
    return float(row_errors(a.reshape(1, -1), b.reshape(1, -1))) if a.numel() else 0.0


def first_wrong(errors: Tensor) -> int:
    """The first that is as wrong as any, to within a factor of ten: not one that differs by
    rounding only.
    """
    return int((errors >= errors.max() / 10).int().argmax())


# What values say by themselves --------------------------------------------------------------------


def narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a floating-point dtype rounds more coarsely: bfloat16 is narrower than float16."""
    return torch.finfo(dtype).eps > torch.finfo(than).eps


def on_grid(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every number is exactly one of a narrower dtype's."""
    return narrower(dtype, values.dtype) and torch.equal(values.to(dtype).to(values.dtype), values)


def logit_grid(logits: Tensor) -> str:
    """The 16-bit dtype that holds every logit exactly, though they claim more bits; bfloat16 first,
    whose grid is coarser.

    Logits that are all zero lie on every grid and say nothing.
    """
    if not bool(logits.any()) or torch.finfo(logits.dtype).bits < 32:
        return ""
    grids = [d for d in (torch.bfloat16, torch.float16) if on_grid(logits, d)]
    return dtype_name(grids[0]) if grids else ""


def _outputs(model: BlockModel, *parts: Tensor) -> list[list[tuple[str, Tensor]]]:
    """What every module returns, by its path, where parts of a text are fed; without a cache where
    there is one.
    """
    seen, cache = list[Heard](), None
    with heard(model.adapter.source, seen):
        for part in parts:
            cache = model.feed(part, cache)[1] if len(parts) > 1 else model.recompute(part)
    top = type(model.adapter.source).__name__
    return [
        [
            (name.replace("._original_component", "") or top, tensor)
            for (name, what, _), tensor in one.items()
            if what == "output of"
        ]
        for one in seen
    ]


def grid_module(model: BlockModel, tokens: Tensor, dtype: torch.dtype) -> str:
    """The module from which on every output lies on a narrower dtype's grid.

    What went before may have been there by chance (16-bit weights).
    """
    outputs = [
        (name, on_grid(output, dtype))
        for name, output in _outputs(model, tokens)[0]
        if output.numel() > 1
    ]
    last_off = max((i for i, (_, on) in enumerate(outputs) if not on), default=-1)
    return outputs[min(last_off + 1, len(outputs) - 1)][0] if outputs else ""


def first_nonfinite(model: BlockModel, tokens: Tensor, prefill: int | None) -> dict[str, Any]:
    """The first module whose output holds NaN or Inf, on a second run of the same tokens with every
    module heard.

    Args:
        model: The model.
        tokens: ``[1, position]``.
        prefill: How many are fed at once before the others one by one; None recomputes them without
            a cache.
    """
    named = model.model.named_parameters()
    weights = next(
        (name for name, p in named if p.is_floating_point() and not bool(p.isfinite().all())), ""
    )
    parts = (tokens[:, :prefill], *tokens[:, prefill:].split(1, 1)) if prefill else (tokens,)
    outputs = [
        (at, *output) for at, forward in enumerate(_outputs(model, *parts)) for output in forward
    ]
    at, module, tensor = next(
        (one for one in outputs if not bool(one[2].isfinite().all())), (0, "", None)
    )
    value, position = "NaN or Inf", prefill + at - 1 if prefill and at else None
    if tensor is not None:
        value = "NaN" if bool(tensor.isnan().any()) else "Inf"
        if position is None and tensor.dim() >= 3 and len(tensor) == 1:
            position = int((~tensor.isfinite()).flatten(2).any(-1)[0].int().argmax())
    layers = (
        n
        for n, block in enumerate(model.blocks)
        if f"{module}.".startswith(f"{model.name_of(block)}.")
    )
    where = {"module": module, "value": value, "position": position, "layer": next(layers, None)}
    return {"path": "cached" if prefill else "recompute", "weights": weights, **where}
