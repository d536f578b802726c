"""TransformerLens' HookedTransformer: the interp community's model, where every activation has a
hook.

Its cache holds keys before RoPE and rotates the whole history at every step, so ``cache_k_pre`` is
what it stores and ``cache_k`` is what ``hook_rot_k`` shows. Exists up to TransformerLens 3; version
4 has the bridge only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import Adapter, CacheRead, KeysValuesRead, KVStore, ModelInfo
from kvinterp.models.cache_kinds import CacheKind, check_plain
from kvinterp.models.caches import OwnCache, add_reader
from kvinterp.models.hook_names import hook_name
from kvinterp.models.hooks import wrapping_methods
from kvinterp.models.native import copied
from kvinterp.models.sites import LAYOUTS, MLP_SITES
from kvinterp.models.taps import Tap, router_tap
from kvinterp.models.transformer_lens_api import generated_by


def _transpose(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Swaps heads and positions of keys and values: TransformerLens keeps
    ``[batch, position, kv_head, head_dim]``.
    """
    keys, values = (
        rearrange(tensor, "batch one other dim -> batch other one dim") for tensor in pair
    )
    return keys, values


class _Entry:
    """One layer of the store as a cache entry of TransformerLens,
    ``[batch, position, kv_head, head_dim]``.
    """

    frozen = False

    def __init__(self, store: KVStore, layer: int) -> None:
        self.store, self.layer = store, layer

    @property
    def past_keys(self) -> Tensor:
        return _transpose(self.store.keys_values(self.layer))[0]

    @property
    def past_values(self) -> Tensor:
        return _transpose(self.store.keys_values(self.layer))[1]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _transpose(self.store.update(self.layer, *_transpose((keys, values))))


class _Cache:
    """The store as a TransformerLensKeyValueCache."""

    frozen = False

    def __init__(self, store: KVStore, layers: int) -> None:
        self.entries = [_Entry(store, layer) for layer in range(layers)]

    def __getitem__(self, layer: int) -> _Entry:
        return self.entries[layer]

    def append_attention_mask(self, mask: Tensor) -> Tensor:
        return mask.new_ones(mask.shape[0], self.entries[0].store.length(0) + mask.shape[1])


class _OwnCache(OwnCache):
    """TransformerLens' own cache. The model receives entries that append to the store, which
    appends here.
    """

    name = "TransformerLensKeyValueCache"

    def __init__(self, config: Any, device: torch.device, batch: int, dtype: torch.dtype) -> None:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        self.model_cache = TransformerLensKeyValueCache.init_cache(config, device, batch)
        for entry in self.model_cache.entries:
            # Entries begin with a tensor of no positions, whose dtype takes part in the promotion
            # of what is appended.
            entry.past_keys, entry.past_values = (
                entry.past_keys.to(dtype),
                entry.past_values.to(dtype),
            )

    def append(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Runs TransformerLens' own append."""
        return _transpose(self.model_cache[layer].append(*_transpose((keys, values))))

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """The entry's own tensors."""
        return _transpose((self.model_cache[layer].past_keys, self.model_cache[layer].past_values))

    def let_go(self, kind: str) -> None:
        """Raises UnsupportedError: keys are kept before RoPE, and rotated at every step by the
        number of their row.
        """
        raise UnsupportedError(
            f"{kind} lets go of rows, and a HookedTransformer turns cached keys by the number of their row, which would then be "
            "another: load the model with kind='native' or kind='bridge'."
        )


class HookedAdapter(Adapter):
    """A HookedTransformer as it is, with its own kernels and its own cache layout."""

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
                config.window_size if local and local[layer] == "local" else None
                for layer in range(config.n_layers)
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
        """Whether training mode changes nothing: there is no dropout, but two options for long
        texts ask for the mode.
        """
        config: Any = self.model.cfg
        return not (
            getattr(config, "use_logn_attn", False)
            or getattr(config, "use_dynamic_ntk_rope", False)
        )

    def block_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Finds the layer's entry of the user's TransformerLensKeyValueCache."""
        return kwargs.get("past_kv_cache_entry")

    def call_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Finds the first layer's entry."""
        cache = kwargs.get("past_kv_cache")
        return None if cache is None else cache[0]

    def cached_length(self, cache: Any) -> int:
        """Counts the positions in the layer's entry."""
        return 0 if cache is None else cache.past_keys.shape[1]

    def intercept_cache(self, layer: int, cache: Any, on_read: CacheRead) -> Callable[[], None]:
        """Wraps ``append`` of the user's own cache entry."""
        if cache is None:
            raise InputError(
                f"a patch of the cache needs a forward with a cache: call the model with {self.cache_name}=..."
            )

        def reader(read: tuple[Tensor, Tensor], *_: Any) -> tuple[Tensor, Tensor] | None:
            new = on_read(layer, 0, *_transpose(read))
            return None if new is None else _transpose(new)

        return add_reader(cache, "append", reader)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, in order."""
        return self.model.blocks  # type: ignore[return-value]

    def generate(self, tokens: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Runs TransformerLens's own."""
        return generated_by(self.model, tokens, mask, options)

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed  # type: ignore[return-value]

    def own_cache(
        self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype
    ) -> _OwnCache:
        """Makes a TransformerLensKeyValueCache."""
        check_plain(kind, "a HookedTransformer, which has TransformerLens' own cache only")
        return _OwnCache(self.model.cfg, self.device, batch, dtype)

    def logits(
        self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Computes the logits of every new token, with an explicit mask of ones on both paths."""
        return self._run(tokens, None if store is None else _Cache(store, self.facts.layers), mask)

    def replacing_keys_values(
        self, read: KeysValuesRead
    ) -> contextlib.AbstractContextManager[None]:
        """Replaces them where the attention of each block has projected them.

        Raises:
            NotImplementedError: This attention changes them further before a cache would keep them.
        """
        config: Any = self.model.cfg
        attention: list[Any] = [block.attn for block in self.model.blocks]  # type: ignore[union-attr]
        if getattr(config, "clip_qkv", None) is not None or any(
            getattr(a, "k_norm", None) is not None for a in attention
        ):
            raise NotImplementedError

        def wrapper(layer: int, project: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            queries, keys, values = project(*args)
            return queries, *_transpose(read(layer, *_transpose((keys, values))))

        return wrapping_methods(attention, "calculate_qkv_matrices", wrapper)

    def call_with_cache(
        self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Runs the model with TransformerLens' cache, a new one where none is given."""
        from transformer_lens import TransformerLensKeyValueCache

        if cache is None:
            config: Any = self.model.cfg
            cache = TransformerLensKeyValueCache.init_cache(config, self.device, len(tokens))
        return self._run(tokens, cache, mask), cache

    def _run(self, tokens: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        # The cache keeps the mask of earlier tokens, so the call gets the mask of the new ones.
        new_mask = torch.ones_like(tokens) if mask is None else mask[:, -tokens.shape[1] :]
        return self.model(
            tokens,
            return_type="logits",
            past_kv_cache=cache,
            attention_mask=new_mask,
            prepend_bos=False,
        )

    def tap(self, site: str, layer: int) -> Tap:
        """Finds the HookPoint of a site."""
        block: Any = self.model.blocks[layer]  # type: ignore[index]
        if site == "router":
            return router_tap(getattr(block, "mlp", None), layer, self.facts.architecture)
        rotary = self.model.cfg.positional_embedding_type == "rotary"  # type: ignore[union-attr]
        if site == "cache_k" and rotary:
            return Tap(block.attn.hook_rot_k, head_major=True)
        if site in ("cache_k_pre", "cache_k", "cache_v"):
            raise UnsupportedError(
                f"site {site!r} has no hook in a HookedTransformer: it is read from the cache."
            )
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
        """Makes a copy with the same weights in another dtype; rotary tables are computed anew in
        that dtype.
        """
        model = copied(self.model)
        model.to(dtype, print_details=False)
        for module in model.modules():
            if hasattr(module, "cfg"):
                module.cfg.dtype = dtype
        for block in model.blocks:
            attention: Any = block.attn
            if hasattr(attention, "rotary_sin"):
                sin, cos = attention.calculate_sin_cos_rotary(
                    attention.cfg.rotary_dim,
                    attention.rotary_sin.shape[0],
                    base=attention._rotary_base(),
                    dtype=dtype,
                )
                attention.rotary_sin, attention.rotary_cos = (
                    sin.to(self.device),
                    cos.to(self.device),
                )
        return HookedAdapter(model, self.facts.name, self.tokenizer)

    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """Reads a site from the layer's entry of the user's own TransformerLensKeyValueCache, after
        the block ran.
        """
        if cache is None or site == "cache_k":
            return None
        return _transpose((cache.past_keys, cache.past_values))[site != "cache_k_pre"]
