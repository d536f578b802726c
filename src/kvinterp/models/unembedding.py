"""The final norm and the unembedding of any kind of model, in a wide dtype, of any stream: what a logit lens looks through.

Neither is found by its name. The last block's output is replaced, and the model's own code does the rest, whatever its final
norm, its head and its multipliers are.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.models.adapter import Adapter
from kvinterp.models.threads import own_threads

ROWS = 256
"""Streams a forward."""


class Unembedding:
    """What a model makes of residual streams behind its last block, computed in a wide dtype.

    Args:
        adapter: The model, of any kind and dtype.
        dtype: What it is computed in.
    """

    def __init__(self, adapter: Adapter, dtype: torch.dtype = torch.float64) -> None:
        self.adapter = adapter.at(dtype)

    def logits(self, streams: Float[Tensor, "row width"]) -> Float[Tensor, "row vocab"]:
        """The logits of each stream."""
        return torch.cat([self._forward(part) for part in streams.to(self.adapter.dtype).split(ROWS)])

    def _forward(self, streams: Tensor) -> Tensor:
        last = ("resid_post", self.adapter.facts.layers - 1)
        given = streams.to(self.adapter.device)[:, None]
        return _run(self.adapter, len(streams), {last: lambda _: given})[:, -1]


@torch.no_grad()
def _run(adapter: Adapter, rows: int, listeners: dict[Any, Any]) -> Tensor:
    """One forward of a token a row, in which the listeners replace what they hear."""
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=adapter.device)
    heard = {place: [listener] for place, listener in listeners.items()}
    with own_threads(adapter), adapter.attached(list(heard)), adapter.listening(heard):
        return adapter.forward(tokens)
