"""What one path shows at the newest position, held until the next step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Site
from kvinterp.models.sites import LAYOUTS, ROWS
from kvinterp.policies import Place
from kvinterp.recording import SiteHook


class NewestActivations(SiteHook):
    """Holds what one path shows at the newest position, until the next step."""

    def __init__(self, adapter: Adapter, wanted: Sequence[Site]) -> None:
        super().__init__(adapter, wanted, "newest", rows="said")
        self.architecture, self.seen = adapter.facts.architecture, dict[Site, Tensor]()

    @property
    def reads(self) -> bool:
        """Whether it hears a site of the cache; of which rows that is, is told where some may be missing."""
        return bool(self._reads)

    def begin_step(self, step: int) -> None:
        """Lets go of the step before."""
        self.seen.clear()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Hears what attention is about to read, and of which rows where a policy may have let go of some."""
        if place.rows is not None:
            self.seen[ROWS, place.layer] = place.rows.to(self._device)
        super().on_read(place, keys, values)

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Holds the newest row; of a cache site all rows.

        Raises:
            UnsupportedError: A residual site holds several streams.
        """
        layout = LAYOUTS[site]
        if layout.group == "residual" and tensor.dim() != layout.dimensions:
            # Gemma 3n, DeepSeek-V4 and others carry several streams, which are mixed at every block.
            raise UnsupportedError(
                f"{site} of {self.architecture} is several residual streams side by side, of shape "
                f"{tuple(tensor.shape)}, and cannot be compared as one: leave it out, as in record='kv'."
            )
        if (ROWS, layer) in self.seen and layout.group == "cache":
            # What is left is moved to the front of a preallocated cache before anyone compares.
            tensor = tensor.clone()
        self.seen[site, layer] = tensor if layout.group == "cache" else tensor.select(layout.rows, -1)
