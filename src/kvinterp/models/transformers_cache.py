"""transformers' caches, for the bridge and native kinds: their own ones listened to, and kvinterp's store in the shape of one.

A cached path runs on a cache of transformers' own, whose ``update`` alone is led through the store's: the layers, their
memory and what they hand to attention are transformers', and so are the bits.

A pass without a cache, and the preallocated store, are given the shape of a transformers cache, which is a list of layers. Layers
that keep keys and values of every position (or of a sliding window) are replaced by ones that keep them in the store; layers
that keep something else (Mamba and Gated DeltaNet states, indexers) stay transformers' own.
"""

from __future__ import annotations

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
from kvinterp.models.caches import CacheKind, Dynamic, KeysValues, OwnCache, lead, taken
from kvinterp.models.hooks import hooks_suspended

# Until transformers 5.20 every quantised layer was a QuantizedLayer.
BaseQuantizedLayer: Any = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
TAKEN_AS = ("cache", "past_key_values")
"""What is tried on a forward that takes anything by any name and says none."""
STATES = {"conv_states": "convolution state", "recurrent_states": "recurrent state"}
"""What layers that attend to nothing keep, by the attribute that holds it."""


def text_config(model: nn.Module) -> Any:
    """The config of the decoder, inside a multimodal config too."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


class Memory(NamedTuple):
    """What a model goes on from, as it answered when it was run: releases and families each have names of their own for it.

    Attributes:
        name: The argument by which its forward takes it; None where it takes none that it uses.
        made: The class of what it makes where it is given none.
        own_form: Whether that holds no layer of keys and values, as Mamba's and RWKV's.
    """

    name: str | None = None
    made: type = DynamicCache
    own_form: bool = False


def returned(output: Any, arguments: Collection[str]) -> tuple[str, Any]:
    """The cache of transformers' in a forward's output, or else what one of its arguments takes; ``("", None)`` for neither."""
    held = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    there = [(name, value) for name, value in held.items() if value is not None]
    caches = [pair for pair in there if isinstance(pair[1], Cache)]
    return next(iter([*caches, *(pair for pair in there if pair[0] in arguments)]), ("", None))


class StoreLayer(DynamicLayer):
    """One layer of the store in the shape transformers asks for (``[batch, kv_head, position, head_dim]``)."""

    def __init__(self, store: KVStore, layer: int, window: int | None) -> None:
        super().__init__()
        self.store, self.layer, self.sliding_window = store, layer, window
        self.is_sliding = window is not None
        self.is_initialized, self.used = True, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates on its first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends to the store and returns what attention reads."""
        self.used = True
        return self.store.update(self.layer, key_states, value_states, self.sliding_window)

    def get_seq_length(self) -> int:
        """Positions seen so far, whatever a sliding window lets attention see."""
        return self.store.length(self.layer)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys that the next update will return."""
        held = self.store.length(self.layer)
        if self.sliding_window is None:
            return _mask_sizes(held, self.store.held(self.layer)[0].shape[2] if held else 0, query_length)
        return _mask_sizes(held, min(held, self.sliding_window - 1), query_length)

    def get_max_length(self) -> int:
        """The window, or -1 where there is no limit, as transformers' own layers say."""
        return -1 if self.sliding_window is None else self.sliding_window

    get_max_cache_shape = get_max_length


class ThinnedLayer(DynamicLayer):
    """transformers' own growing layer, of which rows may be let go: it goes on counting the positions that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends as transformers does."""
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Positions seen so far: those of the tokens that follow begin there, whatever was let go of."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """As if the rows that are left were the newest: every query may read them all."""
        return _mask_sizes(self.seen, 0 if self.keys is None else self.keys.shape[-2], query_length)


def _mask_sizes(seen: int, held: int, query_length: int | Tensor) -> tuple[int, int]:
    """How many keys the next queries find, and the place of the first of them."""
    new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
    return held + new, seen - held


def is_attention_only(cache: Cache) -> bool:
    """Whether every layer keeps plain keys and values."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def model_cache(store: KVStore, config: Callable[[], Any], architecture: str) -> Cache:
    """The cache that a store is given to the model as: one for its whole life, since some layers keep a state in it.

    It is the store's own one, or one whose attention layers keep their tensors in the store. The model's config is read when
    it is made and not in every forward: to read one takes transformers hundreds of calls.

    Raises:
        UnsupportedError: A forward before this one left it unused.
    """
    if store.model_cache is not None:
        layers = (layer for layer in store.model_cache.layers if isinstance(layer, CacheLayerMixin))
        used = [getattr(layer, "used", layer.is_initialized) for layer in layers]
        if used and not any(used):
            raise UnsupportedError(
                f"{architecture}, as this kind runs it, does not use the cache that it is given, so it has no cached path: use "
                "another kind, or for a bridge of yours the one that kv.load_model(..., kind='bridge') builds."
            )
    elif store.own is not None:
        store.model_cache = store.own.model_cache
    else:
        store.model_cache = DynamicCache(config=config())
        for index, layer in enumerate(store.model_cache.layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                store.model_cache.layers[index] = StoreLayer(store, index, getattr(layer, "sliding_window", None))
    made: Cache = store.model_cache
    return made


def refusal(cache: Any, method: str) -> str:
    """Why a cache is not to be asked for ``crop``, ``reorder_cache`` or the like, in a sentence; empty where it is."""
    layers, shared = getattr(cache, "layers", []), getattr(Cache, method, None)
    if not isinstance(cache, Cache) or getattr(type(cache), method, None) is shared:
        if not hasattr(cache, method):
            return f"{type(cache).__name__}, this model's cache, has no {method}()."
        lacks = next((layer for layer in layers if not hasattr(layer, method)), None)
        if lacks is not None:
            return f"{type(lacks).__name__}, of this model's cache, has no {method}()."
    if method == "crop":
        fixed = next((type(layer).__name__ for layer in layers if getattr(layer, "is_croppable", True) is False), "")
        why = f"this model's cache cannot be cropped: is_croppable is False for its {fixed}, a state has no past."
        return why if fixed else ""
    half = next((type(part).__name__ for part in (cache, *layers) if _moves_half(part, method)), "")
    why = f"{method}() of {half}, of this model's cache, moves keys and values only and leaves its states where they are"
    return f"{why}: it is not to be called on this model." if half else ""


def _moves_half(part: Any, method: str) -> bool:
    """Whether a cache or layer that keeps states beside keys and values has the method of its keys and values alone."""
    whole = isinstance(part, Cache)
    if whole:
        states = any(isinstance(value, list) and name != "layers" for name, value in vars(part).items())
    else:
        states = any(getattr(part, name, None) for name in STATES)
    return states and getattr(type(part), method) is getattr(Cache if whole else DynamicLayer, method, None)


class TransformersCache(OwnCache):
    """A transformers cache of any class, new and empty, of which the store hears every update."""

    def __init__(self, cache: Cache) -> None:
        self.model_cache, self.name = cache, type(cache).__name__
        self._update = cache.update

    @classmethod
    def of(cls, kind: CacheKind, config: Any, capacity: int, plain: Callable[[], Cache] | None = None) -> TransformersCache:
        """A new cache of a kind.

        Args:
            kind: Which cache.
            config: The decoder's config.
            capacity: Most positions that will be put in.
            plain: Makes the cache that the model would make by itself, where that is no plain DynamicCache.
        """
        return cls(plain() if plain is not None and isinstance(kind, Dynamic) else kind.make(config, capacity))

    def connect(self, update: Callable[..., KeysValues]) -> None:
        """Leads every update through the store's."""

        def heard(key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KeysValues:
            return update(layer_idx, key_states, value_states, None, *args, **kwargs)

        self.model_cache.update = heard  # type: ignore[method-assign]

    def append(
        self, layer: int, keys: Tensor, values: Tensor, window: int | None = None, *more: Any, **named: Any
    ) -> KeysValues:
        """What transformers' update does.

        Raises:
            UnsupportedError: A quantised layer cannot take keys and values of this shape.
        """
        try:
            return self._update(keys, values, layer, *more, **named)
        except ValueError as error:
            # A backend has group sizes of its own. Whatever else a user's cache raises is the user's to see.
            if not any(isinstance(held, BaseQuantizedLayer) for held in self.model_cache.layers):
                raise
            (heads, rows, width), why = keys.shape[1:], str(error).rstrip(".")
            raise UnsupportedError(
                f"a {self.name} cannot keep {rows} positions of {heads} KV heads of {width} numbers ({why}): give a prompt of "
                "another length, or cache=quantized(8,fp8)."
            ) from error

    def held(self, layer: int) -> KeysValues | None:
        """The layer's own tensors; a quantised layer has none that hold everything."""
        found = self.model_cache.layers[layer] if layer < len(self.model_cache.layers) else None
        keys, values = getattr(found, "keys", None), getattr(found, "values", None)
        if isinstance(found, BaseQuantizedLayer) or not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            return None
        return keys, values

    def let_go(self, kind: str) -> None:
        """Puts layers that count what they have seen in place of a DynamicCache's.

        Raises:
            UnsupportedError: It is another cache.
        """
        if (
            type(self.model_cache) is not DynamicCache
            or not is_attention_only(self.model_cache)
            or self.model_cache.offloading
        ):
            name = "an offloaded cache" if self.model_cache.offloading else f"a {self.name}"
            raise UnsupportedError(
                f"{kind} lets go of rows, and {name} cannot: leave the cache out of the path, or use a model whose "
                "layers all keep plain keys and values."
            )
        self.model_cache.layers = [ThinnedLayer() for _ in self.model_cache.layers]
        self.model_cache.layer_class_to_replicate = ThinnedLayer

    @property
    def can_select(self) -> bool:  # type: ignore[override]
        """Where it is a DynamicCache of plain layers."""
        return type(self.model_cache) is DynamicCache and is_attention_only(self.model_cache)

    def will_crop(self) -> None:
        """As transformers' assisted decoding does; older releases have nothing of the kind."""
        getattr(self.model_cache, "activate_past_recording", lambda: None)()

    def crop(self, length: int) -> None:
        """Transformers' own ``crop``."""
        try:
            # Of a negative number every release takes so many away.
            self.model_cache.crop(length - int(self.model_cache.get_seq_length()))
        except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            why = str(error).rstrip(".")
            said = f"a {self.name} of this model cannot take positions back ({why}): leave the call out of the path."
            raise UnsupportedError(said) from error

    def select(self, rows: Tensor) -> None:
        """Transformers' own ``reorder_cache``, as beam search calls it, or ``batch_select_indices``."""
        batch = self.model_cache.layers[0].keys.shape[0]
        (self.model_cache.reorder_cache if len(rows) == batch else self.model_cache.batch_select_indices)(rows)

    def join(self, other: OwnCache) -> None:
        """Its layers hold both batches, one after the other."""
        for mine, theirs in zip(self.model_cache.layers, other.model_cache.layers, strict=True):
            mine.keys, mine.values = torch.cat([mine.keys, theirs.keys]), torch.cat([mine.values, theirs.values])

    def take(self, layer: int, rows: Tensor) -> None:
        """Keeps these rows in memory of their own."""
        held: Any = self.model_cache.layers[layer]
        held.keys, held.values = taken(held.keys, rows), taken(held.values, rows)


class OnTransformersCache(Adapter):
    """An adapter over a transformers model, whose user keeps a transformers cache."""

    _blocks: nn.ModuleList
    _memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        """What the model goes on from: it is asked once."""
        if self._memory is None:
            self._memory = self._asked()
        return self._memory

    @property
    def cache_name(self) -> str:  # type: ignore[override]
        """What the model's own forward calls the cache that it takes; empty where it takes none."""
        return self.memory.name or ""

    @torch.no_grad()
    def _asked(self) -> Memory:
        """Looks at what two tokens leave, and at which argument takes it back."""
        arguments = inspect.signature(self.source.forward).parameters
        tokens = torch.arange(3, 5, device=self.device)[None] % self.facts.vocabulary

        def run(**more: Any) -> Any:
            try:
                return self.source(input_ids=tokens, use_cache=True, **more)
            # What a model raises here it raises again where it is run in earnest.
            except Exception:
                return None

        with self.own_state([]), hooks_suspended(self.model):
            name, made = returned(run(), arguments)
            if name in arguments:
                layers = getattr(made, "layers", ())
                return Memory(name, type(made), not any(isinstance(layer, CacheLayerMixin) for layer in layers))
            # An output may call it otherwise than the argument, or hold none that was not given.
            for each in dict.fromkeys((*filter(None, [name]), *arguments, *TAKEN_AS)):
                cache = DynamicCache(config=self.config) if made is None else made
                before = cache.get_seq_length()
                run(**{each: cache})
                if cache.get_seq_length() > before:
                    return Memory(each, type(cache))
        return Memory()

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks; of a bridge those of the model inside, which it runs through."""
        return self._blocks

    @property
    def config(self) -> Any:
        """The config of the decoder, inside a multimodal config too."""
        return text_config(self.source)

    def new_cache(self) -> Any:
        """A DynamicCache, whose layers are those of the config."""
        return DynamicCache(config=self.config)

    def block_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The transformers cache among a block's arguments, which every architecture names its own way."""
        return next((given for given in (*args, *kwargs.values()) if isinstance(given, Cache)), None)

    def cached_length(self, cache: Any) -> int:
        """Positions that the cache has seen; 0 for one that keeps a state and no positions."""
        if cache is None:
            return 0
        layers = getattr(cache, "layers", [])
        states = bool(layers) and not any(isinstance(layer, CacheLayerMixin) for layer in layers)
        return 0 if states else int(cache.get_seq_length())

    def intercept_cache(self, layer: int, cache: Any, on_read: CacheRead) -> Callable[[], None]:
        """Leads ``update`` of the user's own cache; of a static one's room ``on_read`` sees the slots that are filled.

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
            read: KeysValues, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> KeysValues | None:
            if layer_idx != layer:
                return None
            keys, values = read
            stop = int(cache.get_seq_length(layer_idx))
            filled = min(stop, keys.shape[2])
            new = on_read(layer_idx, stop - filled, keys[:, :, :filled], values[:, :, :filled])
            if new is None:
                return None
            return torch.cat([new[0], keys[:, :, filled:]], 2), torch.cat([new[1], values[:, :, filled:]], 2)

        return lead(cache, "update", reader)

    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """What the cache of the user's own forward holds for a layer, or None where that is no keys and values.

        Raises:
            UnsupportedError: It holds them in a form that is not read here.
        """
        if cache is None:
            return None
        _check_readable(cache)
        if layer >= len(cache.layers):
            return None
        held = cache.layers[layer]
        if isinstance(held, BaseQuantizedLayer):
            raise UnsupportedError(
                f"site {site!r} cannot be read from a {type(cache).__name__}, which holds most of its keys and values "
                "quantised: give a DynamicCache or a StaticCache."
            )
        tensor = getattr(held, "keys" if site == "cache_k" else "values", None)
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return None
        # Of a static cache the slots that are filled.
        return tensor[:, :, : int(cache.get_seq_length(layer))]


def _check_readable(cache: Cache) -> None:
    """Raises UnsupportedError for a cache that does not belong to a decoder alone."""
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedError(
            "an EncoderDecoderCache was given, whose keys and values are not of one text alone: give a DynamicCache or a "
            "StaticCache."
        )
