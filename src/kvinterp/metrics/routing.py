"""Compares two routers: whether they choose other experts, how far apart their logits are, and the
margin of each choice.

The compared vector has two halves: the router's logits, then 1 for every chosen expert and 0 for
the others. A choice is a set: the order in which a router names its experts does not matter.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.common.shapes import Flag, Measure, Routing
from kvinterp.metrics.base import float64_pair, parted


def routing_of(
    logits: Float[Tensor, "*batch expert"], experts: Int[Tensor, "*batch chosen"]
) -> Routing:
    """Joins a router's logits and its chosen experts in one vector."""
    return torch.cat((logits, torch.zeros_like(logits).scatter(-1, experts, 1.0)), -1)


def compared_routing(a: Routing, b: Routing) -> dict[str, Measure | Flag]:
    """Compares two routers by every metric of this file, with one float64 copy.

    Args:
        a: One path's, as :func:`routing_of` gives it.
        b: The other path's.

    Returns:
        ``changed``, whether another set of experts was chosen; ``difference``, the largest of a
        logit; ``margin_a`` and ``margin_b``, the least chosen logit minus the largest logit that
        was not chosen: 0 is a tie, and below 0 more than the logits decided (DeepSeek-V3's bias and
            groups).

    Raises:
        InputError: The shapes differ, or the last dimension is empty.
    """
    logits, choices = float64_pair(a, b, "routers").chunk(2, -1)
    is_chosen = choices > 0.5
    margins = logits.masked_fill(~is_chosen, torch.inf).amin(-1) - logits.masked_fill(
        is_chosen, -torch.inf
    ).amax(-1)
    return {
        "changed": (is_chosen[0] != is_chosen[1]).any(-1),
        "difference": (logits[0] - logits[1]).abs().amax(-1),
        "margin_a": margins[0],
        "margin_b": margins[1],
    }


_AHEAD = "By how much the {} path's last expert chosen is ahead of the first left out, in logits."
METRICS = (
    *parted("routing", compared_routing, ("changed", False, True, "Whether another set of experts was chosen."),
            name="experts_{}"),
    *parted(
        "routing",
        compared_routing,
        ("difference", 0.0, True, "The largest difference of a router's logit."),
        ("margin_a", None, False, _AHEAD.format("first")),
        ("margin_b", None, False, _AHEAD.format("second")),
        name="router_{}",
    ),
)  # fmt: skip
