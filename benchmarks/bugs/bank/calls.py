"""Faults that one way of feeding a cache shows: pads, a crop, beams, drafts, rows that are selected, what ``generate()`` prepares.

Plain decoding of one prompt is right in all of them, so that only the named program shows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import DynamicCache

from bank.bugs_paths import generate_positions
from bank.planting import around
from bank.small import small


@dataclasses.dataclass(frozen=True)
class CallFault:
    """A fault that a program shows.

    Args:
        name: Its name in tests and tables.
        plan: The text form of the plan that shows it.
        plant: Makes the buggy model of a clean one; `monkeypatch` undoes what is planted outside the model.
        layers: The layers any of which is right; empty where the plan names none, None for what is in no layer.
    """

    name: str
    plan: str
    plant: Callable[[nn.Module, Any], nn.Module]
    layers: tuple[int | None, ...] = ()

    def build(self) -> nn.Module:
        """The model before anything is planted."""
        return small("llama")


def fed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[nn.Module, Any], nn.Module]:
    """A model whose forward is given what ``change`` makes of its arguments; copies of it too."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return forward(*args[1:], **change({"input_ids": args[0], **keywords} if args else keywords))

    def plant(model: nn.Module, monkeypatch: Any) -> nn.Module:
        around(model, wrapper)
        return model

    return plant


def _patched(method: str, wrong: Callable[..., None]) -> Callable[[nn.Module, Any], nn.Module]:
    """A DynamicCache, one of whose methods does something else."""

    def plant(model: nn.Module, monkeypatch: Any) -> nn.Module:
        monkeypatch.setattr(DynamicCache, method, wrong)
        return model

    return plant


def _single(given: dict[str, Any]) -> bool:
    return given["input_ids"].shape[1] == 1


def _padded(given: dict[str, Any]) -> bool:
    mask = given.get("attention_mask")
    return mask is not None and mask.ndim == 2 and bool((mask == 0).any())


def _unmasked(given: dict[str, Any]) -> dict[str, Any]:
    return given | ({"attention_mask": None} if _single(given) else {})


def _later(given: dict[str, Any]) -> dict[str, Any]:
    positions = given.get("position_ids")
    if positions is None or not _single(given) or not _padded(given):
        return given
    return given | {"position_ids": positions + (given["attention_mask"] == 0).sum(-1, keepdim=True)}


def _counted(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"position_ids": None}


def _stays(cache: DynamicCache, given: Any) -> None:
    pass


def _keys_only(cache: DynamicCache, rows: Any) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[rows]


def _generate(model: nn.Module, monkeypatch: Any) -> nn.Module:
    generate_positions(model, monkeypatch)
    return model


LEFT = "padded(left,5)"
FAULTS: dict[str, CallFault] = {
    fault.name: fault
    for fault in (
        CallFault("the mask is ignored in decode", LEFT, fed(_unmasked), (0,)),
        CallFault("positions count the pads in decode", LEFT, fed(_later), (0,)),
        CallFault("positions count the pads", LEFT, fed(_counted), (0,)),
        CallFault("a crop that leaves rows", "forked(4)", _patched("crop", _stays)),
        CallFault("beams that stay where they were", "beams(3)", _patched("reorder_cache", _stays)),
        CallFault("beams of which one tensor moves", "beams(3)", _patched("reorder_cache", _keys_only)),
        CallFault("drafts that stay in the cache", "verified(3)", _patched("crop", _stays)),
        CallFault("rows selected wrongly", "batched(4)", _patched("batch_select_indices", _stays)),
        CallFault("positions of generate alone", "generate", _generate),
    )
}
