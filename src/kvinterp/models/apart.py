"""Whether a copy of a model is really apart from it, also where somebody replaced a module's ``forward``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from kvinterp.errors import UnsupportedError

_DEPTH = 4
"""Functions that call functions that call a module."""


def check_apart(model: nn.Module, copy: nn.Module, name: str) -> None:
    """Raises UnsupportedError where a deep copy would run the original's modules.

    Copies share functions, and so what a function that took the place of a module's ``forward`` holds on to.
    """
    originals = {id(module) for module in model.modules()}
    for place, module in copy.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and any(id(held) in originals for held in _held(forward, _DEPTH)):
            raise UnsupportedError(
                f"{name}: the forward of {place or 'the model'} was replaced by a function that holds on to the model itself, "
                "so that a copy in another dtype would run this one's weights: change it by a hook (register_forward_hook), "
                "which is called with its own module, or compare in one dtype."
            )


def _held(function: Any, depth: int) -> Iterator[Any]:
    """What a function is bound to or closes over, and what functions among that hold."""
    if isinstance(function, functools.partial):
        reached = [function.func, *function.args, *function.keywords.values()]
    else:
        cells = getattr(function, "__closure__", None) or ()
        reached = [getattr(function, "__self__", None), *(getattr(function, "__defaults__", None) or ())]
        reached += [cell.cell_contents for cell in cells if _filled(cell)]
    for held in reached:
        yield held
        if depth and callable(held) and not isinstance(held, nn.Module):
            yield from _held(held, depth - 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
