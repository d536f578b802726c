"""Where keys and values live: a preallocated cache that grows in place, and a pass-through for paths without one.

Both take the policy, and both tell their watchers what attention is about to read, so that a recorder or a patch sees the
cached and the recompute path through the same door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.models import Facts
from kvinterp.policies import Place, Policy

__all__ = ["GrowingStore", "PassThrough", "ReadListener"]

KeysValues = tuple[Float[Tensor, "batch kv_head position head_dim"], Float[Tensor, "batch kv_head position head_dim"]]

ReadListener = Callable[[Place, Tensor, Tensor], "KeysValues | None"]
"""Called with what attention is about to read; what it returns is read instead."""


class _Store:
    """What both stores share: the policy, the watchers and the empty beginning."""

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        listeners: Sequence[ReadListener],
    ) -> None:
        self.facts, self.policy, self.listeners = facts, policy, listeners
        self.dressed: Any = None
        self._empty = torch.empty(batch, facts.kv_heads, 0, facts.head_dim, dtype=dtype, device=device)

    def _read(self, layer: int, start: int, stop: int, keys: Tensor, values: Tensor) -> KeysValues:
        place = Place(layer, start, stop, self.facts.cached_keys_rotated)
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
