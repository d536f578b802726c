"""Where a site is in a module tree: taps, which :mod:`kvinterp.models.hooks` hooks, and how a site's
tensor is brought to the common layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from kvinterp.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Tap:
    """Where a site is in the module tree, and how its tensor is brought to the common layout.

    Attributes:
        module: The module to hook.
        side: ``"input"`` (first argument), ``"output"``, ``"softmax"`` (scores or pattern inside
            eager attention), ``"fused"`` (the same, derived from the arguments of SDPA),
            ``"heads"`` (each head's part of an output projection), or ``"router"`` (the router
            inside an MLP).
        heads: Number of heads to split the last dimension into, or None where the layout is the
            common one already. For ``"fused"``: the number of query heads.
        span: Start and stop of the part of the last dimension that belongs to this site in a fused
            projection, or None for all.
        head_major: Whether the tensor arrives as ``[batch, head, position, head_dim]``.
        experts: The number of experts that a router chooses among.
        z: For ``"heads"``: the module that returns what the projection reads, where that is not the
            module's own input.
    """

    module: nn.Module
    side: str = "output"
    heads: int | None = None
    span: tuple[int, int] | None = None
    head_major: bool = False
    experts: int = 0
    z: nn.Module | None = None

    def get(self, raw: Tensor) -> Tensor:
        """Returns the site's tensor in the common layout, as a view."""
        # Every hook of every layer comes through here at every step: torch's own calls, since
        # einops takes several times as long as a small tensor's copy.
        if self.span is not None:
            raw = raw[..., self.span[0] : self.span[1]]
        if self.heads is not None and raw.dim() == 3:
            batch, positions, width = raw.shape
            raw = raw.reshape(batch, positions, self.heads, width // self.heads)
        return raw.transpose(1, 2) if self.head_major else raw

    def put(self, raw: Tensor, new: Tensor) -> Tensor:
        """Returns a copy of ``raw`` in which the site's tensor is ``new``."""
        if self.head_major:
            new = rearrange(new, "batch position head width -> batch head position width")
        if self.heads is not None and raw.dim() == 3:
            new = rearrange(new, "batch position head width -> batch position (head width)")
        if self.span is None:
            return new
        replaced = raw.clone()
        replaced[..., self.span[0] : self.span[1]] = new
        return replaced


def router_tap(mlp: Any, layer: int, architecture: str) -> Tap:
    """Makes the tap of a router's logits.

    Raises:
        UnsupportedError: The layer has no router.
    """
    router: Any = router_of(mlp)
    if router is None:
        raise UnsupportedError(
            f"site 'router' is not there: layer {layer} of {architecture} has no router that chooses experts (no module named "
            f"{' or '.join(ROUTERS[:2])} in its MLP)."
        )
    return Tap(mlp, "router", experts=router.weight.shape[0])


def heads_tap(z: Tap, architecture: str) -> Tap:
    """Makes the tap of each head's part of attention's output, from the tap at the output
    projection that reads z.

    Raises:
        UnsupportedError: The projection's weight cannot be split by heads.
    """
    weight = getattr(z.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise UnsupportedError(
            f"site 'result' is not there in {architecture}: the weight of its output projection ({type(z.module).__name__}) is "
            "no plain matrix that can be split by heads. Record z instead."
        )
    return dataclasses.replace(z, side="heads")


ROUTERS = ("gate", "router", "W_gate")
"""The names of the module whose rows are the experts."""


def router_of(mlp: Any) -> nn.Module | None:
    """Finds the router of an MLP, a module with a weight ``[expert, width]`` beside the experts;
    None where there is none.

    A bridge calls the gate of a gated MLP ``gate`` too, where there are no experts.
    """
    parts = (mlp, getattr(mlp, "original_component", None))
    for part in parts if any(hasattr(part, "experts") for part in parts) else ():
        for name in ROUTERS:
            router = getattr(part, name, None)
            if (
                isinstance(router, nn.Module)
                and getattr(getattr(router, "weight", None), "ndim", 0) == 2
            ):
                return router
    return None
