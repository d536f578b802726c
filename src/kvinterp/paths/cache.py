"""Where keys and values live: the model's own cache, a preallocated one that grows in place, or nowhere.

All take the policy, and all tell their watchers what attention is about to read, so that a recorder or a patch sees the
cached and the recompute path through the same door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Facts
from kvinterp.models.caches import OwnCache
from kvinterp.policies import Place, Policy

__all__ = ["GrowingStore", "OwnStore", "PassThrough", "ReadListener"]

KeysValues = tuple[Float[Tensor, "batch kv_head position head_dim"], Float[Tensor, "batch kv_head position head_dim"]]

ReadListener = Callable[[Place, Tensor, Tensor], "KeysValues | None"]
"""Called with what attention is about to read; what it returns is read instead."""


class _Store:
    """What the stores share: the policy, the watchers and the empty beginning."""

    own: OwnCache | None = None
    name = ""
    """What keeps the keys and values, for the provenance."""

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        listeners: Sequence[ReadListener],
    ) -> None:
        policy.check(facts.layers)
        self.facts, self.policy, self.listeners = facts, policy, listeners
        self.dressed: Any = None
        self._empty = torch.empty(batch, facts.kv_heads, 0, facts.head_dim, dtype=dtype, device=device)

    def _read(self, layer: int, start: int, stop: int, keys: Tensor, values: Tensor) -> KeysValues:
        window = self.facts.windows[layer]
        # A cache that a user brings may let go of positions, and does not say of which.
        known = stop - start >= (stop if window is None else min(stop, window))
        place = Place(layer, start, stop, self.facts.cached_keys_rotated, known)
        keys, values = self.policy.read(keys, values, place)
        for listener in self.listeners:
            changed = listener(place, keys, values)
            if changed is not None:
                keys, values = changed
                self._replaced(layer, start, stop, keys, values)
        return keys, values

    def _replaced(self, layer: int, start: int, stop: int, keys: Tensor, values: Tensor) -> None:
        """Keeps what a watcher put in place of what was read; there is nothing to keep without a cache."""

    def _write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> KeysValues:
        place = Place(layer, start, start + keys.shape[2], self.facts.cached_keys_rotated)
        return self.policy.write(keys, values, place)


class PassThrough(_Store):
    """No cache: attention reads the very tensors this forward made, so the bits are those of a forward without one."""

    def length(self, layer: int) -> int:
        """Always 0: nothing is held."""
        return 0

    def held(self, layer: int) -> KeysValues:
        """Nothing, in the right shape."""
        return self._empty, self._empty

    def update(self, layer: int, keys: Tensor, values: Tensor, window: int | None = None) -> KeysValues:
        """Returns what it is given, after the policy."""
        keys, values = self._write(layer, 0, keys, values)
        return self._read(layer, 0, keys.shape[2], keys, values)


class OwnStore(_Store):
    """The model's own cache, listened to: what it hands to attention is handed on as it is, so its bits are production's.

    Args:
        facts: The model's facts.
        policy: What is done to keys and values.
        batch: Number of sequences.
        dtype: Compute dtype.
        device: Where the model runs.
        listeners: Told of every read.
        own: The model's own cache, new and empty.
        cache_dtype: Dtype it keeps, if another than the keys and values come in.
    """

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        listeners: Sequence[ReadListener],
        own: OwnCache,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(facts, policy, batch, dtype, device, listeners)
        self.own, self.name, self.cache_dtype = own, own.name, cache_dtype
        self._lengths: dict[int, int] = {}
        self._handed: KeysValues = (self._empty, self._empty)
        own.connect(self.update)

    def length(self, layer: int) -> int:
        """Positions put in so far."""
        return self._lengths.get(layer, 0)

    def held(self, layer: int) -> KeysValues:
        """What the own cache holds of them."""
        held = self.own.held(layer) if self.own is not None and layer in self._lengths else None
        return (self._empty, self._empty) if held is None else held

    def update(
        self, layer: int, keys: Tensor, values: Tensor, window: int | None = None, *more: Any, **named: Any
    ) -> KeysValues:
        """Appends as the own cache does, then returns what it hands to attention.

        Where a policy or the cache's dtype changes what is kept, the prefill reads what it just made all the same, as with
        transformers' quantised caches: step 0 is then the same computation on both paths.
        """
        held = self.length(layer)
        kept = self._write(layer, held, keys, values)
        if self.cache_dtype is not None:
            kept = kept[0].to(self.cache_dtype), kept[1].to(self.cache_dtype)
        self._handed = self.own.append(layer, *kept, None, *more, **named)  # type: ignore[union-attr]
        stop = self._lengths[layer] = held + keys.shape[2]
        # A static cache hands over all its room, of which the last slots may be empty.
        filled = min(stop, self._handed[0].shape[2])
        new = (keys, values)
        read = tuple(
            _with(handed.to(own.dtype), own, filled) if not held and own is not put else handed.to(own.dtype)
            for handed, own, put in zip(self._handed, new, kept, strict=True)
        )
        seen = tuple(tensor if tensor.shape[2] == filled else tensor[:, :, :filled] for tensor in read)
        changed = self._read(layer, stop - filled, stop, *seen)
        keys, values = (
            whole if after is before else after if whole is before else _with(whole, after, filled)
            for whole, before, after in zip(read, seen, changed, strict=True)
        )
        return keys, values

    def _replaced(self, layer: int, start: int, stop: int, keys: Tensor, values: Tensor) -> None:
        # A patched cache stays patched. What is handed to attention is the cache's own memory, or holds it.
        held = self.held(layer)
        for handed, kept, new in zip(self._handed, held, (keys, values), strict=True):
            if handed.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr():
                raise UnsupportedError(
                    f"keys and values in a {self.name} cannot be patched, since layer {layer} keeps them in another form than "
                    "attention reads them: patch k, v or z, or a path with cache=dynamic."
                )
            handed[:, :, : stop - start] = new


def _with(whole: Tensor, part: Tensor, filled: int) -> Tensor:
    """A copy of a tensor, laid out in memory as it is, whose first positions are another's."""
    copy = whole.clone()
    copy[:, :, :filled] = part
    return copy


class GrowingStore(_Store):
    """A cache allocated once and appended to in place (``torch.cat`` at every step would be quadratic).

    Args:
        facts: The model's facts.
        policy: What is done to keys and values.
        batch: Number of sequences.
        capacity: Most positions it will ever hold.
        dtype: Compute dtype, in which attention reads.
        device: Where the model runs.
        listeners: Told of every read.
        cache_dtype: Dtype it keeps, if another than ``dtype``.
        position_major: Whether a position's heads lie side by side in memory, as in TransformerLens' cache.
    """

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        listeners: Sequence[ReadListener],
        cache_dtype: torch.dtype | None = None,
        position_major: bool = False,
    ) -> None:
        super().__init__(facts, policy, batch, dtype, device, listeners)
        self.name = "preallocated"
        self.capacity, self.dtype, self.cache_dtype = capacity, dtype, cache_dtype or dtype
        self._position_major = position_major
        self._lengths = [0] * facts.layers
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def length(self, layer: int) -> int:
        """Positions held."""
        return self._lengths[layer]

    def held(self, layer: int) -> KeysValues:
        """Views of what is held."""
        if layer not in self._keys:
            return self._empty, self._empty
        stop = self._lengths[layer]
        return self._keys[layer][:, :, :stop], self._values[layer][:, :, :stop]

    def update(self, layer: int, keys: Tensor, values: Tensor, window: int | None = None) -> KeysValues:
        """Appends, then returns what attention reads.

        The prefill reads the tensors it just made, before the policy and the cache's dtype change what is kept, as
        transformers' quantised caches do: step 0 is then the same computation on both paths, on every backend.
        """
        held = self._lengths[layer]
        kept_keys, kept_values = self._write(layer, held, keys, values)
        stop = held + keys.shape[2]
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(kept_keys), self._allocate(kept_values)
        self._keys[layer][:, :, held:stop] = kept_keys
        self._values[layer][:, :, held:stop] = kept_values
        self._lengths[layer] = stop
        start = 0 if window is None else max(held - window + 1, 0)
        if held:
            keys = self._keys[layer][:, :, start:stop].to(self.dtype)
            values = self._values[layer][:, :, start:stop].to(self.dtype)
        return self._read(layer, start, stop, keys, values)

    def _replaced(self, layer: int, start: int, stop: int, keys: Tensor, values: Tensor) -> None:
        # A patched cache stays patched: later steps read what a watcher put there.
        self._keys[layer][:, :, start:stop] = keys
        self._values[layer][:, :, start:stop] = values

    def _allocate(self, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        if self._position_major:
            return like.new_empty(batch, self.capacity, heads, width, dtype=self.cache_dtype).transpose(1, 2)
        return like.new_empty(batch, heads, self.capacity, width, dtype=self.cache_dtype)
