"""The keys and values of one pass: what is new goes through the policy into a memory, what
attention reads comes out of it.

The memory is the model's own cache, a preallocated one that grows in place, or none. All take the
policy, and all tell their watchers what attention is about to read, so that a recorder or a patch
sees the cached and the recompute path through one door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import ModelInfo
from kvinterp.models.attaching import HookPoint, Listener
from kvinterp.models.caches import KeysValues, OwnCache, gather_rows
from kvinterp.policies import CacheRows, Policy

Pair = tuple[Tensor, Tensor]
"""Keys and values of another number of rows than others in the same call."""

ReadListener = Callable[[CacheRows, Tensor, Tensor], "KeysValues | None"]
"""Called with what attention is about to read; what it returns is read instead."""


class Growing(OwnCache):
    """A memory allocated once and appended to in place (``torch.cat`` at every step would be
    quadratic).

    Args:
        capacity: Most positions it will ever hold.
        position_major: Whether a position's heads lie side by side in memory, as in
            TransformerLens' cache.
    """

    name = "preallocated"

    def __init__(self, capacity: int, position_major: bool = False) -> None:
        self.capacity, self._position_major = capacity, position_major
        self._buffers: dict[int, KeysValues] = {}
        self._counts: dict[int, int] = {}

    def append(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        *_: Any,
        **__: Any,
    ) -> KeysValues:
        """Appends; the first tensors are handed on as they are, and read as a forward without a
        cache reads them.
        """
        begun = self._counts.get(layer, 0)
        if layer not in self._buffers:
            self._buffers[layer] = self._allocate(keys), self._allocate(values)
        stop = self._counts[layer] = begun + keys.shape[2]
        for buffer, new in zip(self._buffers[layer], (keys, values), strict=True):
            buffer[:, :, begun:stop] = new
        start = 0 if window is None else max(begun - window + 1, 0)
        return self._between(layer, start, stop) if begun else (keys, values)

    def keys_values(self, layer: int) -> KeysValues | None:
        """Views of what is held."""
        return self._between(layer, 0, self._counts[layer]) if layer in self._buffers else None

    def memory_of(self, layer: int, handed: KeysValues) -> KeysValues | None:
        """The newest rows of K and V, before they are written."""
        stop = self._counts[layer]
        return self._between(layer, stop - handed[0].shape[2], stop)

    def take(self, layer: int, rows: Tensor) -> None:
        """Moves them to the front."""
        left = self._counts[layer] = rows.shape[2]
        for buffer in self._buffers[layer]:
            buffer[:, :, :left] = gather_rows(buffer, rows)

    def _between(self, layer: int, start: int, stop: int) -> KeysValues:
        keys, values = self._buffers[layer]
        return keys[:, :, start:stop], values[:, :, start:stop]

    def _allocate(self, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        if self._position_major:
            return like.new_empty(batch, self.capacity, heads, width).transpose(1, 2)
        return like.new_empty(batch, heads, self.capacity, width)


class Store:
    """One pass from position 0: a policy in motion, a memory, and who is told of what attention
    reads.

    What the model's own cache hands to attention is handed on as it is, so that its bits are
    production's; the store steps in only where a policy, the cache's dtype or a patch makes it
    something else.

    Args:
        facts: The model's facts.
        policy: What is done to keys and values.
        batch: Number of sequences.
        dtype: Compute dtype.
        device: Where the model runs.
        listeners: Called with every read; what one returns is read instead, and kept.
        memory: What keeps them, new and empty.
        cache_dtype: Dtype that is kept, if another than the keys and values come in.
        prefill: Positions in whose forwards attention reads keys and values as they were computed;
            0 where it always reads what is kept.
        prompt: Positions of the prompt, as policies are told them; 0 where they are not known.
    """

    keeps = True

    def __init__(
        self,
        facts: ModelInfo,
        policy: Policy,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        listeners: Sequence[ReadListener],
        memory: OwnCache | None = None,
        cache_dtype: torch.dtype | None = None,
        prefill: int = 0,
        prompt: int = 0,
    ) -> None:
        self.facts, self.policy, self.listeners = facts, policy.start(facts), listeners
        self._given = policy
        self.memory: OwnCache = memory or OwnCache()
        self.library_cache = None if self.memory.model_cache is None else self.memory
        self.name = self.memory.name
        self.model_cache: Any = None
        self.cache_dtype, self.prefill, self.prompt = cache_dtype, prefill, prompt
        self._empty = torch.empty(
            batch, facts.kv_heads, 0, facts.head_dim, dtype=dtype, device=device
        )
        self._lengths: dict[int, int] = {}
        self._computed: dict[int, KeysValues] = {}
        # By layer: which rows of K, and of V, a watcher put there, each [batch, kv_head, row].
        self._patched: dict[int, list[Tensor]] = {}
        # By layer: the absolute positions of the rows left, [batch, kv_head, row], and their least.
        self._positions: dict[int, Tensor] = {}
        self._starts: dict[int, int] = {}
        self._rows_of_layer: dict[int, CacheRows] = {}
        if self.policy.evicts and not policy.evicts:
            # Masks, positions and every refusal rest on the policy's own word.
            raise InputError(
                f"policy {policy} starts as one that lets go of rows, and does not say so: give the policy evicts = True."
            )
        if policy.evicts:
            self.memory.let_go(f"policy {policy}")
        # Without a policy and a narrower cache rows are kept as they come: update() then only
        # appends, and tells the listeners.
        self._unchanged = cache_dtype is None and not self.policy.acts
        self.memory.connect(self.update)

    def length(self, layer: int) -> int:
        """Positions appended so far, whatever was let go of since."""
        return self._lengths.get(layer, 0)

    def keys_values(self, layer: int) -> KeysValues:
        """What the memory holds of them."""
        pair = self.memory.keys_values(layer) if layer in self._lengths else None
        return (self._empty, self._empty) if pair is None else pair

    def update(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        *more: Any,
        **named: Any,
    ) -> KeysValues:
        """Appends, and returns what attention reads.

        In the prefill that is what was computed, whatever is kept of it, as with transformers'
        quantised caches: step 0 is then the same computation on both paths.
        """
        begun, new, written = self.length(layer), (keys, values), (keys, values)
        stop = self._lengths[layer] = begun + keys.shape[2]
        if not self._unchanged:
            cache_rows = CacheRows(
                layer, begun, stop, self.facts.cached_keys_rotated, prompt=self.prompt
            )
            written = self.policy.write(keys, values, cache_rows)
            if self.cache_dtype is not None:
                written = written[0].to(self.cache_dtype), written[1].to(self.cache_dtype)
        handed = self.memory.append(layer, *written, window, *more, **named)
        read = handed[0].to(keys.dtype), handed[1].to(keys.dtype)
        if self._unchanged and not self.listeners:
            return read
        if self.policy.evicts:
            new_positions = torch.arange(begun, stop, device=keys.device)
            new_positions = new_positions.expand(*handed[0].shape[:2], -1)
            self._positions[layer] = (
                torch.cat([self._positions[layer], new_positions], 2)
                if layer in self._positions
                else new_positions
            )
            self._starts.setdefault(layer, begun)
        cache_rows = self._rows_of_layer[layer] = self._cache_rows(
            layer, stop, min(stop, handed[0].shape[2])
        )
        # A static cache hands over all its room, of which the last slots may be empty.
        filled = (
            stop - cache_rows.start
            if cache_rows.positions_left is None
            else cache_rows.positions_left.shape[2]
        )
        if layer in self._patched:
            self._patched[layer] = [
                pad(marks, (0, keys.shape[2]))[..., -filled:] for marks in self._patched[layer]
            ]
        exact = begun < self.prefill
        if exact and not self._unchanged:
            read = self._as_computed(layer, new, written, handed, filled)
        whole = read[0].shape[2] == filled and read[1].shape[2] == filled
        filled_read = read if whole else (read[0][:, :, :filled], read[1][:, :, :filled])
        changed = (
            filled_read
            if exact or self._unchanged
            else self._through_policy(layer, filled_read, cache_rows)
        )
        for listener in self.listeners:
            heard = listener(cache_rows, *changed)
            if heard is not None:
                self._write_patch(layer, changed, heard, handed)
                changed = heard
        if stop < self.prefill and (
            layer in self._computed or any(a is not b for a, b in zip(new, written, strict=True))
        ):
            self._computed[layer] = changed
        else:
            self._computed.pop(layer, None)
        return _put_back(read, filled_read, changed, filled)

    def hear(self, site: str, layer: int, tensor: Tensor) -> None:
        """Shows the policy a site of the forward that runs."""
        cache_rows = self._rows_of_layer.get(
            layer, CacheRows(layer, 0, 0, self.facts.cached_keys_rotated)
        )
        if site in ("pattern", "attn_scores"):
            tensor = tensor[..., : cache_rows.positions.shape[-1]]
        self.policy.see(site, tensor, cache_rows)

    def settle(self) -> None:
        """Lets go of what the policy does not keep; called when a forward is over and attention has
        read.

        Raises:
            UnsupportedError: Layers would be left with different numbers of rows, for which a model
                makes one mask.
        """
        if not self.policy.evicts or any(
            length < self.prefill for length in self._lengths.values()
        ):
            return
        evictions: list[Any] = []
        for layer in self._lengths:
            keys, values = self.keys_values(layer)
            last = keys.shape[2] - 1
            kept = self.policy.keep(
                keys, values, self._cache_rows(layer, self.length(layer), last + 1)
            )
            if kept is not None:
                rows = kept.to(keys.device).expand(*keys.shape[:2], -1).sort(-1).values
                # The newest row stands behind them, so that there is a least position where a
                # policy names no row at all.
                inside = pad(rows.clamp(0, last), (0, 1), value=last)
                right = (
                    (rows == inside[..., :-1]).all() & (rows.diff() != 0).all() & bool(rows.numel())
                )
                evictions.append(
                    (
                        layer,
                        rows,
                        torch.stack([right, self._positions[layer].gather(2, inside).min()]),
                    )
                )
        # Read at once, because each read waits for the device.
        numbers = (
            torch.stack([pair.to(evictions[0][2].device) for *_, pair in evictions]).tolist()
            if evictions
            else ()
        )
        for (layer, rows, _), (right, start) in zip(evictions, numbers, strict=True):
            if not right:
                raise InputError(
                    f"policy {self._given} names rows of layer {layer} that are not there, or one twice, or none: expected some "
                    f"of 0 to {self._positions[layer].shape[2] - 1}, each once."
                )
            self.memory.take(layer, rows)
            self._positions[layer], self._starts[layer] = (
                self._positions[layer].gather(2, rows),
                start,
            )
            if layer in self._patched:
                self._patched[layer] = [marks.gather(2, rows) for marks in self._patched[layer]]
        left = {positions.shape[2] for positions in self._positions.values()}
        if len(left) > 1:
            raise UnsupportedError(
                f"policy {self._given} keeps {min(left)} rows in one layer and {max(left)} in another, and a model has one mask "
                "for all its layers: keep as many in each."
            )

    def _cache_rows(self, layer: int, stop: int, filled: int) -> CacheRows:
        rotated, positions = self.facts.cached_keys_rotated, self._positions.get(layer)
        if positions is not None:
            return CacheRows(
                layer,
                self._starts[layer],
                stop,
                rotated,
                positions_left=positions,
                prompt=self.prompt,
            )
        window = self.facts.windows[layer]
        # A cache that a user brings may let go of positions, and does not say of which.
        known = filled >= (stop if window is None else min(stop, window))
        return CacheRows(layer, stop - filled, stop, rotated, known, prompt=self.prompt)

    def _as_computed(self, layer: int, new: Pair, written: Pair, handed: Pair, filled: int) -> Pair:
        """Keys and values of a prefill as they were computed, laid out in memory as the cache hands
        them over.

        Args:
            layer: The block.
            new: What this forward made, ``[batch, kv_head, row, head_dim]``.
            written: The same behind the policy and in the cache's dtype.
            handed: What the memory returned: the rows so far, maybe with empty room behind them.
            filled: How many of its rows are filled.
        """
        earlier, result = self._computed.get(layer), []
        for index, (made, kept, held) in enumerate(zip(new, written, handed, strict=True)):
            if made is kept and earlier is None:
                # The policy left it alone, now and before: what is held is what was computed.
                result.append(held.to(made.dtype))
                continue
            before = filled - made.shape[2]
            earlier_rows = (
                held[:, :, :before]
                if earlier is None
                else earlier[index][:, :, earlier[index].shape[2] - before :]
            )
            computed = made if not before else torch.cat([earlier_rows.to(made.dtype), made], 2)
            result.append(
                made
                if held is kept and not before
                else _with(held.to(made.dtype), computed, filled)
            )
        return result[0], result[1]

    def _through_policy(self, layer: int, held_pair: Pair, cache_rows: CacheRows) -> Pair:
        """What the policy reads of what is held; a row that a watcher put there is read as it was
        put.
        """
        keys, values = self.policy.read(*held_pair, cache_rows)
        if layer not in self._patched:
            return keys, values
        pairs = zip(self._patched[layer], held_pair, (keys, values), strict=True)
        keys, values = (
            torch.where(marks[..., None], was_held, read) for marks, was_held, read in pairs
        )
        return keys, values

    def _write_patch(self, layer: int, before: Pair, after: Pair, handed: Pair) -> None:
        """Keeps the rows that a watcher put in place of others: a patched cache stays patched. All
        others stay as they are.
        """
        memory = self.memory.memory_of(layer, handed)
        if memory is None:
            raise UnsupportedError(
                f"keys and values in a {self.memory.name} cannot be patched, since layer {layer} keeps them in another form than "
                "attention reads them: patch k, v or z, or a path with cache=dynamic."
            )
        marks = []
        for tensor, was, now in zip(memory, before, after, strict=True):
            rows = tensor[:, :, : was.shape[2]]
            if (
                was.data_ptr() == rows.data_ptr()
                and was.dtype == rows.dtype
                and not self.policy.reads
            ):
                rows.copy_(now)
                continue
            changed = (now != was).any(-1)
            rows.copy_(torch.where(changed[..., None], now.to(rows.dtype), rows))
            marks.append(changed)
        if self.policy.reads:
            # Read as it was put: the policy has no say over what a patch moved.
            earlier = self._patched.get(layer, [torch.zeros_like(mark) for mark in marks])
            self._patched[layer] = [mark | old for mark, old in zip(marks, earlier, strict=True)]


class PassThrough(Store):
    """No cache: attention reads the very tensors this forward made, heard where they are handed to
    it.
    """

    keeps = False

    @property
    def used(self) -> bool:
        """Whether the model has read through it, so that another pass may: nothing of one pass is
        left for the next.
        """
        return bool(self._lengths)

    def length(self, layer: int) -> int:
        """Always 0: nothing is held."""
        return 0

    def _write_patch(self, layer: int, before: Pair, after: Pair, handed: Pair) -> None:
        """There is nothing to keep without a cache."""


def policy_listeners(
    policy: Policy, layers: int, store: Callable[[], Store | None]
) -> dict[HookPoint, Listener]:
    """The hooks through which a policy sees the sites it asked for.

    Args:
        policy: The policy.
        layers: How many the model has.
        store: Gives the store of the pass that runs.
    """

    def listener(site: str, layer: int) -> Listener:
        def hear(tensor: Tensor) -> None:
            running = store()
            if running is not None:
                running.hear(site, layer, tensor)

        return hear

    return {
        (site, layer): listener(site, layer) for site in policy.sites for layer in range(layers)
    }


def _put_back(read: Pair, seen: Pair, changed: Pair, filled: int) -> Pair:
    """What attention reads, given what was seen of it and what became of that; the very tensors
    where nothing did.
    """
    if changed is seen:
        return read
    keys, values = (
        whole if after is before else after if whole is before else _with(whole, after, filled)
        for whole, before, after in zip(read, seen, changed, strict=True)
    )
    return keys, values


def _with(whole: Tensor, part: Tensor, filled: int) -> Tensor:
    """A copy of a tensor, laid out in memory as it is, whose first positions are another's."""
    copy = whole.clone()
    copy[:, :, :filled] = part
    return copy
