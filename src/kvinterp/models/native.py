"""A plain transformers model with module hooks: the kernels that production runs, any architecture.

Scores and patterns exist as tensors only under eager attention. Under SDPA they never leave the kernel, which runs all the
same: they are derived beside it, from what it was given (:mod:`kvinterp.models.derived`). Under flash attention they are
refused, by an error that says so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import Adapter, KeysValuesRead, KVStore, ModelInfo
from kvinterp.models.caches import CacheKind, Dynamic
from kvinterp.models.derived import DERIVED
from kvinterp.models.hooks import Tap, heads_tap, hooks_suspended
from kvinterp.models.native_sites import INSIDE, Checked, NativeSites, check_sites
from kvinterp.models.transformers_api import interface_led
from kvinterp.models.transformers_cache import (
    OnTransformersCache,
    TransformersCache,
    is_attention_only,
    model_cache,
    returned,
    text_config,
)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of blocks of a transformers decoder.

    Raises:
        UnsupportedError: No list of as many blocks as the config says was found.
    """
    count = text_config(model).num_hidden_layers
    # A multimodal model has an encoder besides, which may have as many blocks.
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    places = (decoder, model) if isinstance(decoder, nn.Module) else (model,)
    found = [m for part in places for m in part.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of {count} blocks, as its config says: "
            "kvinterp needs a decoder of transformers blocks."
        )
    return found[0]


def transformers_facts(model: nn.Module, name: str | None, attention: str | None = None) -> ModelInfo:
    """The facts of a transformers model, read from its config."""
    config = text_config(model)
    heads = _widest(config, "num_attention_heads") or 0
    keys = _widest(config, "num_key_value_heads") or heads
    # Falcon's newer architecture reads neither field, and repeats its keys and values for every query head before it
    # caches them.
    repeats = getattr(config, "new_decoder_architecture", False)
    shared = getattr(config, "multi_query", False) is True
    return ModelInfo(
        name=name or getattr(config, "name_or_path", "") or type(model).__name__,
        architecture=type(model).__name__,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=heads if repeats else 1 if shared else keys,
        head_dim=_widest(config, "head_dim") or (config.hidden_size // heads if heads else 0),
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None) or 2**31,
        windows=layer_windows(config),
        cached_keys_rotated=True,
        attention=attention or getattr(config, "_attn_implementation", None) or "eager",
    )


def _widest(config: Any, name: str) -> int | None:
    """A number of the config; the largest where each layer has one of its own (Gemma 4's heads), or None."""
    # transformers raises where a config is asked for what its layers differ in.
    if name in getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_attributes", ()):
        found = [getattr(layer, name, None) for layer in config.per_layer_config]
        return max((value for value in found if value is not None), default=None)
    return getattr(config, name, None)


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer of a transformers config, in positions; None where attention is full."""
    # The cache transformers would make knows best which layers slide.
    layers = DynamicCache(config=config).layers
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
    plain_experts(twin, dtype)
    return twin


def plain_experts(model: Any, dtype: torch.dtype) -> None:
    """Runs experts one by one in float64, which torch's grouped product does not take: the same sums."""
    source = getattr(model, "original_model", model)
    if dtype == torch.float64 and hasattr(source, "set_experts_implementation"):
        # Models without experts have the method too.
        with contextlib.suppress(ValueError, AttributeError):
            source.set_experts_implementation("eager")


@torch.no_grad()
def drops_soft_cap(model: nn.Module) -> bool:
    """Whether attention has a cap on its scores that the function it runs leaves out, as some releases' SDPA does.

    Asked by running it: under a cap of almost 0 all scores are the same, and the logits others.
    """
    capped = [
        (m, name, cap)
        for m in model.modules()
        for name, cap in vars(m).items()
        if "softcap" in name and type(cap) in (int, float)
    ]
    if not capped:
        return False
    tokens = torch.arange(3, 11, device=model.device)[None] % text_config(model).vocab_size  # type: ignore[arg-type, call-overload]
    try:
        before = model(input_ids=tokens, use_cache=False).logits
        for module, name, cap in capped:
            setattr(module, name, cap * 1e-4)
        return torch.equal(before, model(input_ids=tokens, use_cache=False).logits)
    # A function that refuses the cap.
    except (ValueError, TypeError):
        return True
    finally:
        for module, name, cap in capped:
            setattr(module, name, cap)


def keeps_only_keys_and_values(model: nn.Module) -> bool:
    """Whether the cache transformers makes for this model has plain attention layers only, one a block."""
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None):
        return False  # Multi-head latent attention caches what keys and values are made from.
    cache = DynamicCache(config=config)
    return is_attention_only(cache) and len(cache.layers) in (0, config.num_hidden_layers)


class NativeAdapter(OnTransformersCache):
    """A transformers model as the user or production runs it; nothing of it is replaced."""

    kind, plain = "native", True
    _facts: ModelInfo

    def __init__(self, model: nn.Module, name: str | None = None, tokenizer: Any = None) -> None:
        super().__init__(model, transformers_facts(model, name), tokenizer)
        self._blocks = decoder_layers(model)
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        parallel = bool(getattr(text_config(model), "use_parallel_residual", False))
        self._sites = NativeSites(self._blocks, self.facts, parallel)
        plain_experts(model, self.dtype)
        self._checked: Checked | None = None
        self._continues: bool | None = None
        self._attention_only: bool | None = None

    @property
    def facts(self) -> ModelInfo:
        """The model's facts; the attention is what its config says now, which ``set_attn_implementation`` changes."""
        now = getattr(self.config, "_attn_implementation", None) or "eager"
        if now != self._facts.attention:
            self._facts = dataclasses.replace(self._facts, attention=now)
            self._copies, self._memory, self._checked, self._continues, self._attention_only = {}, None, None, None, None
            self._sites.facts = self._facts
        return self._facts

    @facts.setter
    def facts(self, facts: ModelInfo) -> None:
        self._facts = facts

    @property
    def attention_only(self) -> bool:
        """Whether every layer keeps plain keys and values."""
        if self._attention_only is None:
            kept = self.memory.name is not None and not self.memory.own_form
            self._attention_only = kept and keeps_only_keys_and_values(self.model)
        return self._attention_only

    @property
    def takes_mask(self) -> bool:
        """Whether the model's own forward takes a mask, and all its layers attend."""
        return self.attention_only and "attention_mask" in self.takes

    @property
    def takes_static(self) -> bool:
        """Whether the model says that it runs on a StaticCache."""
        return bool(getattr(self.model, "_can_compile_fullgraph", False))

    def logits(self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Logits of every new token, through the model's own forward."""
        told = {"attention_mask": mask, "position_ids": positions}
        more: dict[str, Any] = {name: given for name, given in told.items() if given is not None and name in self.takes}
        if store is None:
            return self.model(input_ids=tokens, use_cache=False, **more).logits
        if store.model_cache is not None and tokens.shape[1] > 1 and not self.attention_only:
            self._check_continues()
        if self.memory.name is None or self.memory.own_form:
            return self._with_own_cache(tokens, store)
        more[self.memory.name] = model_cache(store, lambda: self.config, self._facts.architecture)
        return self.model(input_ids=tokens, use_cache=True, **more).logits

    @contextlib.contextmanager
    def attention_led(self, read: KeysValuesRead) -> Iterator[None]:
        """At transformers' interface of attention functions, which is handed them after RoPE."""
        layers = {module: layer for layer, block in enumerate(self._blocks) for module in block.modules()}
        with interface_led(layers, read):
            yield

    def called(self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Any]:
        """Logits, and the model's own cache under whatever name it has."""
        given: dict[str, Any] = {"attention_mask": mask, self.cache_name: cache}
        if "position_ids" in self.takes:
            given["position_ids"] = positions
        told = {name: value for name, value in given.items() if value is not None}
        out = self.model(input_ids=tokens, use_cache=True, **told)
        return out.logits, returned(out, self.takes)[1]

    def own_cache(self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype) -> TransformersCache | None:
        """A transformers cache; for the default kind of the class that the model itself makes."""
        if self.memory.name is None or self.memory.own_form:
            if isinstance(kind, Dynamic):
                return None
            raise UnsupportedError(
                f"cache={kind} cannot be used: {self.facts.architecture} keeps its memory in a form of its own; leave it out."
            )
        kind.check(self.device)
        return TransformersCache.of(kind, self.config, capacity, self._plain_cache)

    def _plain_cache(self) -> Cache:
        """A new cache of the class that the model makes by itself."""
        made = self.memory.made
        takes_config = "config" in inspect.signature(made).parameters
        return made(**({"config": self.config} if takes_config else {}))

    @torch.no_grad()
    def _check_continues(self) -> None:
        """Refuses to feed several tokens on a state where the model would begin anew, as transformers' Mamba does."""
        if self._continues is None:
            tokens = torch.arange(3, 11, device=self.device)[None] % self.facts.vocabulary
            first, rest = tokens[:, :4], tokens[:, 4:]
            with self.own_state([]), hooks_suspended(self.model):
                whole = self.model(input_ids=tokens, use_cache=False).logits[:, 4:].double()
                together = self._fed(first, [rest])
                singly = self._fed(first, rest.split(1, 1))
            # One by one is how every model decodes, so that its difference is rounding's.
            rounding = (singly - whole).abs().max() + 4 * torch.finfo(self.dtype).eps * whole.abs().max()
            self._continues = not bool((together - whole).abs().max() > 8 * rounding)
        if not self._continues:
            raise UnsupportedError(
                f"{self.facts.architecture} begins its state anew when it is fed several tokens with a cache, so a prompt "
                "cannot be fed in chunks: leave the chunk out of the path."
            )

    def _fed(self, first: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Logits of pieces fed one after the other, each with the cache that the piece before it left."""
        output, logits = self.model(input_ids=first, use_cache=True), []
        for piece in pieces:
            output = self.model(input_ids=piece, use_cache=True, **self._cache_of(output))
            logits.append(output.logits.double())
        return torch.cat(logits, 1)

    def _cache_of(self, output: Any) -> dict[str, Any]:
        """The cache that a forward returned, under the name by which the next one takes it."""
        held = returned(output, self.takes)[1]
        return {} if not self.cache_name or held is None else {self.cache_name: held}

    def _with_own_cache(self, tokens: Tensor, store: KVStore) -> Tensor:
        """Runs a model that keeps no keys and values (Mamba, RWKV) on the cache that it makes by itself."""
        output = self.model(input_ids=tokens, use_cache=True, **(store.model_cache or {}))
        store.model_cache = self._cache_of(output)
        if not store.model_cache:
            raise UnsupportedError(
                f"{self.facts.architecture} takes and returns no cache that it uses, so it has no cached path: run it along "
                "recompute paths only, without a chunk."
            )
        return output.logits

    def tap(self, site: str, layer: int) -> Tap:
        """The module that carries a site in this architecture, once it was seen to carry what the site means."""
        if site == "embed":
            return Tap(self.model.get_input_embeddings())  # type: ignore[operator]
        if site == "result":
            return heads_tap(self.tap("z", layer), self.facts.architecture)
        found = self._sites.find(site, layer)
        if site not in INSIDE:
            return found
        if self._checked is None:
            # What is seen once is kept: a user's autocast must not round what it is judged by.
            with self.own_state([]), torch.autocast(self.device.type, enabled=False):
                self._checked = check_sites(self, self._sites)
        why = self._checked.refused.get((site, layer))
        if why is not None:
            raise self._sites.lacks(site, why, tuple(s for s, at in self._checked.refused if at == layer))
        return dataclasses.replace(found, head_major=(site, layer) in self._checked.head_major)

    def derives(self, site: str) -> bool:
        """Whether a site is derived beside SDPA."""
        return site in DERIVED and self.facts.attention == "sdpa"

    def cast(self, dtype: torch.dtype) -> Adapter:
        """The same weights in another dtype."""
        twin = NativeAdapter(cast_transformers(self.model, dtype), self.facts.name, self.tokenizer)
        twin._checked, twin._memory = self._checked, self.memory
        return twin

    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """What the transformers cache of the user's own forward holds after the block."""
        if site == "cache_k_pre":
            raise InputError(
                "site 'cache_k_pre' cannot be read from a transformers cache, which holds keys after RoPE: "
                "record 'k', the new keys before RoPE, or use run() or compare()."
            )
        return super().read_cache(site, layer, cache)
