"""The interface of policies: what may be done to keys and values on their way into the cache, on
their way out of it, and once attention has read.

A policy is one file in this folder with one frozen dataclass. The registry finds it there; its text
form is the class's name in snake case with the values of its fields: ``LowRank`` of rank 8 is
``low_rank(8)``, and a path with it ``cached+low_rank(8)``. :mod:`kvinterp.paths.store` calls
the methods, a forward at a time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from jaxtyping import Int
from torch import Tensor

from kvinterp.common.checks import check_choice
from kvinterp.common.spec import name_of, text_of
from kvinterp.errors import InputError, UnsupportedError, unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.models.caches import CacheRows, KeysValues, gather_rows

KV = KeysValues


@dataclasses.dataclass(frozen=True)
class Policy:
    """Changes keys and values on their way into and out of the cache; the base changes nothing.

    A policy overrides the methods it needs, none of which may change a tensor in place. A policy
    with state returns a copy of itself from :meth:`start`, which is used for one pass from position
    0 and then thrown away.
    """

    SOURCE: ClassVar[str] = ""
    """The paper or program whose rule it follows."""

    def bits_stored(self, tensor: str, width: int) -> float | None:
        """How many bits a real implementation stores for an element of a row, scales included.

        Args:
            tensor: ``"k"`` or ``"v"``.
            width: ``head_dim``.

        Returns:
            The bits; None if rows are stored in the cache's own dtype.
        """
        return None

    def exact_rows(self, tensor: str, context: int) -> int:
        """How many of the rows of a context a real implementation keeps in the cache's own dtype
        beside those in its format.

        Args:
            tensor: ``"k"`` or ``"v"``.
            context: Rows in the cache.
        """
        return 0

    def start(self, facts: ModelInfo) -> Policy:
        """The policy for one pass from position 0: itself, or a copy that may keep state (see
        :func:`running`).

        Raises:
            InputError: It names a layer or a head that the model does not have.
        """
        return self

    def write(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """The keys and values that the cache keeps of new positions; called once a layer and
        forward.

        Args:
            keys: The new keys, ``[batch, kv_head, row, head_dim]``; ``cache_rows.rotated`` says
                whether RoPE has turned them.
            values: The new values.
            cache_rows: The layer, and the absolute positions ``start`` to ``stop`` of the new rows.
        """
        return keys, values

    def read(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """The keys and values that attention reads; called once a layer and forward, but not in a
        prefill with ``prefill=exact``. They are not stored: the next read gets the cache's rows
        again. On a recompute path the rows are all those of the forward.

        Args:
            keys: The keys in the cache, ``[batch, kv_head, row, head_dim]``.
            values: The values in the cache.
            cache_rows: The layer; ``cache_rows.positions`` are the rows' absolute positions,
                ``cache_rows.positions_left`` the same where rows were dropped and None elsewhere,
                and ``cache_rows.remade`` says that a later policy of a chain has already changed
                these numbers.
        """
        return keys, values

    def keep(
        self, keys: Tensor, values: Tensor, cache_rows: CacheRows
    ) -> Int[Tensor, "*batch_and_kv_head kept"] | None:
        """Chooses the rows of the cache that stay for the forwards that follow.

        Called once a layer after every forward, decode steps too, but not before an exact prefill
        is over. A policy that overrides it evicts (:attr:`evicts`).

        Args:
            keys: The keys in the cache, ``[batch, kv_head, row, head_dim]``.
            values: The values in the cache.
            cache_rows: The layer; ``cache_rows.positions`` are the rows' absolute positions, and
                ``cache_rows.prompt`` is the number of positions of the prompt, 0 where it is not known:
                ``cache_rows.stop`` equals it once the prefill is over.

        Returns:
            Indices of rows, ``[kept]`` for all heads alike or ``[batch, kv_head, kept]``: in any
            order, each once, at least one, as many in every layer. None for all.
        """
        return None

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that :meth:`see` is called with, such as ``("pattern",)``."""
        return ()

    def see(self, site: str, tensor: Tensor, cache_rows: CacheRows) -> None:
        """Called with each of its :attr:`sites` in every layer of every forward, before
        :meth:`keep`.

        Args:
            site: The name of the site.
            tensor: Its tensor, in the layout that all kinds of model share:
                ``[batch, query_head, query, key]`` for ``pattern``.
            cache_rows: The rows that attention last read in this layer: the columns of ``pattern`` and
                ``attn_scores``.
        """

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The properties of a run, besides tokens and positions, on which its result depends;
        usually none (docs/laws.md).

        ``"prompt"``: where the prompt ends, so that a resumed decode whose prompt includes the
        answer so far gives other rows. ``"chunks"``: which positions of the prompt share a forward.
        A policy that evicts, or looks at sites, depends on the prompt unless it says otherwise.
        """
        return ("prompt",) if self.evicts or self.sites else ()

    @property
    def evicts(self) -> bool:
        """Whether it may evict rows; overridden by a policy of which only the running copy
        overrides :meth:`keep`.
        """
        return type(self).keep is not Policy.keep

    @property
    def acts(self) -> bool:
        """Whether it changes, evicts or observes anything."""
        return type(self).write is not Policy.write or self.reads or self.evicts or bool(self.sites)

    @property
    def reads(self) -> bool:
        """Whether attention may read other numbers than the cache keeps."""
        return type(self).read is not Policy.read

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        return text_of(self)


Kind = TypeVar("Kind", bound=Policy)


def running(policy: Kind, **state: Any) -> Kind:
    """Copies a policy for one pass and gives the copy attributes besides its fields."""
    clone = copy.copy(policy)
    vars(clone).update(state)
    return clone


def positions_of(cache_rows: CacheRows, rows: Tensor) -> Int[Tensor, "batch kv_head row"]:
    """The absolute positions of rows in the cache, ``[batch, kv_head, row, ...]``, on their
    device.
    """
    return cache_rows.positions.to(rows.device).expand(rows.shape[:3])


TENSORS = {"kv": ("k", "v"), "k": ("k",), "v": ("v",)}
"""The values of ``on``, each with the tensors that it means."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selective(Policy):
    """A policy that changes K or V, each tensor by itself, in chosen layers and KV heads.

    A subclass overrides :meth:`write_rows` (new rows on their way into the cache),
    :meth:`read_rows` (rows of the cache on their way to attention), or both. In other layers and
    heads the same tensor object goes through. A subclass for K or V alone gives ``on`` another
    default, in a field that is ``kw_only`` as here. What it says of sizes it says in
    :meth:`element_bits`, which counts for the tensors of ``on`` alone; :meth:`exact_rows` it
    overrides for those tensors itself.

    Attributes:
        on: ``"kv"``, ``"k"`` or ``"v"``.
        layers: The layers; empty for all.
        heads: The KV heads; empty for all.
        keys: The side of RoPE on which the policy wants keys: ``"before"`` or ``"after"``, where a
            kind of model that caches them on the other side is refused; or ``"cached"``, as the
            model caches them: ``hooked`` before RoPE, ``native`` and ``bridge`` after it.
    """

    on: Literal["kv", "k", "v"] = "kv"
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    keys: Literal["cached", "before", "after"] = "cached"

    def __post_init__(self) -> None:
        """Checks the fields."""
        policy = name_of(type(self))
        check_choice(f"policy {policy!r}: on", self.on, TENSORS)
        check_choice(f"policy {policy!r}: keys", self.keys, ("cached", "before", "after"))
        for name, numbers in (("layers", self.layers), ("heads", self.heads)):
            if not isinstance(numbers, tuple) or not all(
                type(number) is int and number >= 0 for number in numbers
            ):
                raise unexpected(
                    f"policy {policy!r}: {name}",
                    numbers,
                    f"whole numbers from 0 on, as in {name}=0+2",
                )

    def element_bits(self, width: int) -> float | None:
        """The bits that an element of a changed tensor takes; see :meth:`bits_stored`."""
        return None

    def bits_stored(self, tensor: str, width: int) -> float | None:
        """The bits of :meth:`element_bits` for the tensors that the policy changes."""
        return self.element_bits(width) if tensor in TENSORS[self.on] else None

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """The rows that the cache keeps of new rows of one tensor.

        Args:
            tensor: ``[batch, kv_head, row, head_dim]``, with the chosen heads only.
            which: ``"k"`` or ``"v"``.
            cache_rows: The layer and positions.
        """
        return tensor

    def read_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """The rows that attention reads of one tensor's rows in the cache; see
        :meth:`write_rows`.
        """
        return tensor

    def write(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """Applies :meth:`write_rows` to K and to V."""
        return self._apply(self.write_rows, keys, "k", cache_rows), self._apply(
            self.write_rows, values, "v", cache_rows
        )

    def read(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """Applies :meth:`read_rows` to K and to V."""
        return self._apply(self.read_rows, keys, "k", cache_rows), self._apply(
            self.read_rows, values, "v", cache_rows
        )

    @property
    def reads(self) -> bool:
        """Whether it overrides :meth:`read_rows`."""
        return (
            type(self).read_rows is not Selective.read_rows or type(self).read is not Selective.read
        )

    def start(self, facts: ModelInfo) -> Policy:
        """Refuses a layer or a head that the model does not have, and keys on the other side of
        RoPE.
        """
        if self.layers and max(self.layers) >= facts.layers:
            raise InputError(
                f"policy {self} names layer {max(self.layers)}: expected layers from 0 to {facts.layers - 1}."
            )
        if self.heads and max(self.heads) >= facts.kv_heads:
            raise InputError(
                f"policy {self} names KV head {max(self.heads)} of {facts.name}: expected heads from 0 to {facts.kv_heads - 1}."
            )
        cached = "after" if facts.cached_keys_rotated else "before"
        if "k" in TENSORS[self.on] and self.keys not in ("cached", cached):
            hooked = 'hooked (TransformerLens 3: pip install "transformer-lens<4")'
            kinds = hooked if self.keys == "before" else "native or bridge"
            raise UnsupportedError(
                f"policy {self} wants keys {self.keys} RoPE, and {facts.name} caches them {cached} it: load the model as "
                f"{kinds}, or give keys={cached}."
            )
        return self

    def applies_to(self, which: str, layer: int) -> bool:
        """Whether it changes a tensor of a layer."""
        return which in TENSORS[self.on] and (not self.layers or layer in self.layers)

    def _apply(
        self,
        act: Callable[[Tensor, str, CacheRows], Tensor],
        tensor: Tensor,
        which: str,
        cache_rows: CacheRows,
    ) -> Tensor:
        if not self.applies_to(which, cache_rows.layer):
            return tensor
        if not self.heads:
            return act(tensor, which, cache_rows)
        heads = list(self.heads)
        left = cache_rows.positions_left
        left = None if left is None else left[:, heads]
        changed = act(
            tensor[:, heads],
            which,
            dataclasses.replace(cache_rows, positions_left=left, heads=self.heads),
        )
        whole = tensor.to(changed.dtype, copy=True)
        whole[:, heads] = changed
        return whole


@dataclasses.dataclass(frozen=True)
class ComposedPolicy(Policy):
    """Several policies. Each writes and keeps rows of those that the one before it left; reading
    goes the other way.

    Attributes:
        policies: The policies, the first one nearest to the model.
    """

    policies: tuple[Policy, ...] = ()

    def start(self, facts: ModelInfo) -> ComposedPolicy:
        """A chain of the parts' running policies."""
        return ComposedPolicy(tuple(policy.start(facts) for policy in self.policies))

    def write(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """Writes through the parts from first to last."""
        for policy in self.policies:
            keys, values = policy.write(keys, values, cache_rows)
        return keys, values

    def read(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """Reads through the parts from last to first."""
        for policy in reversed(self.policies):
            keys, values = policy.read(keys, values, cache_rows)
            cache_rows = dataclasses.replace(cache_rows, remade=cache_rows.remade or policy.reads)
        return keys, values

    def keep(
        self, keys: Tensor, values: Tensor, cache_rows: CacheRows
    ) -> Int[Tensor, "*batch_and_kv_head kept"] | None:
        """The rows that all parts keep; each policy chooses among those that the parts before it
        left.
        """
        left: Tensor | None = None
        for policy in self.policies:
            if (rows := policy.keep(keys, values, cache_rows)) is not None:
                every = rows.expand(*keys.shape[:2], -1)
                cache_rows = dataclasses.replace(
                    cache_rows, positions_left=positions_of(cache_rows, keys).gather(2, every)
                )
                keys, values = gather_rows(keys, every), gather_rows(values, every)
                left = every if left is None else left.gather(2, every)
        return left

    def bits_stored(self, tensor: str, width: int) -> float | None:
        """The bits of the last policy that has a format of its own."""
        formats = [
            bits
            for policy in self.policies
            if (bits := policy.bits_stored(tensor, width)) is not None
        ]
        return formats[-1] if formats else None

    def exact_rows(self, tensor: str, context: int) -> int:
        """Those of the last policy that has a format of its own."""
        formats = [policy for policy in self.policies if policy.bits_stored(tensor, 1) is not None]
        return formats[-1].exact_rows(tensor, context) if formats else 0

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of all parts."""
        return tuple(dict.fromkeys(site for policy in self.policies for site in policy.sites))

    def see(self, site: str, tensor: Tensor, cache_rows: CacheRows) -> None:
        """Passes a site to the parts that name it."""
        for policy in self.policies:
            if site in policy.sites:
                policy.see(site, tensor, cache_rows)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The dependencies of all parts."""
        return tuple(dict.fromkeys(name for policy in self.policies for name in policy.depends_on))

    @property
    def evicts(self) -> bool:
        """Whether any policy evicts."""
        return any(policy.evicts for policy in self.policies)

    @property
    def reads(self) -> bool:
        """Whether any policy reads other numbers than the cache keeps."""
        return any(policy.reads for policy in self.policies)

    def __str__(self) -> str:
        """The parts' text forms, joined as in a path."""
        return "+".join(map(str, self.policies))
