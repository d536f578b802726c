"""Whether a copy of a model in another dtype is a copy: code of the user's own on a model may hold on to
the original, or to its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvinterp.common.words import dtype_word
from kvinterp.errors import KvinterpError, UnsupportedError, out_of_memory, reason

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter


def check_apart(model: nn.Module, copy: nn.Module, name: str) -> None:
    """Raises UnsupportedError where a deep copy would run modules of the original.

    A deep copy shares functions. A function that replaces a module's ``forward`` may hold the
    original module.
    """
    originals = {id(module) for module in model.modules()}
    for path, module in copy.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and any(id(value) in originals for value in _closed_over(forward)):
            raise UnsupportedError(
                f"{name}: the forward of {path or 'the model'} was replaced by a function that holds on to the model itself, "
                "so that a copy in another dtype would run this one's weights: change it by a hook (register_forward_hook), "
                "which is called with its own module, or compare in one dtype."
            )


@torch.no_grad()
def check_follows(copy: Adapter, dtype: torch.dtype) -> None:
    """Raises UnsupportedError where what runs on a copy keeps tensors of the dtype that the model
    was copied from.

    Two tokens show it. What torch lacks in a dtype is told by the run that meets it.
    """
    tokens = torch.arange(3, 5, device=copy.device)[None] % copy.facts.vocabulary
    try:
        with copy.own_state([]):
            copy.forward(tokens)
    except (KvinterpError, NotImplementedError):
        return
    except Exception as error:
        if out_of_memory(error) or "not implemented for" in str(error):
            return
        raise UnsupportedError(
            f"what runs on {copy.facts.name} does not follow a cast to {dtype_word(dtype)} ({reason(error)}): code of yours on "
            "it, a forward that you replaced or a hook, keeps tensors of another dtype; run in the model's own, or cast them to "
            "the dtype of what it is given."
        ) from error


def _closed_over(function: Any, depth: int = 4) -> Iterator[Any]:
    """Yields what a function is bound to or closes over, and the same for functions among that."""
    if isinstance(function, functools.partial):
        values = [function.func, *function.args, *function.keywords.values()]
    else:
        values = [
            getattr(function, "__self__", None),
            *(getattr(function, "__defaults__", None) or ()),
        ]
        values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in values:
        yield value
        if depth and callable(value) and not isinstance(value, nn.Module):
            yield from _closed_over(value, depth - 1)
