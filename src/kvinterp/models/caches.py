"""What is read from a cache and what stores it: the rows of a cache, the interface of every store of
keys and values, and of every library's own cache.

The kinds of cache that a path can name are in :mod:`kvinterp.models.cache_kinds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import UnsupportedError

KeysValues = tuple[
    Float[Tensor, "batch kv_head position head_dim"],
    Float[Tensor, "batch kv_head position head_dim"],
]


@dataclasses.dataclass(frozen=True)
class CacheRows:
    """The part of the cache that a policy, a recorder or a patch reads.

    Attributes:
        layer: The block.
        start: Absolute position of the first key.
        stop: One past the absolute position of the last key.
        rotated: Whether these keys are after RoPE.
        known: Whether the positions are known; a user's cache may have removed some without saying
            which.
        positions_left: The absolute position of each row, where a policy may have removed rows: positions
            between start and stop may be missing, others for each sequence and KV head. None where
            none can be missing.
        heads: The KV heads that the tensors hold; empty for all.
        prompt: The number of positions of the prompt, whose forwards come before all others; 0
            where that is not known.
        remade: Whether another policy of the path reads the tensors first, which may change a row
            at each read.
    """

    layer: int
    start: int
    stop: int
    rotated: bool
    known: bool = True
    positions_left: Int[Tensor, "batch kv_head row"] | None = dataclasses.field(
        default=None, compare=False
    )
    heads: tuple[int, ...] = ()
    prompt: int = dataclasses.field(default=0, compare=False)
    remade: bool = dataclasses.field(default=False, compare=False)

    @property
    def positions(self) -> Int[Tensor, "*batch_and_kv_head row"]:
        """The absolute position of each row: one list for all heads, or one for each sequence and
        KV head.
        """
        return (
            torch.arange(self.start, self.stop)
            if self.positions_left is None
            else self.positions_left
        )

    def check_known(self, site: str) -> None:
        """Raises UnsupportedError where a site is recorded or moved and the cache does not say
        which positions it still holds.
        """
        if not self.known:
            raise UnsupportedError(
                f"site {site!r} cannot be had at layer {self.layer}: the cache holds {self.stop - self.start} of {self.stop} "
                "positions and does not say which; leave the cache sites out."
            )

    def check_whole(self, site: str) -> None:
        """Raises UnsupportedError where a site is compared position by position and rows are
        missing, or not known.
        """
        self.check_known(site)
        if self.positions_left is not None and self.positions_left.shape[-1] < self.stop:
            raise UnsupportedError(
                f"site {site!r} cannot be lined up by position at layer {self.layer}: the policy let go of rows, and "
                f"{self.positions_left.shape[-1]} of {self.stop} are left; record it with run(), or leave the cache sites out."
            )


@runtime_checkable
class KVStore(Protocol):
    """Keeps keys and values between forwards; the implementations are in ``paths.store``."""

    model_cache: Any
    """The cache object that the model receives for this store, one for its whole life; None before
    the first forward.
    """

    library_cache: OwnCache | None
    """The library's own cache that keeps the tensors; None where the store itself keeps them or
    nothing does.
    """

    keeps: bool
    """Whether anything is kept: if not, the model runs without a cache and passes its keys and
    values through the store.
    """

    def length(self, layer: int) -> int:
        """Counts the positions in a layer before the next update."""

    def keys_values(self, layer: int) -> KeysValues:
        """The keys and values in a layer, without copying."""

    def update(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_head new head_dim"],
        values: Float[Tensor, "batch kv_head new head_dim"],
        window: int | None = None,
    ) -> KeysValues:
        """Appends, and returns what attention reads: all positions, or the last ``window - 1`` and
        the new ones.
        """


class OwnCache:
    """Keeps the keys and values of one run, as a library's own cache does; this base class keeps
    nothing.
    """

    name: str = ""
    """The name of its class."""

    model_cache: Any = None
    """The cache object that the model receives; None where it receives the store in the shape of a
    cache.
    """

    def connect(self, update: Callable[..., KeysValues]) -> None:
        """Sends every update of the model to ``update(layer, keys, values, None, *args)``, which
        calls :meth:`append`.
        """

    def append(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> KeysValues:
        """Appends as the library itself does, and returns what attention reads, any unfilled room
        included.
        """
        return keys, values

    def keys_values(self, layer: int) -> KeysValues | None:
        """The tensors in which a layer keeps its keys and values; None where it keeps them in
        another form.
        """
        return None

    def memory_of(self, layer: int, returned: KeysValues) -> KeysValues | None:
        """The memory of what :meth:`append` has just returned, row for row; None where the layer
        keeps it in another form.
        """
        tensors = self.keys_values(layer)
        same = tensors is not None and all(
            view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            for view, tensor in zip(returned, tensors, strict=True)
        )
        return returned if same else None

    def let_go(self, kind: str) -> None:
        """Prepares an empty cache for the removal of rows.

        Args:
            kind: What removes them, for the error.

        Raises:
            UnsupportedError: Rows cannot be removed from it.
        """

    def take(self, layer: int, rows: Int[Tensor, "batch kv_head kept"]) -> None:
        """Removes all rows of a layer but these, numbered among the rows that are left."""


MOVES = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")
"""The methods of transformers' caches that move their sequences."""


def offers(cache: Any, method: str) -> bool:
    """Whether a transformers cache offers a method: its class has one of its own, or transformers'
    asks layers that all do.
    """
    owner = next((kind for kind in type(cache).__mro__ if method in vars(kind)), None)
    if owner is None:
        return False
    if not owner.__module__.startswith("transformers."):
        return True
    layers = getattr(cache, "layers", None) or getattr(
        getattr(cache, "self_attention_cache", None), "layers", None
    )
    return all(hasattr(layer, method) for layer in layers or ())


def gather_rows(tensor: Tensor, rows: Int[Tensor, "batch kv_head kept"]) -> Tensor:
    """Gathers rows of keys or values ``[batch, kv_head, row, head_dim]``, others for each sequence
    and KV head.
    """
    return torch.gather(tensor, 2, rows[..., None].expand(*rows.shape, tensor.shape[3]))


class _WithReaders:
    """A method of a user's cache, and the readers that may replace what it returns to attention, in
    order.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.readers: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        read = self.method(*args, **kwargs)
        for reader in self.readers:
            new = reader(read, *args, **kwargs)
            read = read if new is None else new
        return read


def add_reader(cache: Any, name: str, reader: Callable[..., Any]) -> Callable[[], None]:
    """Lets a reader replace what a method of a cache returns, before the readers that were added
    earlier.

    Args:
        cache: Anyone's cache.
        name: The method.
        reader: Called with what the method returned and with its arguments; returns a replacement,
            or None.

    Returns:
        A function that removes the reader; readers may be removed in any order.
    """
    before = wrapped = cache.__dict__.get(name)
    if not isinstance(wrapped, _WithReaders):
        wrapped = cache.__dict__[name] = _WithReaders(getattr(cache, name))
    wrapped.readers.insert(0, reader)

    def undo() -> None:
        wrapped.readers.remove(reader)
        if wrapped.readers or cache.__dict__.get(name) is not wrapped:
            return
        if before is None:
            del cache.__dict__[name]
        else:
            cache.__dict__[name] = before

    return undo
