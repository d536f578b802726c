"""Whether two routers choose other experts, how far apart their logits are, and how near each choice was to another one.

What is compared is a vector of two halves: the router's logits, and behind them 1 for every expert that was chosen, 0 for the
others. A choice is a set: in which order a router names its experts says nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.common.shapes import Flag, Measure, Routing
from kvinterp.metrics.base import Metric, float64_pair


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


def experts_changed(a: Routing, b: Routing) -> Flag:
    """Whether another set of experts was chosen."""
    return compared_routing(a, b)["changed"]


def router_difference(a: Routing, b: Routing) -> Measure:
    """The largest difference of a router's logit."""
    return compared_routing(a, b)["difference"]


def router_margin_a(a: Routing, b: Routing) -> Measure:
    """By how much the first path's last expert chosen is ahead of the first left out, in logits."""
    return compared_routing(a, b)["margin_a"]


def router_margin_b(a: Routing, b: Routing) -> Measure:
    """By how much the second path's last expert chosen is ahead of the first left out, in logits."""
    return compared_routing(a, b)["margin_b"]


METRICS = tuple(
    Metric(function.__name__, function, "routing", zero, nonnegative, column, together=compared_routing)  # type: ignore[arg-type]
    for function, column, zero, nonnegative in (
        (experts_changed, "changed", False, True),
        (router_difference, "difference", 0.0, True),
        (router_margin_a, "margin_a", None, False),
        (router_margin_b, "margin_b", None, False),
    )
)
