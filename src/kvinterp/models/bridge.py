"""TransformerLens' TransformerBridge: TransformerLens' hooks over a transformers model.

The bridge computes attention from its parts again, so its bits are not production's (those of the
native kind are). It has a hook for everything and is the only kind in TransformerLens 4. Its cache
is transformers' own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvinterp.errors import UnsupportedError
from kvinterp.models.adapter import Adapter, KeysValuesRead, KVStore
from kvinterp.models.cache_kinds import CacheKind, check_plain
from kvinterp.models.door import importing_transformer_lens
from kvinterp.models.hook_names import hook_name
from kvinterp.models.hooks import wrapping_methods
from kvinterp.models.native import (
    cast_transformers,
    decoder_layers,
    keeps_only_keys_and_values,
    plain_experts,
    transformers_facts,
)
from kvinterp.models.sites import MLP_SITES
from kvinterp.models.taps import Tap, heads_tap, router_tap
from kvinterp.models.transformer_lens_api import generated_by
from kvinterp.models.transformers_cache import OnTransformersCache, TransformersCache, model_cache


def build_bridge(model: nn.Module, name: str) -> nn.Module:
    """Wraps a transformers model, which it changes in place, in a TransformerBridge with
    unprocessed weights.

    Raises:
        UnsupportedError: TransformerLens has no bridge for this architecture.
    """
    with importing_transformer_lens():
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    parameter = next(model.parameters())
    try:
        bridge = build_bridge_from_module(
            model,
            type(model).__name__,
            hf_config=model.config,
            dtype=parameter.dtype,
            device=parameter.device,
            model_name=name,
        )
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"TransformerLens has no bridge for {type(model).__name__} ({error}): use kind='native'."
        ) from error
    rename_cache_arguments(bridge.eval())
    return bridge


@torch.no_grad()
def rename_cache_arguments(bridge: nn.Module) -> None:
    """Makes a bridge's attention receive the cache under the name that it looks for, where
    transformers uses another name.

    One forward shows which layers need this: their attention leaves the cache as it was. It changes
    what users of the bridge run, so this is for bridges that are built here.
    """
    adapter = BridgeAdapter(bridge)
    cache = adapter.new_cache()
    try:
        tokens = torch.arange(3, 5, device=adapter.device)[None] % adapter.facts.vocabulary
        adapter.call_with_cache(tokens, cache, None, None)
    # The bridge will raise the same error again where it runs in earnest.
    except Exception:
        return
    for block, layer in zip(bridge.blocks, cache.layers, strict=False):  # type: ignore[arg-type]
        attention = getattr(block, "attn", None)
        if (
            attention is not None
            and isinstance(layer, CacheLayerMixin)
            and not layer.get_seq_length()
        ):
            # A partial is copied with the bridge, a closure is not. Into __dict__: a bridge's
            # setattr reaches the module inside.
            vars(attention)["forward"] = functools.partial(_forward_with_renamed_cache, attention)


def _forward_with_renamed_cache(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    renamed = {
        "past_key_values" if isinstance(value, Cache) else name: value
        for name, value in kwargs.items()
    }
    return type(attention).forward(attention, *args, **renamed)


class BridgeAdapter(OnTransformersCache):
    """A TransformerBridge, run by its own forward."""

    kind = "bridge"
    takes = frozenset({"attention_mask"})

    def __init__(self, model: nn.Module, name: str | None = None, tokenizer: Any = None) -> None:
        source: Any = model.original_model
        facts = transformers_facts(source, name, attention="bridge")
        super().__init__(
            model, facts, tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
        )
        self._blocks = decoder_layers(source)
        plain_experts(model, self.dtype)
        self.hooks: dict[str, nn.Module] = dict(model.hook_dict)  # type: ignore[arg-type]

    @property
    def source(self) -> nn.Module:
        """The transformers model inside."""
        return self.model.original_model  # type: ignore[return-value]

    @property
    def attention_only(self) -> bool:
        """Whether every layer keeps plain keys and values."""
        return keeps_only_keys_and_values(self.source)

    def logits(
        self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Computes the logits of every new token by the bridge."""
        if store is None:
            masks = {} if mask is None else {"attention_mask": mask}
            return self.model(tokens, return_type="logits", use_cache=False, **masks)
        cache = model_cache(store, self.new_cache, f"the bridge for {self.facts.architecture}")
        return self.call_with_cache(tokens, cache, mask, positions)[0]

    def replacing_keys_values(
        self, read: KeysValuesRead
    ) -> contextlib.AbstractContextManager[None]:
        """Replaces them where the attention of each block would pass them to a cache."""

        def wrapper(
            layer: int, update: Any, keys: Tensor, values: Tensor, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            return read(layer, *update(keys, values, **kwargs))

        attention = [block.attn for block in self.model.blocks]  # type: ignore[union-attr]
        return wrapping_methods(attention, "_update_kv_cache", wrapper)

    def call_with_cache(
        self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Runs the bridge with a DynamicCache, a new one where none is given."""
        cache = self.new_cache() if cache is None else cache
        options = {"attention_mask": mask} if mask is not None else {}
        if self.cache_name:
            options[self.cache_name] = cache
        return self.model(tokens, return_type="logits", use_cache=True, **options), cache

    def generate(self, tokens: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Runs the bridge's own."""
        return generated_by(self.model, tokens, mask, options)

    def own_cache(
        self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype
    ) -> TransformersCache:
        """Makes the DynamicCache that a bridge's users make."""
        check_plain(kind, "a bridge, which rebuilds attention and its mask for a cache that grows")
        return TransformersCache(kind.make(self.config, capacity))

    def tap(self, site: str, layer: int) -> Tap:
        """Finds the HookPoint of a site."""
        if site.startswith("cache_"):
            raise UnsupportedError(
                f"site {site!r} has no hook in a bridge: it is read from the cache."
            )
        block: Any = self.model.blocks[layer]  # type: ignore[index]
        if site == "router":
            return router_tap(getattr(block, "mlp", None), layer, self.facts.architecture)
        if site == "result":
            z = self.tap("z", layer)
            output = getattr(getattr(block.attn, "o", None), "original_component", None)
            return heads_tap(Tap(output, heads=z.heads), self.facts.architecture)  # type: ignore[arg-type]
        # A bridge over experts has a hook of the neurons' name elsewhere.
        name = f"blocks.{layer}.mlp.out.hook_in" if site == "post" else hook_name(site, layer)
        if site in ("attn_out", "mlp_out") and hasattr(block, "residual_contribution_scale"):
            raise UnsupportedError(
                f"site {site!r} is not there: {self.facts.architecture} scales what it adds to the residual stream, and the "
                "bridge shows that to hooks of TransformerLens' own only. Record resid_pre or resid_post instead."
            )
        if site in ("resid_mid", *MLP_SITES) and getattr(self.config, "model_type", "") == "opt":
            raise UnsupportedError(
                f"site {site!r} is not there: {self.facts.architecture} runs its MLP on one row a token, without a batch, and "
                "the bridge shows those rows. Record resid_pre, attn_out or resid_post instead."
            )
        normed = f"blocks.{layer}.attn.hook_{site}_normed"
        if (
            site in ("q", "k")
            and f"blocks.{layer}.attn.{site}_norm.hook_out" in self.hooks
            and normed in self.hooks
        ):
            # TransformerLens' hook_q and hook_k come before the norm, so their tensors are not what
            # RoPE rotates.
            count = self.facts.query_heads if site == "q" else self.facts.kv_heads
            head_major = getattr(block.attn, "_qk_norm_phase", "") == "post_reshape"
            return Tap(self.hooks[normed], heads=count, head_major=head_major)
        if name not in self.hooks:
            raise UnsupportedError(
                f"site {site!r} is not there: the bridge for {self.facts.architecture} has no hook {name}. "
                "Record resid_pre or resid_post instead, or use kind='native'."
            )
        heads = (
            self.facts.query_heads
            if site in ("q", "z")
            else self.facts.kv_heads
            if site in ("k", "v")
            else None
        )
        return Tap(self.hooks[name], heads=heads)

    def cast(self, dtype: torch.dtype) -> Adapter:
        """Makes a copy with the same weights in another dtype."""
        model: Any = cast_transformers(self.model, dtype)
        model.cfg.dtype = dtype
        return BridgeAdapter(model, self.facts.name, self.tokenizer)
