"""What values say by themselves: whether they lie on a narrower dtype's grid, and where NaN or Inf first appears."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.subject import Subject, first_of
from kvinterp.models import Adapter

__all__ = ["first_nonfinite", "grid_module", "logit_grid", "narrower", "on_grid"]


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
    found = [d for d in (torch.bfloat16, torch.float16) if on_grid(logits, d)]
    return dtype_name(found[0]) if found else ""


@contextlib.contextmanager
def _hooked(subject: Subject, hook: Any) -> Iterator[None]:
    """Every module of a model with a forward hook, for as long as the context lasts."""
    with contextlib.ExitStack() as hooks:
        for module in subject.adapter.source.modules():
            hooks.callback(module.register_forward_hook(hook).remove)
        yield


def grid_module(subject: Subject, tokens: Tensor, dtype: torch.dtype) -> str:
    """The module from which on every output lies on a narrower dtype's grid.

    What went before may have been there by chance (16-bit weights).
    """
    seen: list[tuple[str, bool]] = []

    def hook(module: Any, _: Any, output: Any) -> None:
        made = first_of(getattr(output, "logits", output))
        if isinstance(made, Tensor) and made.is_floating_point() and made.numel() > 1:
            seen.append((subject.name_of(module) or type(module).__name__, on_grid(made, dtype)))

    with _hooked(subject, hook):
        subject.recompute(tokens)
    last_off = max((i for i, (_, on) in enumerate(seen) if not on), default=-1)
    return seen[min(last_off + 1, len(seen) - 1)][0] if seen else ""


def weights_not_finite(adapter: Adapter) -> str:
    """The first parameter that holds NaN or Inf, or ""."""
    named = adapter.model.named_parameters()
    return next((name for name, p in named if p.is_floating_point() and not bool(p.isfinite().all())), "")


def first_nonfinite(subject: Subject, tokens: Tensor, prefill: int | None, path: str) -> dict[str, Any]:
    """The first module whose output holds NaN or Inf, on a second run of the same tokens with every module hooked.

    Args:
        subject: The model.
        tokens: ``[1, position]``.
        prefill: How many are fed at once before the others one by one; None recomputes them without a cache.
        path: The path's name, for the answer.
    """
    found: dict[str, Any] = {}
    where: dict[str, int | None] = {"position": None}

    def hook(module: Any, _: Any, output: Any) -> None:
        made = first_of(getattr(output, "logits", output))
        if not found and isinstance(made, Tensor) and made.is_floating_point() and not bool(made.isfinite().all()):
            what = "NaN" if bool(made.isnan().any()) else "Inf"
            rows = (~made.isfinite()).flatten(2).any(-1)[0] if made.dim() >= 3 and made.shape[0] == 1 else None
            row = int(rows.int().argmax()) if rows is not None else None
            position = where["position"] if where["position"] is not None else row
            found.update(path=path, module=subject.name_of(module), value=what, position=position)

    with _hooked(subject, hook):
        if prefill is None:
            subject.recompute(tokens)
        else:
            _, cache = subject.feed(tokens[:, :prefill])
            for position in range(prefill, tokens.shape[1]):
                where["position"] = position
                if not found:
                    _, cache = subject.feed(tokens[:, position : position + 1], cache, position)
    blocks = {subject.name_of(block): layer for layer, block in enumerate(subject.blocks)}
    name = found.get("module", "")
    found["layer"] = next((layer for block, layer in blocks.items() if name == block or name.startswith(block + ".")), None)
    weights = weights_not_finite(subject.adapter)
    return {"path": path, "module": "", "value": "NaN or Inf", "position": None, "weights": weights} | found
