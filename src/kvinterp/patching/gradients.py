"""The gradient of what is measured with respect to the activations at some places, all in one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener, Site
from kvinterp.patching.patch import PATCHED_CACHE
from kvinterp.recording import PathHook


class Gradients(PathHook):
    """Adds a zero to each place, whose gradient is the place's, and so cuts no graph in two.

    Args:
        adapter: The model.
        wanted: The places.

    Raises:
        UnsupportedError: Nothing that is put there is read, or not all that goes on from there is seen.
    """

    def __init__(self, adapter: Adapter, wanted: Sequence[Site]) -> None:
        self.zeros: dict[Site, Tensor] = {}
        self.shown: dict[Site, Tensor] = {}
        self.listeners: dict[Site, Listener] = {}
        for site, layer in wanted:
            if adapter.derives(site):
                raise UnsupportedError(
                    f"the {site} has no gradient under attention {adapter.facts.attention!r}, where it never leaves the kernel "
                    "and is derived beside it: load the model with attention='eager' (attn_implementation='eager' in "
                    "transformers), or attribute q, k, v or z."
                )
            if site in (*PATCHED_CACHE, "resid_mid", "experts"):
                raise UnsupportedError(
                    f"{site!r} has no one place whose gradient is its own: attribute resid_pre, attn_out, mlp_out, q, k, v or z, "
                    "or give method='patches'."
                )
            adapter.tap(site, layer)
            self.listeners[site, layer] = self._listener((site, layer))

    def _listener(self, place: Site) -> Listener:
        def listener(tensor: Tensor) -> Tensor:
            self.shown[place] = tensor.detach()
            self.zeros[place] = torch.zeros_like(tensor, requires_grad=True)
            return tensor + self.zeros[place]

        return listener

    def times(self, measured: Tensor, clean: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
        """The gradient times how far the clean activations are from those shown, element by element, in float64."""
        found = torch.autograd.grad(measured, list(self.zeros.values()), allow_unused=True)
        return {
            place: torch.zeros_like(self.shown[place]).double()
            if gradient is None
            else gradient.double() * (clean[place].double() - self.shown[place].double())
            for place, gradient in zip(self.zeros, found, strict=True)
        }
