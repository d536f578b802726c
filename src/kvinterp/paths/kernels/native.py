"""``native``: the machine's own kernels."""

from __future__ import annotations

import dataclasses

from kvinterp.models import Adapter
from kvinterp.paths.kernels.base import KernelMode, Kernels


@dataclasses.dataclass(frozen=True)
class Native(Kernels):
    """The machine's own kernels; nothing is intercepted."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """A mode that does nothing."""
        return KernelMode()
