"""Where a mixture of experts chooses: the router's logits and the experts chosen, heard inside the MLP that holds both.

Architectures put the router's result in tuples of their own, and make weights of it in ways of their own (softmax before or
after the choice, sigmoid with a bias, groups). What all have in common is a product with as many columns as there are experts,
and a ``topk`` of as many columns behind it, which is the choice. So these two calls are what is heard, and a choice that is put
in goes in there: the weights are then made by the model's own code, from this run's own logits, over the experts put in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError

ROUTERS = ("gate", "router", "W_gate")
"""What the module is called whose rows are the experts."""


def router_of(mlp: Any) -> nn.Module | None:
    """The router in an MLP, or None where it has none: a module with a weight ``[expert, width]``, beside the experts.

    A bridge calls the gate of a gated MLP ``gate`` too, where there are no experts.
    """
    holders = (mlp, getattr(mlp, "original_component", None))
    for holder in holders if any(hasattr(each, "experts") for each in holders) else ():
        for name in ROUTERS:
            found = getattr(holder, name, None)
            if isinstance(found, nn.Module) and getattr(getattr(found, "weight", None), "ndim", 0) == 2:
                return found
    return None


def experts_in(mlp: Any, site: str, layer: int, architecture: str) -> int:
    """How many experts the router of a layer chooses among.

    Raises:
        UnsupportedError: The layer has no router.
    """
    router: Any = router_of(mlp)
    if router is None:
        raise UnsupportedError(
            f"site {site!r} is not there: layer {layer} of {architecture} has no router that chooses experts (no module named "
            f"{' or '.join(ROUTERS[:2])} in its MLP)."
        )
    return router.weight.shape[0]


class RoutingMode(torch.overrides.TorchFunctionMode):
    """Shows the router's logits, or its choice, inside one MLP.

    Args:
        site: ``"router"`` or ``"experts"``.
        experts: How many there are.
        entered: What entered the MLP, ``[batch, position, width]``.
        emit: Called with ``[batch, position, expert]`` or ``[batch, position, chosen]``; what it returns goes in its place.
    """

    def __init__(self, site: str, experts: int, entered: Tensor, emit: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.site, self.experts, self.emit = site, experts, emit
        self.rows, self.heard = entered.shape[:-1], False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.heard:
            return output
        if self.site == "router" and func is nn.functional.linear and self._is_ours(output):
            new = self._told(output)
            return output if new is None else new
        if self.site == "experts" and func in (torch.topk, Tensor.topk):
            given = kwargs["input"] if kwargs and "input" in kwargs else args[0]
            new = self._told(output.indices) if self._is_ours(given) else None
            return output if new is None else self._replayed(given, output, new)
        return output

    def _is_ours(self, rows: Tensor) -> bool:
        # A row a token: groups of experts are chosen among by tensors of one dimension more.
        return rows.shape == (self.rows.numel(), self.experts)

    def _told(self, rows: Tensor) -> Tensor | None:
        self.heard = True
        new = self.emit(rows.reshape(*self.rows, -1))
        return None if new is None else new.reshape(rows.shape)

    def _replayed(self, given: Tensor, own: Any, new: Int[Tensor, "*row chosen"]) -> Any:
        if bool((new < 0).any()) or bool((new >= self.experts).any()):
            raise InputError(
                f"experts {int(new.min())} to {int(new.max())} were given to choose: expected numbers from 0 to "
                f"{self.experts - 1}."
            )
        # Of an equal set the order stays this run's own, in which some kernels add the experts up.
        same = (new.sort(-1).values == own.indices.sort(-1).values).all(-1, keepdim=True)
        chosen = torch.where(same, own.indices, new)
        return torch.return_types.topk((given.gather(-1, chosen), chosen))
