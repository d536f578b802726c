"""The one interface that a policy has."""

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
from kvinterp.models.caches import KeysValues, Place, gather_rows

KV = KeysValues


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is done to keys and values on their way into and out of the cache; the base does nothing.

    A policy overrides what it needs. None of its methods changes a tensor in place. One that remembers something from one
    call to the next says so by :meth:`start`, whose twin is used for one pass from position 0 and then thrown away.
    """

    SOURCE: ClassVar[str] = ""
    """Where it is from: the paper or program whose rule it follows."""

    def bits_stored(self, tensor: str, width: int) -> float | None:
        """Bits that a real implementation stores for an element of a row, scales included.

        Args:
            tensor: ``"k"`` or ``"v"``.
            width: ``head_dim``.

        Returns:
            None where it stores what it is given in the cache's own dtype.
        """
        return None

    def rows_stored(self, prompt: int, seen: int) -> int:
        """Rows held in each layer and KV head once a forward is over.

        Args:
            prompt: Positions of the prompt.
            seen: Positions so far, the prompt's among them.
        """
        return seen

    def check(self, layers: int) -> None:
        """Raises InputError where the policy names a layer that a model of so many has not; the base names none."""

    def start(self, facts: ModelInfo) -> Policy:
        """What runs in one pass from position 0: itself, or a fresh twin that may keep state (see :func:`running`)."""
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
    def depends_on(self) -> tuple[str, ...]:
        """What besides tokens and positions decides what it leaves of them; of other policies the laws say that nothing does.

        ``"prompt"``: where the prompt ends, so that a decode taken up again with its answer as part of the prompt goes on
        otherwise. ``"chunks"``: which positions of the prompt come in one forward. Where rows are let go of forward by
        forward, or by what attention has shown, it is the first unless a policy says otherwise.
        """
        return ("prompt",) if self.evicts or self.sites else ()

    @property
    def evicts(self) -> bool:
        """Whether it may let go of rows; one whose twin alone overrides :meth:`keep` says so itself."""
        return type(self).keep is not Policy.keep

    @property
    def acts(self) -> bool:
        """Whether it does or sees anything at all."""
        return type(self).write is not Policy.write or self.reads or self.evicts or bool(self.sites)

    @property
    def reads(self) -> bool:
        """Whether attention may read something else than is kept."""
        return type(self).read is not Policy.read

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        return text_of(self)


Kind = TypeVar("Kind", bound=Policy)


def running(policy: Kind, **state: Any) -> Kind:
    """A twin of a policy for one pass, with attributes of its own beside the fields."""
    twin = copy.copy(policy)
    vars(twin).update(state)
    return twin


TENSORS = {"kv": ("k", "v"), "k": ("k",), "v": ("v",)}
"""What ``on`` may be, and which tensors it means."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selective(Policy):
    """A policy that makes K or V alone into another tensor, in the layers and KV heads that it is asked for.

    A policy that derives from it writes :meth:`written` (new rows on their way in), :meth:`seen` (rows held, on their way to
    attention), or both; where a layer or head is left out, its tensors go through untouched, to the very tensor.
    One that is of K or V alone unless asked gives ``on`` another default, in a field that is ``kw_only`` as here.

    Attributes:
        on: ``"kv"``, ``"k"`` or ``"v"``.
        layers: The layers; empty for all.
        heads: The KV heads; empty for all.
        keys: ``"before"`` or ``"after"`` RoPE: refuses a kind of model that caches its keys otherwise. ``"cached"``: as the
            model caches them, ``hooked`` before RoPE, ``native`` and ``bridge`` after it.
    """

    on: Literal["kv", "k", "v"] = "kv"
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    keys: Literal["cached", "before", "after"] = "cached"

    def __post_init__(self) -> None:
        """Refuses words and numbers that mean nothing."""
        policy = name_of(type(self))
        check_choice(f"policy {policy!r}: on", self.on, TENSORS)
        check_choice(f"policy {policy!r}: keys", self.keys, ("cached", "before", "after"))
        for name, numbers in (("layers", self.layers), ("heads", self.heads)):
            if not isinstance(numbers, tuple) or not all(type(one) is int and one >= 0 for one in numbers):
                raise unexpected(f"policy {policy!r}: {name}", numbers, f"whole numbers from 0 on, as in {name}=0+2")

    def written(self, tensor: Tensor, which: str, place: Place) -> Tensor:
        """What is kept of new rows of one tensor.

        Args:
            tensor: ``[batch, kv_head, row, head_dim]``; only the heads asked for.
            which: ``"k"`` or ``"v"``.
            place: Where.
        """
        return tensor

    def seen(self, tensor: Tensor, which: str, place: Place) -> Tensor:
        """What attention reads of the rows held of one tensor; see :meth:`written`."""
        return tensor

    def write(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """Each tensor on its own."""
        return self._each(self.written, keys, values, place)

    def read(self, keys: Tensor, values: Tensor, place: Place) -> KV:
        """Each tensor on its own."""
        return self._each(self.seen, keys, values, place)

    @property
    def reads(self) -> bool:
        """Whether it overrides :meth:`seen`."""
        return type(self).seen is not Selective.seen or type(self).read is not Selective.read

    def check(self, layers: int) -> None:
        """Refuses a layer that the model has not."""
        if self.layers and max(self.layers) >= layers:
            raise InputError(f"policy {self} names layer {max(self.layers)}: expected layers from 0 to {layers - 1}.")

    def start(self, facts: ModelInfo) -> Policy:
        """Refuses a head that the model has not, and keys on the other side of RoPE."""
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

    def chosen(self, which: str, layer: int) -> bool:
        """Whether it has a say over a tensor of a layer."""
        return which in TENSORS[self.on] and (not self.layers or layer in self.layers)

    def _each(self, act: Callable[[Tensor, str, Place], Tensor], keys: Tensor, values: Tensor, place: Place) -> KV:
        return self._of(act, keys, "k", place), self._of(act, values, "v", place)

    def _of(self, act: Callable[[Tensor, str, Place], Tensor], tensor: Tensor, which: str, place: Place) -> Tensor:
        if not self.chosen(which, place.layer):
            return tensor
        if not self.heads:
            return act(tensor, which, place)
        heads = list(self.heads)
        rows = None if place.rows is None else place.rows[:, heads]
        made = act(tensor[:, heads], which, dataclasses.replace(place, rows=rows, heads=self.heads))
        whole = tensor.to(made.dtype, copy=True)
        whole[:, heads] = made
        return whole


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

    def start(self, facts: ModelInfo) -> Chain:
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
            place = dataclasses.replace(place, remade=place.remade or part.reads)
        return keys, values

    def keep(self, keys: Tensor, values: Tensor, place: Place) -> Int[Tensor, "*batch_and_kv_head kept"] | None:
        """The rows that all of them keep; each is asked about those that the ones before it left."""
        left: Tensor | None = None
        for part in self.parts:
            if (rows := part.keep(keys, values, place)) is not None:
                every = rows.expand(*keys.shape[:2], -1)
                positions = place.positions.to(rows.device).expand(*keys.shape[:3])
                place = dataclasses.replace(place, rows=positions.gather(2, every))
                keys, values = gather_rows(keys, every), gather_rows(values, every)
                left = every if left is None else left.gather(2, every)
        return left

    def bits_stored(self, tensor: str, width: int) -> float | None:
        """What the last that has a format of its own stores."""
        found = [bits for part in self.parts if (bits := part.bits_stored(tensor, width)) is not None]
        return found[-1] if found else None

    @property
    def sites(self) -> tuple[str, ...]:
        """What any of them wants."""
        return tuple(dict.fromkeys(site for part in self.parts for site in part.sites))

    def rows_stored(self, prompt: int, seen: int) -> int:
        """Those of the one that keeps the fewest."""
        return min((part.rows_stored(prompt, seen) for part in self.parts), default=seen)

    def see(self, site: str, tensor: Tensor, place: Place) -> None:
        """Shows it to those that asked for it."""
        for part in self.parts:
            if site in part.sites:
                part.see(site, tensor, place)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """What any of them depends on."""
        return tuple(dict.fromkeys(what for part in self.parts for what in part.depends_on))

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
