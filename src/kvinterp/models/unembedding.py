"""Applies the final norm and the unembedding of any kind of model to any residual stream, in a wide
dtype.

No module is looked for by name. The stream replaces the last block's output, and the model's own
code computes the rest, with its own final norm, head and multipliers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.models.adapter import Adapter
from kvinterp.models.threads import own_threads

ROWS = 256
"""The number of streams in one forward."""


class Unembedding:
    """The part of a model after its last block, in a wide dtype.

    Args:
        adapter: The model, of any kind and dtype.
        dtype: The dtype of the computation.
    """

    def __init__(self, adapter: Adapter, dtype: torch.dtype = torch.float64) -> None:
        self.adapter = adapter.at(dtype)

    def logits(self, streams: Float[Tensor, "row width"]) -> Float[Tensor, "row vocab"]:
        """Computes the logits of each stream."""
        return torch.cat(
            [self._forward(part) for part in streams.to(self.adapter.dtype).split(ROWS)]
        )

    @torch.no_grad()
    def _forward(self, streams: Tensor) -> Tensor:
        adapter, last = self.adapter, ("resid_post", self.adapter.facts.layers - 1)
        output = streams.to(adapter.device)[:, None]
        tokens = torch.zeros(len(streams), 1, dtype=torch.long, device=adapter.device)
        with (
            own_threads(adapter),
            adapter.attached([last]),
            adapter.listening({last: [lambda _: output]}),
        ):
            return adapter.forward(tokens)[:, -1]
