"""Whether two routers choose other experts, how far apart their logits are, and how near each choice was to another one.

What is compared is a vector of two halves: the router's logits, and behind them 1 for every expert that was chosen, 0 for the
others. A choice is a set: in which order a router names its experts says nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.common.shapes import Flag, Measure, Routing
from kvinterp.metrics.base import float64_pair, parted


def routing_of(logits: Float[Tensor, "*batch expert"], chosen: Int[Tensor, "*batch chosen"]) -> Routing:
    """A router's logits and its choice as one vector."""
    return torch.cat((logits, torch.zeros_like(logits).scatter(-1, chosen, 1.0)), -1)


def compared_routing(a: Routing, b: Routing) -> dict[str, Measure | Flag]:
    """All of them, with one float64 copy.

    Args:
        a: One path's, as :func:`routing_of` gives it.
        b: The other path's.

    Returns:
        ``changed``, whether another set of experts was chosen; ``difference``, the largest of a logit; ``margin_a`` and
        ``margin_b``, the least logit that was chosen less the largest that was not: 0 is a tie, and below 0 something else than
        the logits decided (DeepSeek-V3's bias and groups).

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    logits, chosen = float64_pair(a, b, "routers").chunk(2, -1)
    among = chosen > 0.5
    margins = logits.masked_fill(~among, torch.inf).amin(-1) - logits.masked_fill(among, -torch.inf).amax(-1)
    return {
        "changed": (among[0] != among[1]).any(-1),
        "difference": (logits[0] - logits[1]).abs().amax(-1),
        "margin_a": margins[0],
        "margin_b": margins[1],
    }


_AHEAD = "By how much the {} path's last expert chosen is ahead of the first left out, in logits."
METRICS = (
    *parted("routing", compared_routing, ("changed", False, True, "Whether another set of experts was chosen."),
            named="experts_{}"),
    *parted(
        "routing",
        compared_routing,
        ("difference", 0.0, True, "The largest difference of a router's logit."),
        ("margin_a", None, False, _AHEAD.format("first")),
        ("margin_b", None, False, _AHEAD.format("second")),
        named="router_{}",
    ),
)  # fmt: skip
