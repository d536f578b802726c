"""The one interface a policy has, and where it is looking."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models.adapter import Facts
from kvinterp.models.caches import taken
from kvinterp.spec import text_of

__all__ = ["KV", "Chain", "Place", "Policy"]

KV = tuple[Float[Tensor, "batch kv_head position head_dim"], Float[Tensor, "batch kv_head position head_dim"]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the cache a policy, a recorder or a patch is looking.

    Attributes:
        layer: The block.
        start: Absolute position of the first key.
        stop: One past the absolute position of the last key.
        rotated: Whether these keys are after RoPE.
        known: Whether the positions are known; a user's cache may have let go of some and does not say of which.
        rows: The absolute position of each row, where a policy may have let go of some: they need no longer be all from start
            to stop, and each sequence and KV head may have kept others. None where none can be missing.
    """

    layer: int
    start: int
    stop: int
    rotated: bool
    known: bool = True
    rows: Int[Tensor, "batch kv_head row"] | None = dataclasses.field(default=None, compare=False)

    @property
    def positions(self) -> Int[Tensor, "*batch_and_kv_head row"]:
        """The absolute position of each row: of all heads alike, or a line for each sequence and KV head."""
        return torch.arange(self.start, self.stop) if self.rows is None else self.rows

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

    def check_whole(self, site: str) -> None:
        """Refuses what takes positions side by side where they are not known, or some were let go of.

        Args:
            site: What was to be compared or moved.

        Raises:
            UnsupportedError: Rows are missing.
        """
        self.check_known(site)
        if self.rows is not None and self.rows.shape[-1] < self.stop:
            raise UnsupportedError(
                f"site {site!r} cannot be lined up by position at layer {self.layer}: the policy let go of rows, and "
                f"{self.rows.shape[-1]} of {self.stop} are left; record it with run(), or leave the cache sites out."
            )


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is done to keys and values on their way into and out of the cache; the base does nothing.

    A policy overrides what it needs. None of its methods changes a tensor in place. One that remembers something from one
    call to the next says so by :meth:`start`, whose twin is used for one pass from position 0 and then thrown away.
    """

    def check(self, layers: int) -> None:
        """Raises InputError where the policy names a layer that a model of so many has not; the base names none."""

    def start(self, facts: Facts) -> Policy:
        """What runs in one pass from position 0: itself, or a fresh twin that may keep state.

        Args:
            facts: The model's facts.
        """
        return self

    def write(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """The keys and values to keep, given those of new positions."""
        return keys, values

    def read(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """The keys and values attention reads, given those kept."""
        return keys, values

    def keep(self, keys: Tensor, values: Tensor, place: Place) -> Int[Tensor, "*batch_and_kv_head kept"] | None:
        """Which of the rows held stay for the forwards that follow, asked once attention has read.

        Args:
            keys: What is held, ``[batch, kv_head, row, head_dim]``.
            values: The same of values.
            place: Where; ``place.positions`` are the rows' absolute positions.

        Returns:
            Indices of rows, ``[kept]`` for all heads alike or ``[batch, kv_head, kept]``; as many in every layer. None for
            all.
        """
        return None

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that :meth:`see` wants, such as ``("pattern",)``."""
        return ()

    def see(self, site: str, tensor: Tensor, place: Place) -> None:
        """Hears a site it asked for in every layer of every forward, before :meth:`keep` is asked.

        Args:
            site: Its name.
            tensor: In the layout all kinds of model share, such as ``[batch, query_head, query, key]`` for ``pattern``.
            place: Where attention last read in this layer: for ``pattern`` and ``attn_scores`` the rows that their columns are.
        """

    @property
    def evicts(self) -> bool:
        """Whether it may let go of rows; one whose twin alone overrides :meth:`keep` says so itself."""
        return type(self).keep is not Policy.keep

    @property
    def reads(self) -> bool:
        """Whether attention may read something else than is kept."""
        return type(self).read is not Policy.read

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        return text_of(self)


@dataclasses.dataclass(frozen=True)
class Chain(Policy):
    """Several policies: each writes and keeps of what the one before it left, and what is held is read back the other way.

    Attributes:
        parts: The policies, the first one nearest to the model.
    """

    parts: tuple[Policy, ...] = ()

    def check(self, layers: int) -> None:
        """Asks each."""
        for part in self.parts:
            part.check(layers)

    def start(self, facts: Facts) -> Chain:
        """A chain of what each starts."""
        return Chain(tuple(part.start(facts) for part in self.parts))

    def write(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """From the first to the last."""
        for part in self.parts:
            keys, values = part.write(keys, values, place)
        return keys, values

    def read(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """From the last to the first."""
        for part in reversed(self.parts):
            keys, values = part.read(keys, values, place)
        return keys, values

    def keep(self, keys: Tensor, values: Tensor, place: Place) -> Int[Tensor, "*batch_and_kv_head kept"] | None:
        """The rows that all of them keep; each is asked about those that the ones before it left."""
        left: Tensor | None = None
        for part in self.parts:
            rows = part.keep(keys, values, place)
            if rows is not None:
                every = rows.expand(*keys.shape[:2], -1)
                positions = place.positions.to(rows.device).expand(*keys.shape[:3])
                place = dataclasses.replace(place, rows=positions.gather(2, every))
                keys, values = taken(keys, every), taken(values, every)
                left = every if left is None else left.gather(2, every)
        return left

    @property
    def sites(self) -> tuple[str, ...]:
        """What any of them wants."""
        return tuple(dict.fromkeys(site for part in self.parts for site in part.sites))

    def see(self, site: str, tensor: Tensor, place: Place) -> None:
        """Shows it to those that asked for it."""
        for part in self.parts:
            if site in part.sites:
                part.see(site, tensor, place)

    @property
    def evicts(self) -> bool:
        """Whether any of them does."""
        return any(part.evicts for part in self.parts)

    @property
    def reads(self) -> bool:
        """Whether any of them does."""
        return any(part.reads for part in self.parts)

    def __str__(self) -> str:
        """The text forms, joined as in a path."""
        return "+".join(map(str, self.parts))
