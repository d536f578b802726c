"""A plain transformers model with module hooks: the kernels that production runs, any architecture.

Scores and patterns exist as tensors only under eager attention; under SDPA or flash they never leave the kernel, and
asking for them is an error that says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import Adapter, CacheRead, Facts, KVStore, Tap
from kvinterp.models.transformers_cache import (
    cached_positions,
    cached_tensor,
    dress,
    intercept,
    is_attention_only,
    unwrapped_cache,
)

__all__ = [
    "NativeAdapter",
    "cast_transformers",
    "decoder_layers",
    "keeps_only_keys_and_values",
    "text_config",
    "transformers_facts",
]

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
QUERY, KEY, VALUE = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj")
# The norm whose input is the residual stream between attention and MLP, in the order they are looked for.
BEFORE_MLP = ("pre_feedforward_layernorm", "ln_2", "post_attention_layernorm")


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), nn.Module)), None)


def text_config(model: nn.Module) -> Any:
    """The config of the decoder, inside a multimodal config too."""
    config: Any = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of blocks of a transformers decoder.

    Raises:
        UnsupportedError: No list of as many blocks as the config says was found.
    """
    count = text_config(model).num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of {count} blocks, as its config says: "
            "kvinterp needs a decoder of transformers blocks."
        )
    return found[0]


def transformers_facts(model: nn.Module, name: str | None, attention: str | None = None) -> Facts:
    """The facts of a transformers model, read from its config."""
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None) or 0
    return Facts(
        name=name or getattr(config, "name_or_path", "") or type(model).__name__,
        architecture=type(model).__name__,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0),
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None) or 2**31,
        windows=_windows(config),
        cached_keys_rotated=True,
        attention=attention or getattr(config, "_attn_implementation", None) or "eager",
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    # The cache transformers would make knows best which layers slide.
    layers = unwrapped_cache(config).layers
    found = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]
    return tuple(found[: config.num_hidden_layers]) + (None,) * (config.num_hidden_layers - len(found))


def cast_transformers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters and saved buffers are in ``dtype``.

    Buffers that a checkpoint does not hold (RoPE frequencies) keep the dtype that loading gave them, as
    ``from_pretrained(dtype=...)`` keeps them; ``model.to(float16)`` would round them.
    """
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in twin.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Not by the names in state_dict(), which a bridge writes its own way.
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                setattr(module, name, buffer.to(dtype))
    for config in {id(c): c for m in twin.modules() if (c := getattr(m, "config", None)) is not None}.values():
        if hasattr(config, "dtype"):
            config.dtype = dtype
    return twin


def keeps_only_keys_and_values(model: nn.Module) -> bool:
    """Whether the cache transformers makes for this model has plain attention layers only, one a block."""
    config = text_config(model)
    cache = unwrapped_cache(config)
    return is_attention_only(cache) and len(cache.layers) in (0, config.num_hidden_layers)


class NativeAdapter(Adapter):
    """A transformers model as the user or production runs it; nothing of it is replaced."""

    kind = "native"

    def __init__(self, model: nn.Module, name: str | None = None, tokenizer: Any = None) -> None:
        super().__init__(model, transformers_facts(model, name), tokenizer)
        self._blocks = decoder_layers(model)
        self._attention_only = keeps_only_keys_and_values(model)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return self._blocks

    @property
    def attention_only(self) -> bool:
        """Whether every layer keeps plain keys and values."""
        return self._attention_only

    def forward(self, tokens: Tensor, store: KVStore | None = None) -> Tensor:
        """Logits of every new token, through the model's own forward."""
        return self.model(input_ids=tokens, past_key_values=self._cache(store), use_cache=store is not None).logits

    def _cache(self, store: KVStore | None) -> Any:
        if store is None:
            return None
        if store.dressed is None:
            # One cache for the store's whole life: layers that are not attention keep their state in it.
            store.dressed = dress(text_config(self.model), store)
        return store.dressed

    def tap(self, site: str, layer: int) -> Tap:
        """The module that carries a site in this architecture."""
        if site.startswith("cache_"):
            raise UnsupportedError(f"site {site!r} has no module in a transformers model: it is read from the cache.")
        block = self.blocks[layer]
        if site in ("resid_pre", "resid_post"):
            return Tap(block, "input" if site == "resid_pre" else "output")
        attention, mlp = _child(block, ATTENTION), _child(block, MLP)
        if attention is None:
            raise self._lacks(site, f"layer {layer} ({type(block).__name__}) has no attention")
        if site in ("attn_scores", "pattern"):
            if self.facts.attention != "eager":
                raise UnsupportedError(
                    f"site {site!r} does not exist under attention {self.facts.attention!r}, where scores and patterns "
                    "never leave the kernel: load the model with attention='eager' (attn_implementation='eager' in "
                    "transformers), or use kind='hooked' or 'bridge'."
                )
            return Tap(attention, "softmax")
        if site == "attn_out":
            after = getattr(block, "post_attention_layernorm", None) if self._post_norms(block) else None
            return Tap(after if after is not None else attention)
        if site == "mlp_out":
            after = getattr(block, "post_feedforward_layernorm", None) if self._post_norms(block) else None
            if after is None and mlp is None:
                raise self._lacks(site, f"{type(block).__name__} has no module named {' or '.join(MLP)}")
            return Tap(after if after is not None else mlp)  # type: ignore[arg-type]
        if site == "resid_mid":
            return self._resid_mid(block)
        return self._projection(site, attention)

    @staticmethod
    def _post_norms(block: nn.Module) -> bool:
        return hasattr(block, "post_feedforward_layernorm")

    def _resid_mid(self, block: nn.Module) -> Tap:
        parallel = getattr(text_config(self.model), "use_parallel_residual", False) or not _child(block, BEFORE_MLP)
        if parallel:
            raise self._lacks("resid_mid", f"{type(block).__name__} has no residual stream between attention and MLP")
        if self._post_norms(block) and not hasattr(block, "pre_feedforward_layernorm"):
            raise self._lacks("resid_mid", f"{type(block).__name__} normalises after the MLP only, so no module sees it")
        return Tap(_child(block, BEFORE_MLP), "input")  # type: ignore[arg-type]

    def _projection(self, site: str, attention: nn.Module) -> Tap:
        facts = self.facts
        if site == "z":
            output = _child(attention, OUTPUT)
            if output is None:
                raise self._lacks(site, f"{type(attention).__name__} has no module named {' or '.join(OUTPUT)}")
            return Tap(output, "input", facts.query_heads)
        heads = facts.query_heads if site == "q" else facts.kv_heads
        single = _child(attention, {"q": QUERY, "k": KEY, "v": VALUE}[site])
        if single is not None:
            return Tap(single, heads=heads)
        fused = _child(attention, ("qkv_proj", "c_attn"))
        if fused is None:
            raise self._lacks(site, f"{type(attention).__name__} has no separate projection for it")
        query, rest = facts.query_heads * facts.head_dim, facts.kv_heads * facts.head_dim
        start = {"q": 0, "k": query, "v": query + rest}[site]
        return Tap(fused, heads=heads, span=(start, start + (query if site == "q" else rest)))

    def _lacks(self, site: str, why: str) -> UnsupportedError:
        have = [s for s in ("resid_pre", "resid_post", "attn_out", "mlp_out") if s != site]
        return UnsupportedError(
            f"site {site!r} is not there in {self.facts.architecture}: {why}. Record {', '.join(have)} instead, "
            "or use kind='hooked' or 'bridge' if TransformerLens has this architecture."
        )

    def cast(self, dtype: torch.dtype) -> Adapter:
        """The same weights in another dtype."""
        return NativeAdapter(cast_transformers(self.model, dtype), self.facts.name, self.tokenizer)

    def cached_length(self, arguments: Mapping[str, Any]) -> int:
        """Positions in the user's transformers cache."""
        return cached_positions(arguments.get("past_key_values"))

    def intercept_cache(self, arguments: Mapping[str, Any], on_read: CacheRead) -> list[Callable[[], None]]:
        """Wraps ``update`` of the user's own transformers cache."""
        return intercept(arguments.get("past_key_values"), on_read)

    def read_cache(self, site: str, layer: int, arguments: dict[str, Any], output: Any) -> Tensor | None:
        """What the transformers cache of the user's own forward holds after it."""
        if site == "cache_k_pre":
            raise InputError(
                "site 'cache_k_pre' cannot be read from a transformers cache, which holds keys after RoPE: "
                "record 'k', the new keys before RoPE, or use run() or compare()."
            )
        cache = getattr(output, "past_key_values", None)
        return cached_tensor(cache if cache is not None else arguments.get("past_key_values"), site, layer)
