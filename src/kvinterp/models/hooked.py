"""TransformerLens' HookedTransformer: the interp community's model, where every activation has a hook.

Its cache holds keys before RoPE and rotates the whole history at every step, so ``cache_k_pre`` is what it stores and
``cache_k`` is what ``hook_rot_k`` shows. Exists up to TransformerLens 3; version 4 has the bridge only.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import Adapter, CacheRead, KeysValuesRead, KVStore, ModelInfo
from kvinterp.models.caches import CacheKind, OwnCache, check_plain, lead
from kvinterp.models.hook_names import hook_name
from kvinterp.models.hooks import Tap, methods_led, routing_tap
from kvinterp.models.sites import LAYOUTS, MLP_SITES, ROUTING_SITES


def _turned(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values with heads and positions exchanged: TransformerLens keeps ``[batch, position, kv_head, head_dim]``."""
    return pair[0].transpose(1, 2), pair[1].transpose(1, 2)


class _Entry:
    """One layer of the store, in the shape of TransformerLens' cache entry (``[batch, position, kv_head, head_dim]``)."""

    frozen = False

    def __init__(self, store: KVStore, layer: int) -> None:
        self.store, self.layer = store, layer

    @property
    def past_keys(self) -> Tensor:
        return _turned(self.store.held(self.layer))[0]

    @property
    def past_values(self) -> Tensor:
        return _turned(self.store.held(self.layer))[1]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _turned(self.store.update(self.layer, *_turned((keys, values))))


class _Cache:
    """The store, in the shape of a TransformerLensKeyValueCache."""

    frozen = False

    def __init__(self, store: KVStore, layers: int) -> None:
        self.entries = [_Entry(store, layer) for layer in range(layers)]

    def __getitem__(self, layer: int) -> _Entry:
        return self.entries[layer]

    def append_attention_mask(self, mask: Tensor) -> Tensor:
        return mask.new_ones(mask.shape[0], self.entries[0].store.length(0) + mask.shape[1])


class _OwnCache(OwnCache):
    """TransformerLens' own cache, of which the store hears every append through the entries that stand for it."""

    name = "TransformerLensKeyValueCache"

    def __init__(self, config: Any, device: torch.device, batch: int, dtype: torch.dtype) -> None:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        self.model_cache = TransformerLensKeyValueCache.init_cache(config, device, batch)
        for entry in self.model_cache.entries:
            # They begin with a tensor of no positions, whose dtype decides with the new keys' what is kept.
            entry.past_keys, entry.past_values = entry.past_keys.to(dtype), entry.past_values.to(dtype)

    def append(
        self, layer: int, keys: Tensor, values: Tensor, window: int | None = None, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """TransformerLens' own append."""
        return _turned(self.model_cache[layer].append(*_turned((keys, values))))

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """The entry's own tensors."""
        return _turned((self.model_cache[layer].past_keys, self.model_cache[layer].past_values))

    can_select = True

    def crop(self, length: int) -> None:
        """The first rows of every entry."""
        self._each(lambda held: held[:, :length])

    def select(self, rows: Tensor) -> None:
        """These sequences of every entry."""
        self._each(lambda held: held[rows.to(held.device)])

    def join(self, other: OwnCache) -> None:
        """Puts the other's entries behind these."""
        for mine, theirs in zip(self.model_cache.entries, other.model_cache.entries, strict=True):
            mine.past_keys = torch.cat([mine.past_keys, theirs.past_keys])
            mine.past_values = torch.cat([mine.past_values, theirs.past_values])

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for entry in self.model_cache.entries:
            entry.past_keys, entry.past_values = change(entry.past_keys), change(entry.past_values)

    def let_go(self, kind: str) -> None:
        """Refuses: keys are held before RoPE, and turned at every step by the number of their row."""
        raise UnsupportedError(
            f"{kind} lets go of rows, and a HookedTransformer turns cached keys by the number of their row, which would then be "
            "another: load the model with kind='native' or kind='bridge'."
        )


class HookedAdapter(Adapter):
    """A HookedTransformer, run as it is: its own kernels, its own cache layout."""

    kind, cache_name = "hooked", "past_kv_cache"
    position_major_cache = True
    takes = frozenset({"attention_mask"})

    def __init__(self, model: nn.Module, name: str | None = None, tokenizer: Any = None) -> None:
        config: Any = model.cfg
        local = config.attn_types if config.use_local_attn else None
        facts = ModelInfo(
            name=name or config.model_name,
            architecture=config.original_architecture or "HookedTransformer",
            layers=config.n_layers,
            query_heads=config.n_heads,
            kv_heads=config.n_key_value_heads or config.n_heads,
            head_dim=config.d_head,
            width=config.d_model,
            vocabulary=config.d_vocab_out,
            context=config.n_ctx,
            windows=tuple(
                config.window_size if local and local[layer] == "local" else None for layer in range(config.n_layers)
            ),
            cached_keys_rotated=False,
            attention="transformer_lens",
        )
        super().__init__(model, facts, tokenizer if tokenizer is not None else model.tokenizer)
        if config.attention_dir != "causal":
            raise InputError(
                f"model {self.facts.name} has {config.attention_dir} attention, and a KV cache needs causal attention: "
                "give a decoder."
            )

    @property
    def alike_in_training(self) -> bool:
        """TransformerLens has no dropout; two ways of reading long texts are all that asks for the mode."""
        config: Any = self.model.cfg
        return not (getattr(config, "use_logn_attn", False) or getattr(config, "use_dynamic_ntk_rope", False))

    def block_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's entry of the user's TransformerLensKeyValueCache."""
        return kwargs.get("past_kv_cache_entry")

    def call_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first layer's entry."""
        cache = kwargs.get("past_kv_cache")
        return None if cache is None else cache[0]

    def cached_length(self, cache: Any) -> int:
        """Positions in the layer's entry."""
        return 0 if cache is None else cache.past_keys.shape[1]

    def intercept_cache(self, layer: int, cache: Any, on_read: CacheRead) -> Callable[[], None]:
        """Wraps ``append`` of the user's own cache entry."""
        if cache is None:
            raise InputError(
                f"a patch of the cache needs a forward with a cache: call the model with {self.cache_name}=..."
            )

        def reader(read: tuple[Tensor, Tensor], *_: Any) -> tuple[Tensor, Tensor] | None:
            new = on_read(layer, 0, *_turned(read))
            return None if new is None else _turned(new)

        return lead(cache, "append", reader)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks."""
        return self.model.blocks  # type: ignore[return-value]

    def own_cache(self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype) -> _OwnCache:
        """A TransformerLensKeyValueCache."""
        check_plain(kind, "a HookedTransformer, which has TransformerLens' own cache only")
        return _OwnCache(self.model.cfg, self.device, batch, dtype)

    def logits(self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Logits of every new token; both paths get the same explicit all-ones mask (see FACTS in the README)."""
        cache = None if store is None else _Cache(store, self.facts.layers)
        return self.model(tokens, return_type="logits", past_kv_cache=cache, **self._told(tokens, mask))

    def attention_led(self, read: KeysValuesRead) -> contextlib.AbstractContextManager[None]:
        """Where each block's attention has made them; some change them before a cache would keep them, and are not led.

        Raises:
            NotImplementedError: This one does.
        """
        config: Any = self.model.cfg
        attention: list[Any] = [block.attn for block in self.model.blocks]  # type: ignore[union-attr]
        if getattr(config, "clip_qkv", None) is not None or any(getattr(a, "k_norm", None) is not None for a in attention):
            raise NotImplementedError

        def led(layer: int, own: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
            queries, keys, values = own(*given)
            return queries, *_turned(read(layer, *_turned((keys, values))))

        return methods_led(attention, "calculate_qkv_matrices", led)

    def called(self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Any]:
        """Logits and TransformerLens' cache, which is made where none is given."""
        from transformer_lens import TransformerLensKeyValueCache

        if cache is None:
            config: Any = self.model.cfg
            cache = TransformerLensKeyValueCache.init_cache(config, self.device, len(tokens))
        return self.model(tokens, return_type="logits", past_kv_cache=cache, **self._told(tokens, mask)), cache

    def _told(self, tokens: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Its cache keeps the mask of what came before, and is given that of the new tokens."""
        return {
            "attention_mask": torch.ones_like(tokens) if mask is None else mask[:, -tokens.shape[1] :],
            "prepend_bos": False,
        }

    def tap(self, site: str, layer: int) -> Tap:
        """The HookPoint that carries a site."""
        block: Any = self.model.blocks[layer]  # type: ignore[index]
        if site in ROUTING_SITES:
            return routing_tap(getattr(block, "mlp", None), site, layer, self.facts.architecture)
        rotary = self.model.cfg.positional_embedding_type == "rotary"  # type: ignore[union-attr]
        if site == "cache_k" and rotary:
            return Tap(block.attn.hook_rot_k, head_major=True)
        if site in ("cache_k_pre", "cache_k", "cache_v"):
            raise UnsupportedError(f"site {site!r} has no hook in a HookedTransformer: it is read from the cache.")
        config: Any = self.model.cfg
        if site in ("resid_mid", *MLP_SITES) and config.attn_only:
            raise UnsupportedError(
                f"site {site!r} is not there in {self.facts.name}, which has attention and no MLP: record resid_pre, "
                "attn_out or resid_post instead."
            )
        if site == "resid_mid" and not hasattr(block, "hook_resid_mid"):
            raise UnsupportedError(
                f"{self.facts.name} runs attention and MLP in parallel, so there is no residual stream between them: "
                "record resid_pre or resid_post instead."
            )
        if site == "result":
            return Tap(block.attn, "heads", self.facts.query_heads, z=block.attn.hook_z)
        name = hook_name(site, layer)
        if LAYOUTS[site].group == "mlp" and name not in self.model.hook_dict:  # type: ignore[operator]
            raise UnsupportedError(
                f"site {site!r} is not there at layer {layer} of {self.facts.name}, whose MLP is made of experts: record mlp_out "
                "instead."
            )
        return Tap(self.model.get_submodule(name))

    def cast(self, dtype: torch.dtype) -> Adapter:
        """The same weights in another dtype; rotary tables are computed anew in that dtype."""
        model: Any = copy.deepcopy(self.model)
        model.to(dtype, print_details=False)
        for module in model.modules():
            if hasattr(module, "cfg"):
                module.cfg.dtype = dtype
        for block in model.blocks:
            attention: Any = block.attn
            if hasattr(attention, "rotary_sin"):
                sin, cos = attention.calculate_sin_cos_rotary(
                    attention.cfg.rotary_dim, attention.rotary_sin.shape[0], base=attention._rotary_base(), dtype=dtype
                )
                attention.rotary_sin, attention.rotary_cos = sin.to(self.device), cos.to(self.device)
        return HookedAdapter(model, self.facts.name, self.tokenizer)

    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """What the layer's entry of the user's own TransformerLensKeyValueCache holds after the block."""
        if cache is None or site == "cache_k":
            return None
        return _turned((cache.past_keys, cache.past_values))[site != "cache_k_pre"]
