"""transformers' caches, for the bridge and native kinds.

A cached path runs on a cache of transformers' own. Only its ``update`` goes through the store; the
layers, their memory and the tensors that they return to attention are transformers', and so are the
bits.

For a pass without a cache, and for the preallocated store, the model receives a transformers cache
whose layers keep their keys and values in the store. Layers that keep something else (Mamba and
Gated DeltaNet states, indexers) stay transformers' own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import Adapter, CacheRead, KVStore
from kvinterp.models.cached_rows import NOT_READ
from kvinterp.models.caches import KeysValues, OwnCache, add_reader, gather_rows
from kvinterp.models.hooks import hooks_suspended

# Until transformers 5.20 every quantised layer was a QuantizedLayer.
BaseQuantizedLayer: Any = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
TAKEN_AS = ("cache", "past_key_values")
"""The argument names to try on a forward that takes any argument by any name."""
STATES = {"conv_states": "convolution state", "recurrent_states": "recurrent state"}
"""What layers without attention keep, by the attribute that holds it."""


def text_config(model: nn.Module) -> Any:
    """The config of the decoder, inside a multimodal config too."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


class Memory(NamedTuple):
    """The way in which a model passes its cache on, found by running it, since releases and
    families name it differently.

    Attributes:
        name: The argument by which the forward takes the cache; None where it takes none that it
            uses.
        cache_class: The class of the cache that the forward makes where it receives none.
        own_form: Whether that cache has no layer of keys and values, as Mamba's and RWKV's.
        crash: What the forward raised when it was asked for its cache; empty where it answered.
        grows: Whether it uses more layers of a cache than its config names, as where blocks run
            several times in a forward.
        runs: How often its first block runs in a forward.
    """

    name: str | None = None
    cache_class: type = DynamicCache
    own_form: bool = False
    crash: str = ""
    grows: bool = False
    runs: int = 1


def returned_cache(output: Any, arguments: Collection[str]) -> tuple[str, Any]:
    """Finds a transformers cache in a forward's output, or else a value that one of the forward's
    arguments takes.

    Returns:
        Its name in the output and the value; ``("", None)`` where there is neither.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    values = [(name, value) for name, value in fields.items() if value is not None]
    caches = [pair for pair in values if isinstance(pair[1], Cache)]
    return next(iter([*caches, *(pair for pair in values if pair[0] in arguments)]), ("", None))


class StoreLayer(DynamicLayer):
    """One layer of the store as a cache layer of transformers,
    ``[batch, kv_head, position, head_dim]``.
    """

    def __init__(self, store: KVStore, layer: int, window: int | None) -> None:
        super().__init__()
        self.store, self.layer, self.sliding_window = store, layer, window
        self.is_sliding = window is not None
        self.is_initialized, self.used = True, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the store allocates at its first update."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends to the store and returns the keys and values that attention reads."""
        self.used = True
        return self.store.update(self.layer, key_states, value_states, self.sliding_window)

    def get_seq_length(self) -> int:
        """Counts the positions seen so far, whether or not a sliding window still shows them to
        attention.
        """
        return self.store.length(self.layer)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys that the next update will return."""
        length = self.store.length(self.layer)
        if self.sliding_window is None:
            return _mask_sizes(
                length,
                self.store.keys_values(self.layer)[0].shape[2] if length else 0,
                query_length,
            )
        return _mask_sizes(length, min(length, self.sliding_window - 1), query_length)

    def get_max_length(self) -> int:
        """The window, or -1 for no limit, as in transformers' own layers."""
        return -1 if self.sliding_window is None else self.sliding_window

    get_max_cache_shape = get_max_length


class ThinnedLayer(DynamicLayer):
    """transformers' own growing layer, from which rows may be removed: it goes on counting the
    positions that it has seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends as transformers does."""
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Counts the positions seen so far, removed rows included: the next token has this
        position.
        """
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset as if the rows that are left were the newest: every query may read them
        all.
        """
        return _mask_sizes(self.seen, 0 if self.keys is None else self.keys.shape[-2], query_length)


def _mask_sizes(positions: int, rows: int, query_length: int | Tensor) -> tuple[int, int]:
    """The number of keys that the next queries read, and the position of the first, where ``rows``
    of ``positions`` are left.
    """
    new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
    return rows + new, positions - rows


def is_attention_only(cache: Cache) -> bool:
    """Whether every layer keeps plain keys and values."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def model_cache(store: KVStore, new_cache: Callable[[], Cache], architecture: str) -> Cache:
    """The cache object that the model receives for a store, the same for the store's whole life:
    some layers keep a state in it.

    It is the library cache of the store, or a cache of ``new_cache()`` whose attention layers keep
    their tensors in the store.

    Raises:
        UnsupportedError: An earlier forward did not use the cache.
    """
    if store.model_cache is not None:
        layers = store.model_cache.layers
        used = [
            getattr(part, "used", part.is_initialized)
            for part in layers
            if isinstance(part, CacheLayerMixin)
        ]
        if used and not any(used):
            raise UnsupportedError(
                f"{NOT_READ} ({architecture}, as it runs here, leaves the cache that it is given empty), so there is no cached "
                "path: use another kind, or for a bridge of yours the one that kv.load_model(..., kind='bridge') builds."
            )
    elif store.library_cache is not None:
        store.model_cache = store.library_cache.model_cache
    else:
        store.model_cache = new_cache()
        for index, layer in enumerate(store.model_cache.layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                store.model_cache.layers[index] = StoreLayer(
                    store, index, getattr(layer, "sliding_window", None)
                )
    cache: Cache = store.model_cache
    return cache


class TransformersCache(OwnCache):
    """A transformers cache of any class, new and empty, whose updates all go through the store."""

    def __init__(self, cache: Cache) -> None:
        self.model_cache, self.name = cache, type(cache).__name__
        self._update = cache.update

    def connect(self, update: Callable[..., KeysValues]) -> None:
        """Sends every update of the cache to ``update``."""

        def send(
            key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> KeysValues:
            return update(layer_idx, key_states, value_states, None, *args, **kwargs)

        self.model_cache.update = send  # type: ignore[method-assign]

    def append(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> KeysValues:
        """Runs the cache's own update.

        Raises:
            UnsupportedError: A quantised layer cannot take keys and values of this shape.
        """
        try:
            return self._update(keys, values, layer, *args, **kwargs)
        except ValueError as error:
            # Each quantising backend has its own group sizes. The user sees any other error of
            # their cache as it is.
            if not any(isinstance(part, BaseQuantizedLayer) for part in self.model_cache.layers):
                raise
            (heads, rows, width), why = keys.shape[1:], str(error).rstrip(".")
            raise UnsupportedError(
                f"a {self.name} cannot keep {rows} positions of {heads} KV heads of {width} numbers ({why}): give a prompt of "
                "another length, or cache=quantized(8,fp8)."
            ) from error

    def keys_values(self, layer: int) -> KeysValues | None:
        """The layer's own tensors; None for a quantised layer, whose tensors do not hold
        everything.
        """
        part = self.model_cache.layers[layer] if layer < len(self.model_cache.layers) else None
        keys, values = getattr(part, "keys", None), getattr(part, "values", None)
        if (
            isinstance(part, BaseQuantizedLayer)
            or not isinstance(keys, Tensor)
            or not isinstance(values, Tensor)
        ):
            return None
        return keys, values

    def let_go(self, kind: str) -> None:
        """Replaces the layers of a DynamicCache by layers that count the positions that they have
        seen.

        Raises:
            UnsupportedError: It is no DynamicCache of plain layers.
        """
        if not self._plain or self.model_cache.offloading:
            name = "an offloaded cache" if self.model_cache.offloading else f"a {self.name}"
            raise UnsupportedError(
                f"{kind} lets go of rows, and {name} cannot: leave the cache out of the path, or use a model whose "
                "layers all keep plain keys and values."
            )
        self.model_cache.layers = [ThinnedLayer() for _ in self.model_cache.layers]
        self.model_cache.layer_class_to_replicate = ThinnedLayer

    @property
    def _plain(self) -> bool:
        """Whether it is a DynamicCache of plain layers."""
        return type(self.model_cache) is DynamicCache and is_attention_only(self.model_cache)

    def take(self, layer: int, rows: Tensor) -> None:
        """Keeps these rows of a layer, in new memory."""
        part: Any = self.model_cache.layers[layer]
        part.keys, part.values = gather_rows(part.keys, rows), gather_rows(part.values, rows)


class OnTransformersCache(Adapter):
    """An adapter of a model whose users keep a transformers cache."""

    _blocks: nn.ModuleList
    _memory: Memory | None = None
    _configs: tuple[Any, Any] = None, None
    """The model's config, and that of the decoder in it."""

    @property
    def embedding(self) -> nn.Module | None:
        """The input embeddings."""
        # Code of anybody's may define none, or raise.
        with contextlib.suppress(Exception):
            return self.source.get_input_embeddings()  # type: ignore[operator]
        return None

    @property
    def memory(self) -> Memory:
        """The way in which the model passes its cache from one forward to the next; found once."""
        if self._memory is None:
            self._memory = self._find_memory()
        return self._memory

    @property
    def cache_name(self) -> str:  # type: ignore[override]
        """The argument by which the model's own forward takes its cache; empty where it takes
        none.
        """
        return self.memory.name or ""

    @torch.no_grad()
    def _find_memory(self) -> Memory:
        """Runs two tokens and finds the cache in the output, and the argument that takes it
        back.
        """
        arguments = inspect.signature(self.source.forward).parameters
        tokens = torch.arange(3, 5, device=self.device)[None] % self.facts.vocabulary
        raised: list[str] = []

        def run(**options: Any) -> Any:
            try:
                return self.source(input_ids=tokens, use_cache=True, **options)
            # The model will raise the same error again where it runs in earnest.
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}".partition("\n")[0][:200])
                return None

        with self.own_state([]), hooks_suspended(self.model):
            block, runs = next(iter(self.blocks)), list[int]()
            with block.register_forward_hook(lambda *_: runs.append(1)):
                name, cache = returned_cache(run(), arguments)
            crash = raised[0] if raised else ""
            if name in arguments:
                layers = getattr(cache, "layers", ())
                own_form = not any(isinstance(layer, CacheLayerMixin) for layer in layers)
                grows = type(cache) is DynamicCache and 0 < len(
                    DynamicCache(config=self.config).layers
                ) < len(layers)
                return Memory(name, type(cache), own_form, grows=grows, runs=len(runs))
            # The output may use another name than the argument, or hold a cache only where one was
            # passed in.
            for argument in dict.fromkeys((*filter(None, [name]), *arguments, *TAKEN_AS)):
                passed = DynamicCache(config=self.config) if cache is None else cache
                before = passed.get_seq_length()
                run(**{argument: passed})
                if passed.get_seq_length() > before:
                    return Memory(argument, type(passed))
        return Memory(crash=crash)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks; for a bridge those of the model inside, which the bridge runs."""
        return self._blocks

    @property
    def config(self) -> Any:
        """The config of the decoder, inside a multimodal config too; found once, since every
        forward asks for it.
        """
        whole: Any = self.source.config
        if self._configs[0] is not whole:
            self._configs = whole, whole.get_text_config(decoder=True)
        return self._configs[1]

    def new_cache(self) -> Any:
        """Makes a DynamicCache with the layers that the config says, or one that grows where the
        model uses more.
        """
        return DynamicCache() if self.memory.grows else DynamicCache(config=self.config)

    def block_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Finds the transformers cache among a block's arguments, which every architecture names in
        its own way.
        """
        return next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None
        )

    def cached_length(self, cache: Any) -> int:
        """Counts the positions that the cache has seen; 0 for one that keeps a state and no
        positions.
        """
        if cache is None:
            return 0
        layers = getattr(cache, "layers", [])
        states = bool(layers) and not any(isinstance(layer, CacheLayerMixin) for layer in layers)
        return 0 if states else int(cache.get_seq_length())

    def intercept_cache(self, layer: int, cache: Any, on_read: CacheRead) -> Callable[[], None]:
        """Wraps ``update`` of the user's own cache; of a static cache ``on_read`` receives the
        filled slots only.

        Raises:
            InputError: There is no cache.
            UnsupportedError: It is an encoder-decoder's.
        """
        if cache is None:
            raise InputError(
                f"a patch of the cache needs a forward with a cache: call the model with {self.cache_name}=..."
            )
        _check_readable(cache)

        def reader(
            read: KeysValues,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *_: Any,
            **__: Any,
        ) -> KeysValues | None:
            if layer_idx != layer:
                return None
            keys, values = read
            stop = int(cache.get_seq_length(layer_idx))
            filled = min(stop, keys.shape[2])
            new = on_read(layer_idx, stop - filled, keys[:, :, :filled], values[:, :, :filled])
            if new is None:
                return None
            return torch.cat([new[0], keys[:, :, filled:]], 2), torch.cat(
                [new[1], values[:, :, filled:]], 2
            )

        return add_reader(cache, "update", reader)

    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """Reads a layer's keys or values from the cache of the user's own forward; None where it
        holds something else.

        Raises:
            UnsupportedError: It holds them in a form that cannot be read here.
        """
        if cache is None:
            return None
        _check_readable(cache)
        if layer >= len(cache.layers):
            return None
        part = cache.layers[layer]
        if isinstance(part, BaseQuantizedLayer):
            raise UnsupportedError(
                f"site {site!r} cannot be read from a {type(cache).__name__}, which holds most of its keys and values "
                "quantised: give a DynamicCache or a StaticCache."
            )
        tensor = getattr(part, "keys" if site == "cache_k" else "values", None)
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return None
        # A static cache also has slots that are not filled yet.
        return tensor[:, :, : int(cache.get_seq_length(layer))]


def _check_readable(cache: Cache) -> None:
    """Raises UnsupportedError for the cache of an encoder-decoder."""
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedError(
            "an EncoderDecoderCache was given, whose keys and values are not of one text alone: give a DynamicCache or a "
            "StaticCache."
        )
