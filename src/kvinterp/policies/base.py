"""The one interface a policy has."""

from __future__ import annotations

import dataclasses

from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import UnsupportedError

__all__ = ["KV", "Place", "Policy"]

KV = tuple[Float[Tensor, "batch kv_head position head_dim"], Float[Tensor, "batch kv_head position head_dim"]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the cache a policy is looking.

    Attributes:
        layer: The block.
        start: Absolute position of the first key.
        stop: One past the absolute position of the last key.
        rotated: Whether these keys are after RoPE.
        known: Whether the keys are those of the positions start to stop; a user's cache may have let go of some.
    """

    layer: int
    start: int
    stop: int
    rotated: bool
    known: bool = True

    def check_known(self, site: str) -> None:
        """Refuses to name positions that are not known.

        Args:
            site: What was to be recorded or moved.

        Raises:
            UnsupportedError: The cache holds fewer positions than were put in.
        """
        if not self.known:
            raise UnsupportedError(
                f"site {site!r} cannot be had at layer {self.layer}: the cache holds {self.stop - self.start} of {self.stop} "
                "positions and does not say which; leave the cache sites out."
            )


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is done to keys and values on their way into and out of the cache; the base does nothing."""

    def check(self, layers: int) -> None:
        """Raises InputError where the policy names a layer that a model of so many has not; the base names none."""

    def write(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """The keys and values to keep, given those of new positions."""
        return keys, values

    def read(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """The keys and values attention reads, given those kept."""
        return keys, values

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        shown = ",".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))
        return type(self).__name__.lower() + (f"({shown})" if shown else "")
