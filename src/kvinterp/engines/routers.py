"""What a router of experts does otherwise in an engine: chosen in 16 bits, more or fewer experts,
other weights of the same ones.

A router, as transformers has it, gives its logits, the weights of the chosen experts and their
numbers; where a cause changes the choice or the weights, what it gives is replaced by a hook, so
that the experts themselves stay exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.models import Adapter, dtype_named

Choice = tuple[Tensor, Tensor, Tensor]
"""``[token, expert]`` logits, ``[token, chosen]`` weights and ``[token, chosen]`` numbers of
experts.
"""


def routers(model: nn.Module) -> list[Any]:
    """The routers of a model, in order; none of one whose routers give anything else."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Router") and hasattr(module, "top_k")
    ]


def _replaced(
    change: Callable[[nn.Module, Any, Choice], tuple[Tensor, Tensor]],
) -> Callable[[nn.Module, int], Iterator[Any]]:
    """Hooks that give other weights and numbers of experts."""

    def attach(model: nn.Module, prompt: int) -> Iterator[Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
                return None
            weights, experts = change(module, args, output)
            return output[0], weights.to(output[1]), experts

        for module in routers(model):
            yield module.register_forward_hook(after)

    return attach


def in_precision(dtype: str) -> Callable[[nn.Module, int], Iterator[Any]]:
    """The router alone computed in a precision, from its input on."""

    def change(module: nn.Module, args: Any, output: Choice) -> tuple[Tensor, Tensor]:
        # A copy without hooks: this one would call itself.
        module_copy = copy.deepcopy(module).to(dtype_named(dtype))
        module_copy._forward_hooks.clear()
        _, weights, experts = module_copy(args[0].to(dtype_named(dtype)))
        return weights, experts

    return _replaced(change)


def _unnormalised(module: nn.Module, args: Any, output: Choice) -> tuple[Tensor, Tensor]:
    """The weights of the chosen experts not divided by their sum, or divided where the model does
    not.
    """
    logits, weights, experts = output
    shares = logits.to(weights).softmax(-1).gather(-1, experts)
    return (shares if torch.allclose(weights.sum(-1), torch.ones_like(weights[:, 0]), atol=1e-3) else weights / weights.sum(
        -1, keepdim=True
    )), experts  # fmt: skip


UNNORMALISED = _replaced(_unnormalised)


def counted(by: int) -> Callable[[nn.Module], list[tuple[Any, str, Any]]]:
    """So many experts more are chosen for each token."""
    return lambda model: [
        (each, "top_k", each.top_k + by)
        for each in routers(model)
        if 1 <= each.top_k + by <= _count(each)
    ]


def _count(router: Any) -> int:
    return int(router.weight.shape[0])


def replayed(choices: Sequence[Sequence[Tensor]]) -> Callable[[nn.Module, int], Iterator[Any]]:
    """What other routers chose, a pair of weights and numbers for each."""

    def attach(model: nn.Module, prompt: int) -> Iterator[Any]:
        for module, (weights, experts) in zip(routers(model), choices, strict=True):
            yield module.register_forward_hook(
                lambda _, args, output, given=(weights, experts): (
                    output[0],
                    given[0].to(output[1]),
                    given[1],
                )
            )

    return attach


@torch.no_grad()
def chosen_in(adapter: Adapter, dtype: str, tokens: Tensor) -> list[list[Tensor]]:
    """The weights and numbers of the experts that our own path in a precision chooses, by
    router.
    """
    model, found = adapter.at(dtype_named(dtype)), list[list[Tensor]]()
    handles = [
        each.register_forward_hook(lambda _, args, output: found.append([*output[1:]]))
        for each in routers(model.model)
    ]
    try:
        model.forward(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found
