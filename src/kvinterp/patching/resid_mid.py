"""Carries a patch of the residual stream between attention and MLP on to where the stream goes.

A HookedTransformer shows that stream itself. A bridge and a transformers model show it only where it enters the norm before
the MLP, and the stream goes around that norm: what is put there reaches the MLP and nothing else. So the block's output is
made again as the block makes it, the patched stream plus what the MLP added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener, Site


def carry_on(adapter: Adapter, listeners: dict[Site, Listener]) -> None:
    """Adds to the listeners of patches what their patches of ``resid_mid`` need.

    Args:
        adapter: The model.
        listeners: What patches do at each site and layer; changed in place.

    Raises:
        UnsupportedError: This kind of model cannot show what the MLP adds.
    """
    for layer in [at for site, at in listeners if site == "resid_mid"]:
        stream = _MidStream(adapter.facts.architecture, layer, listeners["resid_mid", layer])
        mlp, post = (listeners.get((site, layer)) for site in ("mlp_out", "resid_post"))
        adapter.tap("mlp_out", layer)
        listeners["resid_mid", layer] = stream.mid
        listeners["mlp_out", layer] = one_after_the_other(mlp, stream.added)
        listeners["resid_post", layer] = one_after_the_other(stream.post, post)


class _MidStream:
    """The stream between attention and MLP of one layer: before and after the patch, and what the MLP adds to it."""

    def __init__(self, architecture: str, layer: int, change: Listener) -> None:
        self.architecture, self.layer, self.change = architecture, layer, change
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._added: Tensor | None = None

    def mid(self, tensor: Tensor) -> Tensor | None:
        """Patches, and remembers both."""
        self._before, self._after, self._added = tensor, self.change(tensor), None
        return self._after

    def added(self, tensor: Tensor) -> None:
        """Remembers what the MLP adds, after any patch of it."""
        self._added = tensor

    def post(self, tensor: Tensor) -> Tensor | None:
        """The block's output with the patched stream in it, if it is not in it already."""
        before, after, added = self._before, self._after, self._added
        self._before = self._after = self._added = None
        if before is None or after is None or added is None:
            return None
        patched = after + added
        if torch.equal(tensor, patched):
            return None
        if not torch.equal(tensor, before + added):
            raise UnsupportedError(
                f"resid_mid cannot be patched at layer {self.layer}: {self.architecture} does not make a block's output as "
                "that stream plus mlp_out; patch attn_out, mlp_out or resid_post instead."
            )
        return patched


def one_after_the_other(first: Listener | None, second: Listener | None) -> Listener:
    """Both, the second of what the first made."""

    def both(tensor: Tensor) -> Tensor | None:
        changed = None if first is None else first(tensor)
        again = None if second is None else second(tensor if changed is None else changed)
        return changed if again is None else again

    return both
