"""The keys and values of one pass: what is new goes through the policy into a memory, what
attention reads comes out of it.

The memory is the model's own cache, a preallocated one that grows in place, or none. All take the
policy, and all call their listeners with what attention is about to read, so that a recorder or a
patch gets the keys and values of the cached and of the recompute path in the same call.
:meth:`Store.update` is that call, once a layer and forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
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
        """Appends; the very first tensors are returned themselves, so that a prefill reads what a
        forward without a cache reads. What a library's cache is given besides is not needed here.
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
        """Moves the rows that are left to the front."""
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
    """The store of one pass from position 0: the policy's running copy, a memory, and the listeners.

    What the model's own cache returns is passed to attention as it is, so that the bits are those of
    the model in production; the store changes it only where a policy, the cache's dtype or a patch
    does.

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
        prompt: Positions of the prompt, for :attr:`CacheRows.prompt`; 0 where they are not known.
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
        self._named = policy
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
        # By layer: which rows of K, and of V, a listener put there, each [batch, kv_head, row].
        self._patched: dict[int, list[Tensor]] = {}
        # By layer: the absolute positions of the rows left, [batch, kv_head, row], and their least.
        self._positions: dict[int, Tensor] = {}
        self._starts: dict[int, int] = {}
        self._rows_of_layer: dict[int, CacheRows] = {}
        if self.policy.evicts and not policy.evicts:
            # Masks, positions and refusals follow from what the policy says of itself before it runs.
            raise InputError(
                f"policy {policy} starts as one that lets go of rows, and does not say so: give the policy evicts = True."
            )
        if policy.evicts:
            self.memory.let_go(f"policy {policy}")
        # Without a policy and a narrower cache rows are kept as they come: update() then only
        # appends, and calls the listeners.
        self._unchanged = cache_dtype is None and not self.policy.acts
        self.memory.connect(self.update)

    def length(self, layer: int) -> int:
        """Positions appended so far, whatever was let go of since."""
        return self._lengths.get(layer, 0)

    def keys_values(self, layer: int) -> KeysValues:
        """K and V of a layer as the memory holds them, ``[batch, kv_head, row, head_dim]``."""
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

        Args:
            layer: The block.
            keys: Of the new positions, ``[batch, kv_head, new, head_dim]``.
            values: The same of V.
            window: How many positions attention sees, where a sliding window limits them.
            more, named: What a model gives its own cache besides; handed on.

        Returns:
            K and V of all rows, ``[batch, kv_head, row, head_dim]``.
        """
        begun, new = self.length(layer), (keys, values)
        stop = self._lengths[layer] = begun + keys.shape[2]
        written = new if self._unchanged else self._through_write(layer, new, begun)
        handed = self.memory.append(layer, *written, window, *more, **named)
        read = handed[0].to(keys.dtype), handed[1].to(keys.dtype)
        if self._unchanged and not self.listeners:
            return read
        cache_rows, filled = self._note_rows(layer, begun, stop, handed[0])
        exact = begun < self.prefill
        if exact and not self._unchanged:
            read = self._as_computed(layer, new, written, handed, filled)
        whole = read[0].shape[2] == filled and read[1].shape[2] == filled
        filled_read = read if whole else (read[0][:, :, :filled], read[1][:, :, :filled])
        changed = (
            filled_read
            if exact or self._unchanged
            else self._through_read(layer, filled_read, cache_rows)
        )
        for listener in self.listeners:
            replaced = listener(cache_rows, *changed)
            if replaced is not None:
                self._write_patch(layer, changed, replaced, handed)
                changed = replaced
        # The next piece of the prompt reads this one as it was computed, though the cache keeps it
        # otherwise.
        kept_otherwise = any(a is not b for a, b in zip(new, written, strict=True))
        if stop < self.prefill and (layer in self._computed or kept_otherwise):
            self._computed[layer] = changed
        else:
            self._computed.pop(layer, None)
        return _put_back(read, filled_read, changed, filled)

    def _through_write(self, layer: int, new: Pair, begun: int) -> Pair:
        """What the cache keeps of new keys and values: what the policy writes, in the cache's
        dtype.
        """
        stop = begun + new[0].shape[2]
        rotated = self.facts.cached_keys_rotated
        cache_rows = CacheRows(layer, begun, stop, rotated, prompt=self.prompt)
        keys, values = self.policy.write(*new, cache_rows)
        if self.cache_dtype is None:
            return keys, values
        return keys.to(self.cache_dtype), values.to(self.cache_dtype)

    def _note_rows(
        self, layer: int, begun: int, stop: int, handed: Tensor
    ) -> tuple[CacheRows, int]:
        """Notes the positions of the new rows; returns which rows the memory now holds, and how many.

        Args:
            layer: The block.
            begun, stop: Absolute positions of the first new row, and one past the last.
            handed: The keys that the memory hands over, ``[batch, kv_head, slot, head_dim]``: of a
                static cache all slots, of which the last may be empty.
        """
        if self.policy.evicts:
            new = torch.arange(begun, stop, device=handed.device).expand(*handed.shape[:2], -1)
            earlier = self._positions.get(layer)
            self._positions[layer] = new if earlier is None else torch.cat([earlier, new], 2)
            self._starts.setdefault(layer, begun)
        cache_rows = self._cache_rows(layer, stop, min(stop, handed.shape[2]))
        self._rows_of_layer[layer] = cache_rows
        left = cache_rows.positions_left
        filled = stop - cache_rows.start if left is None else left.shape[2]
        if layer in self._patched:
            self._patched[layer] = [
                pad(marks, (0, stop - begun))[..., -filled:] for marks in self._patched[layer]
            ]
        return cache_rows, filled

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
        in_prefill = any(length < self.prefill for length in self._lengths.values())
        if not self.policy.evicts or in_prefill:
            return
        chosen: dict[int, Tensor] = {}
        for layer in self._lengths:
            if (rows := self._rows_to_keep(layer)) is not None:
                chosen[layer] = rows
        starts = self._least_positions(chosen)
        for layer, rows in chosen.items():
            self.memory.take(layer, rows)
            self._positions[layer] = self._positions[layer].gather(2, rows)
            self._starts[layer] = starts[layer]
            if layer in self._patched:
                self._patched[layer] = [marks.gather(2, rows) for marks in self._patched[layer]]
        left = {positions.shape[2] for positions in self._positions.values()}
        if len(left) > 1:
            raise UnsupportedError(
                f"policy {self._named} keeps {min(left)} rows in one layer and {max(left)} in another, and a model has one mask "
                "for all its layers: keep as many in each."
            )

    def _rows_to_keep(self, layer: int) -> Int[Tensor, "batch kv_head kept"] | None:
        """The rows of a layer that the policy keeps, from the oldest to the newest; None for all."""
        keys, values = self.keys_values(layer)
        cache_rows = self._cache_rows(layer, self.length(layer), keys.shape[2])
        kept = self.policy.keep(keys, values, cache_rows)
        if kept is None:
            return None
        return kept.to(keys.device).expand(*keys.shape[:2], -1).sort(-1).values

    def _least_positions(self, chosen: Mapping[int, Tensor]) -> dict[int, int]:
        """The least absolute position among the rows chosen in each layer.

        Raises:
            InputError: Rows were chosen that are not there, or one twice, or none.
        """
        answers = []
        for layer, rows in chosen.items():
            positions = self._positions[layer]
            last = positions.shape[2] - 1
            # The newest row stands behind them, so that there is a least position where a policy
            # names no row at all.
            inside = pad(rows.clamp(0, last), (0, 1), value=last)
            right = (rows == inside[..., :-1]).all() & (rows.diff() != 0).all() & bool(rows.numel())
            answers.append(torch.stack([right, positions.gather(2, inside).min()]))
        # Read at once, because each read waits for the device.
        numbers = (
            torch.stack([pair.to(answers[0].device) for pair in answers]).tolist()
            if answers
            else ()
        )
        starts = {}
        for layer, (right, start) in zip(chosen, numbers, strict=True):
            if not right:
                raise InputError(
                    f"policy {self._named} names rows of layer {layer} that are not there, or one twice, or none: expected some "
                    f"of 0 to {self._positions[layer].shape[2] - 1}, each once."
                )
            starts[layer] = start
        return starts

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

    def _through_read(self, layer: int, held_pair: Pair, cache_rows: CacheRows) -> Pair:
        """What the policy reads of what is held; a row that a listener put there is read as it was
        put there.
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
        """Writes the rows that a listener changed into the memory, so that a patched cache stays
        patched. All other rows stay as they are.
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
            # Later reads give these rows as the patch put them, without the policy.
            earlier = self._patched.get(layer, [torch.zeros_like(mark) for mark in marks])
            self._patched[layer] = [mark | old for mark, old in zip(marks, earlier, strict=True)]


class PassThrough(Store):
    """The store of a pass without a cache: attention reads the very tensors that this forward made,
    and the listeners are called where they are passed to it.
    """

    keeps = False

    @property
    def used(self) -> bool:
        """Whether the model has read through it. Nothing of one pass is left in it, so that without a
        policy, which may keep state, the next pass takes it again.
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
    """What attention reads: what the memory returned, with its filled rows replaced where they were
    changed; the very same tensors where they were not.
    """
    if changed is seen:
        return read
    keys, values = (
        whole if after is before else after if whole is before else _with(whole, after, filled)
        for whole, before, after in zip(read, seen, changed, strict=True)
    )
    return keys, values


def _with(whole: Tensor, rows: Tensor, filled: int) -> Tensor:
    """A copy of a tensor, laid out in memory as it is, whose first rows are others."""
    copy = whole.clone()
    copy[:, :, :filled] = rows
    return copy
