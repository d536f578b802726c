"""A plain transformers model with module hooks: the kernels that production runs, any architecture.

Scores and patterns exist as tensors only under eager attention. Under SDPA they never leave the
kernel: they are derived from the kernel's arguments, and the kernel runs all the same
(:mod:`kvinterp.models.derived`). Under flash attention an error says that they cannot be had.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from kvinterp.errors import InputError, UnsupportedError, out_of_memory, reason
from kvinterp.models.adapter import Adapter, KeysValuesRead, KVStore, ModelInfo
from kvinterp.models.cache_kinds import CacheKind, Dynamic
from kvinterp.models.derived import DERIVED
from kvinterp.models.hooks import hooks_suspended
from kvinterp.models.native_sites import INSIDE, Checked, NativeSites, check_sites
from kvinterp.models.taps import Tap, heads_tap
from kvinterp.models.transformers_api import wrapping_attention
from kvinterp.models.transformers_cache import (
    OnTransformersCache,
    TransformersCache,
    is_attention_only,
    model_cache,
    returned_cache,
    text_config,
)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Finds the list of blocks of a transformers decoder; of one that runs its blocks several
    times, each block once.

    Raises:
        UnsupportedError: No list has as many blocks as the config says, and none has fewer.
    """
    count = text_config(model).num_hidden_layers
    # A multimodal model also has an encoder, which may have as many blocks.
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    parts = (decoder, model) if isinstance(decoder, nn.Module) else (model,)
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    # A config of a looped decoder counts runs of a block, each of which has a slot of the cache.
    if looped := _stacks(parts[0], count):
        return looped
    raise UnsupportedError(
        f"{type(model).__name__} has no list of {count} blocks, as its config says: "
        "kvinterp needs a decoder of transformers blocks."
    )


def _stacks(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    """The blocks of all stacks of a decoder, in order: of lists that stand in no other one, and
    hold what the longest holds.
    """
    lists = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    outer = [
        module
        for name, module in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists)
    ]
    longest = max(outer, key=len, default=nn.ModuleList())
    blocks = [block for stack in outer if type(stack[0]) is type(longest[0]) for block in stack]
    return nn.ModuleList(blocks) if 0 < len(blocks) < count else None


def transformers_facts(
    model: nn.Module, name: str | None, attention: str | None = None
) -> ModelInfo:
    """Reads the facts of a transformers model from its config."""
    config, layers = text_config(model), len(decoder_layers(model))
    heads = _widest(config, "num_attention_heads") or 0
    keys = _widest(config, "num_key_value_heads") or heads
    # Falcon's newer architecture reads neither field, and caches keys and values repeated for every
    # query head.
    repeats = getattr(config, "new_decoder_architecture", False)
    shared = getattr(config, "multi_query", False) is True
    return ModelInfo(
        name=name or getattr(config, "name_or_path", "") or type(model).__name__,
        architecture=type(model).__name__,
        layers=layers,
        query_heads=heads,
        kv_heads=heads if repeats else 1 if shared else keys,
        head_dim=_widest(config, "head_dim") or (config.hidden_size // heads if heads else 0),
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None) or 2**31,
        windows=layer_windows(config)[:layers],
        cached_keys_rotated=True,
        attention=attention or getattr(config, "_attn_implementation", None) or "eager",
    )


def _widest(config: Any, name: str) -> int | None:
    """A number of the config, or None; where each layer has its own number (Gemma 4's heads), the
    largest.
    """
    # transformers raises for an attribute in which the layers differ.
    if name in getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_attributes", ()):
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
        return max((value for value in values if value is not None), default=None)
    return getattr(config, name, None)


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer of a transformers config, in positions; None where attention
    is full.
    """
    # The cache that transformers makes for the config knows best which layers slide.
    layers = DynamicCache(config=config).layers
    windows = [
        layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        for layer in layers
    ]
    return tuple(windows[: config.num_hidden_layers]) + (None,) * (
        config.num_hidden_layers - len(windows)
    )


def copied(model: nn.Module) -> Any:
    """Copies a model, for what changes it.

    Raises:
        UnsupportedError: It holds something that cannot be copied: a lock, an open file, a tensor
            with a history of gradients.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UnsupportedError(
            f"model {type(model).__name__} cannot be copied ({reason(error)}), and this runs on a copy, as every other dtype "
            "does: take what cannot be copied off the model meanwhile."
        ) from error


def cast_transformers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Makes a copy whose parameters and saved buffers are in ``dtype``.

    Buffers that no checkpoint holds (RoPE frequencies) keep the dtype that loading gave them, as
    with ``from_pretrained(dtype=...)``; ``model.to(float16)`` would round them.
    """
    cast = copied(model)
    for parameter in cast.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in cast.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # state_dict() would not do: a bridge names its entries in its own way.
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                setattr(module, name, buffer.to(dtype))
    for config in {
        id(c): c for m in cast.modules() if (c := vars(m).get("config")) is not None
    }.values():
        if hasattr(config, "dtype"):
            config.dtype = dtype
    plain_experts(cast, dtype)
    return cast


def plain_experts(model: Any, dtype: torch.dtype) -> None:
    """Makes a float64 model run its experts one by one, with the same sums: torch's grouped product
    takes no float64.
    """
    source = getattr(model, "original_model", model)
    if dtype == torch.float64 and hasattr(source, "set_experts_implementation"):
        # Models without experts have the method too.
        with contextlib.suppress(ValueError, AttributeError):
            source.set_experts_implementation("eager")


@torch.no_grad()
def drops_soft_cap(model: nn.Module) -> bool:
    """Whether the model has a soft cap on attention scores that its attention function ignores, as
    SDPA of some releases does.

    The model is run once with its own cap and once with a cap of almost 0, under which all scores
    are equal. Where the logits stay the same, the cap is ignored.
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
    # An attention function that refuses the cap.
    except (ValueError, TypeError):
        return True
    finally:
        for module, name, cap in capped:
            setattr(module, name, cap)


def keeps_only_keys_and_values(model: nn.Module) -> bool:
    """Whether the cache that transformers makes for this model has plain attention layers only, one
    per block.
    """
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None):
        return False  # Multi-head latent attention caches the latents, not keys and values.
    cache = DynamicCache(config=config)
    # A looped decoder has a slot of the cache for each run of a block.
    return is_attention_only(cache) and len(cache.layers) in (0, len(decoder_layers(model)))


class NativeAdapter(OnTransformersCache):
    """A transformers model as the user or production runs it; no part of it is replaced."""

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
        """The model's facts, with the attention that its config names now:
        ``set_attn_implementation`` may have changed it.
        """
        now = getattr(self.config, "_attn_implementation", None) or "eager"
        if now != self._facts.attention:
            self._facts = dataclasses.replace(self._facts, attention=now)
            self._copies, self._memory, self._checked, self._continues, self._attention_only = (
                {},
                None,
                None,
                None,
                None,
            )
            self._sites.facts = self._facts
        return self._facts

    @facts.setter
    def facts(self, facts: ModelInfo) -> None:
        self._facts = facts

    @property
    def attention_only(self) -> bool:
        """Whether every layer keeps plain keys and values."""
        if self._attention_only is None:
            cached = (
                self.memory.name is not None and not self.memory.own_form and not self.memory.grows
            )
            self._attention_only = cached and keeps_only_keys_and_values(self.model)
        return self._attention_only

    @property
    def loops(self) -> bool:
        """Whether its config counts more layers than there are blocks, since these run several
        times in a forward.
        """
        return self.config.num_hidden_layers > self.facts.layers and self.memory.runs > 1

    @property
    def takes_static(self) -> bool:
        """Whether the model says that it runs on a StaticCache."""
        return bool(getattr(self.model, "_can_compile_fullgraph", False))

    def logits(
        self, tokens: Tensor, store: KVStore | None, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Computes the logits of every new token by the model's own forward."""
        options: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        options = {
            name: value
            for name, value in options.items()
            if value is not None and name in self.takes
        }
        if store is None:
            return self.model(input_ids=tokens, use_cache=False, **options).logits
        if store.model_cache is not None and tokens.shape[1] > 1 and not self.attention_only:
            self._check_continues()
        if self.memory.name is None or self.memory.own_form:
            return self._logits_with_state(tokens, store)
        options[self.memory.name] = model_cache(store, self.new_cache, self._facts.architecture)
        return self.model(input_ids=tokens, use_cache=True, **options).logits

    def replacing_keys_values(
        self, read: KeysValuesRead
    ) -> contextlib.AbstractContextManager[None]:
        """Replaces them at transformers' interface of attention functions, which receives them
        after RoPE.
        """
        if not self._layer_of or not self._calls:
            self._layer_of = {
                module: layer
                for layer, block in enumerate(self._blocks)
                for module in block.modules()
            }
        return wrapping_attention(self._layer_of, read)

    def call_with_cache(
        self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Runs the model's own forward; finds the cache in its output, whatever its name."""
        options: dict[str, Any] = {"attention_mask": mask, self.cache_name: cache}
        if "position_ids" in self.takes:
            options["position_ids"] = positions
        options = {name: value for name, value in options.items() if value is not None}
        output = self.model(input_ids=tokens, use_cache=True, **options)
        return output.logits, returned_cache(output, self.takes)[1]

    def own_cache(
        self, kind: CacheKind, batch: int, capacity: int, dtype: torch.dtype
    ) -> TransformersCache | None:
        """Makes a transformers cache; for the default kind, of the class that the model itself
        makes.
        """
        if self.memory.name is None or self.memory.own_form:
            if isinstance(kind, Dynamic):
                return None
            raise UnsupportedError(
                f"cache={kind} cannot be used: {self.facts.architecture} keeps its memory in a form of its own; leave it out."
            )
        kind.check(self.device)
        if not isinstance(kind, Dynamic):
            return TransformersCache(kind.make(self.config, capacity))
        cache_class = self.memory.cache_class
        takes_config = (
            "config" in inspect.signature(cache_class).parameters and not self.memory.grows
        )
        return TransformersCache(cache_class(config=self.config) if takes_config else cache_class())

    @torch.no_grad()
    def _check_continues(self) -> None:
        """Raises UnsupportedError where the model begins anew at several tokens fed to a state, as
        transformers' Mamba does.
        """
        if self._continues is None:
            tokens = torch.arange(3, 11, device=self.device)[None] % self.facts.vocabulary
            first, rest = tokens[:, :4], tokens[:, 4:]
            with self.own_state([]), hooks_suspended(self.model):
                whole = self.model(input_ids=tokens, use_cache=False).logits[:, 4:].double()
                together = self._logits_of_pieces(first, [rest])
                singly = self._logits_of_pieces(first, rest.split(1, 1))
            # Every model decodes tokens one by one, so that this difference is rounding.
            rounding = (singly - whole).abs().max() + 4 * torch.finfo(
                self.dtype
            ).eps * whole.abs().max()
            self._continues = not bool((together - whole).abs().max() > 8 * rounding)
        if not self._continues:
            raise UnsupportedError(
                f"{self.facts.architecture} begins its state anew when it is fed several tokens with a cache, so a prompt "
                "cannot be fed in chunks: leave the chunk out of the path."
            )

    def _logits_of_pieces(self, first: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Feeds pieces one after the other, each with the cache that the piece before it left;
        returns their logits.
        """
        output, logits = self.model(input_ids=first, use_cache=True), []
        for piece in pieces:
            output = self.model(input_ids=piece, use_cache=True, **self._cache_of(output))
            logits.append(output.logits.double())
        return torch.cat(logits, 1)

    def _cache_of(self, output: Any) -> dict[str, Any]:
        """The cache that a forward returned, under the name by which the next forward takes it."""
        cache = returned_cache(output, self.takes)[1]
        return {} if not self.cache_name or cache is None else {self.cache_name: cache}

    def _logits_with_state(self, tokens: Tensor, store: KVStore) -> Tensor:
        """Runs a model that keeps no keys and values (Mamba, RWKV) on the state that its own
        forward returned.
        """
        output = self.model(input_ids=tokens, use_cache=True, **(store.model_cache or {}))
        store.model_cache = self._cache_of(output)
        if not store.model_cache:
            if self.memory.crash:
                raise UnsupportedError(
                    f"{self.facts.architecture} could not be asked for its cache: a forward of two tokens raised "
                    f"{self.memory.crash}."
                )
            raise UnsupportedError(
                f"{self.facts.architecture} takes and returns no cache that it uses, so it has no cached path: run it along "
                "recompute paths only, without a chunk."
            )
        return output.logits

    def generate(self, tokens: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Runs transformers' own."""
        model: Any = self.model
        if not callable(getattr(model, "generate", None)):
            raise UnsupportedError(
                f"a {type(model).__name__} has no generate(): open kv.record(model, ..., positions='all') around a loop of "
                "your own, and call its texts()."
            )
        # What a user's own generation_config says of sampling stays as it is.
        chosen: dict[str, Any] = {} if "generation_config" in options else {"do_sample": False}
        if getattr(getattr(model, "generation_config", None), "pad_token_id", None) is None:
            # Otherwise generate() names one in a warning; which one does not matter, as pads are
            # masked.
            chosen["pad_token_id"] = 0
        found = model.generate(tokens, attention_mask=mask, **(chosen | dict(options)))
        return cast(Tensor, getattr(found, "sequences", found))

    def tap(self, site: str, layer: int) -> Tap:
        """Finds the module that has a site in this architecture, and checks once that its tensor is
        what the site means.
        """
        if site == "embed":
            return Tap(self.model.get_input_embeddings())  # type: ignore[operator]
        if site == "result":
            return heads_tap(self.tap("z", layer), self.facts.architecture)
        tap = self._sites.find(site, layer)
        if site not in INSIDE:
            return tap
        if self._checked is None:
            # The result is kept for good, so a user's autocast must not round the tensors that are
            # compared.
            with self.own_state([]), torch.autocast(self.device.type, enabled=False):
                self._checked = check_sites(self, self._sites)
        why = self._checked.refused.get((site, layer))
        if why is not None:
            raise self._sites.lacks(
                site, why, tuple(s for s, at in self._checked.refused if at == layer)
            )
        return dataclasses.replace(tap, head_major=(site, layer) in self._checked.head_major)

    def derives(self, site: str) -> bool:
        """Whether a site is derived from the arguments of SDPA."""
        return site in DERIVED and self.facts.attention == "sdpa"

    def cast(self, dtype: torch.dtype) -> Adapter:
        """Makes a copy with the same weights in another dtype."""
        cast = NativeAdapter(cast_transformers(self.model, dtype), self.facts.name, self.tokenizer)
        cast._checked, cast._memory = self._checked, self.memory
        return cast

    def read_cache(self, site: str, layer: int, cache: Any) -> Tensor | None:
        """Reads a site from the transformers cache of the user's own forward, after the block
        ran.
        """
        if site == "cache_k_pre":
            raise InputError(
                "site 'cache_k_pre' cannot be read from a transformers cache, which holds keys after RoPE: "
                "record 'k', the new keys before RoPE, or use run() or compare()."
            )
        return super().read_cache(site, layer, cache)
