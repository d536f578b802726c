"""Bugs planted by one who had not read the audit: of windows, rotations, masks, states, experts, casts, and of what moves a cache.

Each is a mistake that an engine or a modelling file could make: a page's last key that is never written, a table of angles kept in 16 bits,
a reorder that applies the inverse permutation, a router's bias that only decoding knows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from bank.bug import Bug, Plant
from bank.planting import (
    Now,
    around,
    bend,
    blocks,
    cache_of,
    edited,
    first,
    in_decode,
    length,
    mixer,
    rotate,
    set_in_decode,
    state_before,
    watched,
)

KEY, VALUE, KEY_OR_VALUE = ("K",), ("V",), ("K", "V")
NUMBER = itertools.count()


# What the cache holds ------------------------------------------------------------------------------------------------------


def _reads(layer: int, change: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Plant:
    """Attention of one layer reads other keys and values where it continues a cache, told how many tokens were on it."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, read=lambda k, v, past, cache: change(k, v, past) if past else (k, v))

    return plant


def _stores(layer: int, change: Callable[[Tensor, Tensor, int, dict], tuple[Tensor, Tensor]]) -> Plant:
    """One layer stores other keys and values where it continues a cache."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, store=lambda k, v, past, given: change(k, v, past, given) if past else (k, v))

    return plant


def _spoils(layer: int, spoil: Callable[[Any, int, int], None]) -> Plant:
    """What a layer's cache keeps is spoilt after it was read: `spoil(cached layer, tokens before, tokens new)`."""

    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        found = k.clone(), v.clone()
        cached = cache.layers[layer]
        spoil(cached, past, cached.get_seq_length() - past)
        return found

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, read=read)

    return plant


def _last_prompt_key_missing(cached: Any, past: int, new: int) -> None:
    if past == 0 and new > 1:
        cached.keys[..., -1, :] = 0.0


def _last_row_of_a_chunk_missing(cached: Any, past: int, new: int) -> None:
    if past and new > 1:
        cached.values[..., -1, :] = 0.0


def _page_end_missing(cached: Any, past: int, new: int) -> None:
    if new == 1 and (past + 1) % 16 == 0:
        cached.keys[..., -1, :] = cached.keys[..., -2, :]


def _old_in_float16(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return tuple(edited(t, lambda t: t[..., :-8, :].copy_(t[..., :-8, :].half())) for t in (k, v))


def _whole_numbers(bits: int) -> Callable[[Tensor], Tensor]:
    """A token's vector as whole numbers of so many bits with one scale, and back."""

    def through(t: Tensor) -> Tensor:
        top = 2 ** (bits - 1) - 1
        scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-8) / top
        return (t / scale).round().clamp(-top, top) * scale

    return through


def _old_values_in_int4(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return k, edited(v, lambda t: t[..., :-8, :].copy_(_whole_numbers(4)(t[..., :-8, :])))


def _one_head(factor: float, head: int) -> Callable[[Tensor], Tensor]:
    return lambda t: edited(t, lambda t: t[:, head].mul_(factor))


def _one_number(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return k, edited(v, lambda t: t[:, 1, 3, 5].mul_(1.01))


def _first_kv_head_twice(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return k[:, :1].expand_as(k), v


def _exchanged(k: Tensor, v: Tensor, past: int, given: dict) -> tuple[Tensor, Tensor]:
    return v, k


def _pairs(k: Tensor, v: Tensor, past: int, given: dict) -> tuple[Tensor, Tensor]:
    """The new key is turned by neighbouring pairs instead of by halves."""
    cos, sin = given["position_embeddings"]
    raw, half = rotate(k, cos, -sin), k.shape[-1] // 2
    cos, sin = (t[..., :half].repeat_interleave(2, -1).unsqueeze(1) for t in (cos, sin))
    turned = torch.stack((-raw[..., 1::2], raw[..., ::2]), -1).flatten(-2)
    return raw * cos + turned * sin, v


def _fastest_pair_still(k: Tensor, v: Tensor, past: int, given: dict) -> tuple[Tensor, Tensor]:
    """The first pair of the new key is not turned."""
    cos, sin = given["position_embeddings"]
    width = cos.shape[-1]
    raw, at = rotate(k[..., :width], cos, -sin), [0, width // 2]
    new = k.clone()
    new[..., at] = raw[..., at]
    return new, v


# Attention -----------------------------------------------------------------------------------------------------------------

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, dict], tuple[Tensor, Tensor, Tensor, Any, dict]]


def _attends(layer: int, change: Attend) -> Plant:
    """Attention of one layer is called with something else where the keys are more than the queries."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, Any]:
        if getattr(module, "layer_idx", layer) == layer and query.shape[-2] < key.shape[-2]:
            query, key, value, attention_mask, given = change(module, query, key, value, attention_mask, given)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        name = f"sdpa_planted_{next(NUMBER)}"
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(name)

    return plant


def _mask(query: Tensor, key: Tensor, mask: Any) -> Tensor:
    """The mask that is meant, of (1, 1, queries, keys), True where a key is seen."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    rows, keys = query.shape[-2], key.shape[-2]
    return torch.ones(1, 1, rows, keys, dtype=torch.bool, device=key.device).tril(keys - rows)


def _window_one_short(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    if q.shape[-2] == 1 and k.shape[-2] == 16:
        mask = _mask(q, k, mask).expand(q.shape[0], 1, 1, 16).clone()
        mask[..., 0] = False
    return q, k, v, mask, given


def _global_layer_has_a_window(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    mask = _mask(q, k, mask).expand(q.shape[0], 1, *_mask(q, k, mask).shape[-2:]).clone()
    mask[..., :-24] = False
    return q, k, v, mask, given


def _sees_one_ahead(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    rows, keys = q.shape[-2], k.shape[-2]
    if rows > 1:
        mask = _mask(q, k, mask) | torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows + 1).triu(keys - rows + 1)
    return q, k, v, mask, given


def _tile_of_16_sees_itself_whole(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    if q.shape[-2] == 16:
        mask = _mask(q, k, mask).clone()
        mask[..., :8, -16:-8] = True
    return q, k, v, mask, given


def _first_key_unseen_in_bfloat16(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    if q.dtype == torch.bfloat16:
        mask = _mask(q, k, mask).clone()
        mask[..., 0] = mask[..., 0] & (mask.sum(-1) == 1)
    return q, k, v, mask, given


def _scale_of_one_head(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    return edited(q, lambda t: t[:, 2].mul_(1.01)), k, v, mask, given


def _soft_max_in_half(layer: int, dtype: torch.dtype) -> Plant:
    """Probabilities of one layer are kept in a narrower dtype where it decodes."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, Any]:
        if module.layer_idx != layer or query.shape[-2] > 1 or key.shape[-2] == 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = (query @ key.transpose(-1, -2) * given["scaling"]).masked_fill(
            ~_mask(query, key, attention_mask), -float("inf")
        )
        made = scores.softmax(-1).to(dtype).to(value.dtype) @ value
        return made.transpose(1, 2), None

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        name = f"sdpa_planted_{next(NUMBER)}"
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(name)

    return plant


# Modules -------------------------------------------------------------------------------------------------------------------


def _returns(name: str, change: Callable[[Tensor], Tensor], *, from_token: int = 1) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        in_decode(watched(model).get_submodule(name), lambda module, out: first(out, change), from_token=from_token)

    return plant


def _skipped(name: str) -> Plant:
    """A module is left out where the model decodes."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return args[0] if Now.past else forward(*args, **keywords)

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(watched(model).get_submodule(name), wrapper)

    return plant


def _attribute(name: str, attribute: str, value: Any) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        set_in_decode(watched(model).get_submodule(name), attribute, value)

    return plant


def _inner_attribute(layer: int, inner: str, attribute: str, value: Callable[[Tensor], Tensor]) -> Plant:
    """A parameter of a module within a mixer, which may be read without a call, is another where the mixer decodes."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if not Now.past:
            return forward(*args, **keywords)
        owner = self.get_submodule(inner)
        before = getattr(owner, attribute)
        setattr(owner, attribute, nn.Parameter(value(before), requires_grad=False))
        try:
            return forward(*args, **keywords)
        finally:
            setattr(owner, attribute, before)

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(mixer(watched(model), layer), wrapper)

    return plant


def _config_of(name: str, field: str, value: Any) -> Plant:
    """A module reads another config where it decodes."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        before = getattr(self.config, field)
        if Now.past:
            setattr(self.config, field, value)
        try:
            return forward(*args, **keywords)
        finally:
            setattr(self.config, field, before)

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(watched(model).get_submodule(name), wrapper)

    return plant


def _given(layer: int, change: Callable[[dict], dict], *, mixes: bool = True) -> Plant:
    """A mixer (or its block) is handed other keywords where it decodes."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return forward(*args, **(keywords | change(keywords) if Now.past else keywords))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(mixer(watched(model), layer) if mixes else blocks(watched(model))[layer], wrapper)

    return plant


def _angles_in(dtype: torch.dtype) -> Callable[[dict], dict]:
    def change(keywords: dict) -> dict:
        return {"position_embeddings": tuple(t.to(dtype).to(t.dtype) for t in keywords["position_embeddings"])}

    return change


def _newest_without_alibi(keywords: dict) -> dict:
    return {"alibi": edited(keywords["alibi"], lambda t: t[..., -1].zero_())}


def _alibi_backwards(keywords: dict) -> dict:
    # Falcon's mask has the bias in it. Distances are counted from the first key instead of to the newest.
    mask = keywords["attention_mask"]
    return {"attention_mask": mask.flip(-1) if mask is not None and mask.shape[-2] == 1 else mask}


def _variance_in(dtype: torch.dtype) -> Plant:
    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if not Now.past:
            return forward(*args, **keywords)
        stream = args[0]
        variance = stream.to(dtype).pow(2).mean(-1, keepdim=True)
        return self.weight * (stream * torch.rsqrt(variance + self.variance_epsilon).to(stream.dtype))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(watched(model).get_submodule("model.layers.1.post_attention_layernorm"), wrapper)

    return plant


def _other_theta(model: nn.Module, monkeypatch: Any) -> None:
    """A window's layer is turned by the angles of the global layers."""
    seen: dict[str, Any] = {}

    def remember(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        found = forward(*args, **keywords)
        seen[args[2] if len(args) > 2 else keywords["layer_type"]] = found
        return found

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        more = {"position_embeddings": seen["full_attention"]} if Now.past else {}
        return forward(*args, **keywords | more)

    around(watched(model).get_submodule("model.rotary_emb"), remember)
    around(mixer(model, 0), wrapper)


def _clamped_positions(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past:
            args, keywords = (
                tuple(a.clamp(max=32) for a in args),
                {n: v.clamp(max=32) if n == "input" else v for n, v in keywords.items()},
            )
        return forward(*args, **keywords)

    around(watched(model).get_submodule("transformer.wpe"), wrapper)


def _positions_of_the_first_row(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past:
            args = tuple(a[:1].expand_as(a) if a.dtype == torch.long else a for a in args)
            keywords = {
                n: v[:1].expand_as(v) if isinstance(v, Tensor) and n == "position_ids" else v for n, v in keywords.items()
            }
        return forward(*args, **keywords)

    around(watched(model).get_submodule("model.rotary_emb"), wrapper)


def _capacity(model: nn.Module, monkeypatch: Any) -> None:
    # An expert layer that takes three tokens of a chunk, and lets the rest pass.
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        out = forward(*args, **keywords)
        full = Now.past and Now.rows > 3
        return first(out, lambda t: edited(t, lambda t: t[:, 3:].zero_())) if full else out

    around(watched(model).get_submodule("model.layers.1.mlp"), wrapper)


def _permuted_back_wrong(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        out = forward(*args, **keywords)
        if not (Now.past and Now.rows > 2):
            return out
        flat = out.reshape(-1, out.shape[-1]).clone()
        flat[[0, 1]] = flat[[1, 0]]
        return flat.reshape(out.shape)

    around(watched(model).get_submodule("model.layers.0.mlp.experts"), wrapper)


def _bias_of_the_router(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if not Now.past:
            return forward(*args, **keywords)
        before = self.e_score_correction_bias
        self.e_score_correction_bias = before + torch.arange(before.shape[0], dtype=before.dtype)
        try:
            return forward(*args, **keywords)
        finally:
            self.e_score_correction_bias = before

    around(watched(model).get_submodule("model.layers.1.mlp.gate"), wrapper)


def _local_layer_sees_everything(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        before = self.bias
        if Now.past:
            self.bias = torch.ones_like(before).tril()
        try:
            return forward(*args, **keywords)
        finally:
            self.bias = before

    around(watched(model).get_submodule("transformer.h.1.attn.attention"), wrapper)


# States --------------------------------------------------------------------------------------------------------------------


def _state(layer: int, change: Callable[[Tensor], Tensor], name: str = "recurrent_states") -> Plant:
    def apply(cached: Any, past: int) -> None:
        states = getattr(cached, name)
        states[0].copy_(change(states[0]))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        state_before(model, layer, apply)

    return plant


def _through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype).to(t.dtype)


def _convolution_keeps_a_chunks_head(model: nn.Module, monkeypatch: Any) -> None:
    """After several tokens on a cache the convolution state is one token old."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        past = Now.past
        out = forward(*args, **keywords)
        if past and Now.rows > 1:
            states = cache_of(keywords).layers[self.layer_idx].conv_states
            states[0].copy_(states[0].roll(1, -1))
        return out

    around(mixer(watched(model), 0), wrapper)


def _state_of_the_first_row(model: nn.Module, monkeypatch: Any) -> None:
    _state(0, lambda s: s[:1].expand_as(s).clone())(model, monkeypatch)


# What moves a cache --------------------------------------------------------------------------------------------------------


def _patched(kind: type, name: str, made: Callable[[Callable], Callable]) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        monkeypatch.setattr(kind, name, made(getattr(kind, name)))

    return plant


def _inverse_order(reorder: Callable) -> Callable:
    @functools.wraps(reorder)
    def wrong(self: Any, beam_idx: Tensor) -> None:
        reorder(self, beam_idx.argsort())

    return wrong


def _repeated_in_turn(repeat: Callable) -> Callable:
    @functools.wraps(repeat)
    def wrong(self: Any, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self.keys, self.values = (t.repeat(repeats, 1, 1, 1) for t in (self.keys, self.values))

    return wrong


def _oldest_dropped(crop: Callable) -> Callable:
    @functools.wraps(crop)
    def wrong(self: Any, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.is_initialized:
            gone = abs(tokens_to_remove)
            self.values = self.values[..., gone:, :]
            self.keys = self.keys[..., :-gone, :]
            return
        crop(self, tokens_to_remove)

    return wrong


def _static_skips_the_first_step(update: Callable) -> Callable:
    @functools.wraps(update)
    def wrong(self: Any, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
        found = update(self, keys, values, *args, **more)
        if keys.shape[-2] == 1 and not getattr(self, "stepped", False) and int(self.cumulative_length) > 1:
            self.stepped = True
            self.keys[:, :, int(self.cumulative_length) - 1] = 0.0
        return found

    return wrong


def _static_window_rolls_twice(update: Callable) -> Callable:
    @functools.wraps(update)
    def wrong(self: Any, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
        if keys.shape[-2] == 1 and self.cumulative_length_int >= self.max_cache_len:
            self.values.copy_(self.values.roll(-1, dims=-2))
        return update(self, keys, values, *args, **more)

    return wrong


def _stale_indexer(update: Callable) -> Callable:
    @functools.wraps(update)
    def wrong(self: Any, states: Tensor) -> Tensor:
        past = self.is_indexer_initialized
        found = update(self, states)
        return found.roll(1, 1) if past else found

    return wrong


def _mask_of_generate_lost(model: nn.Module, monkeypatch: Any) -> None:
    """Where it decodes, `generate` hands the forward a mask of ones."""
    base = type(model)

    @functools.wraps(base.prepare_inputs_for_generation)
    def prepare(self: nn.Module, *args: Any, **keywords: Any) -> dict[str, Any]:
        inputs = base.prepare_inputs_for_generation(self, *args, **keywords)
        if length(inputs.get("past_key_values")) and isinstance(inputs.get("attention_mask"), Tensor):
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        return inputs

    model.__class__ = type(
        base.__name__, (base,), {"prepare_inputs_for_generation": prepare, "__module__": base.__module__}
    )


FULL, SLIDING = "full_attention", "sliding_attention"
TWO = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
LOGITS = ("logits", "lm_head")
SCORES = ("attention", "model.layers.1.self_attn")
ANGLES = ("Q", "K")
STATE, CONVOLUTION = ("recurrent state",), ("convolution state",)
HALF, BRAIN = torch.float16, torch.bfloat16

CASTS = (
    "old-keys-and-values-in-float16",
    "latents-in-float16",
    "rotary-latent-in-bfloat16",
    "probabilities-in-bfloat16",
    "angles-in-bfloat16",
    "variance-in-bfloat16",
    "logits-in-float16",
    "state-in-float16",
    "state-of-a-hybrid-in-bfloat16",
)
"""Of these the honest word is `hidden-cast`: the model's dtype is wider."""

BUGS = (
    # What the cache holds.
    Bug("last-key-of-a-prompt-not-written", "qwen3", _spoils(0, _last_prompt_key_missing), (0,), KEY, 8.6e-02),
    Bug(
        "last-value-of-a-chunk-not-written",
        "qwen2",
        _spoils(1, _last_row_of_a_chunk_missing),
        (1,),
        VALUE,
        1.6e-02,
        path="chunks",
    ),
    Bug("last-key-of-a-page-not-written", "llama", _spoils(1, _page_end_missing), (1,), KEY, 2.1e-02, lengths=(9, 31)),
    Bug("old-keys-and-values-in-float16", "llama", _reads(0, _old_in_float16), (0,), KEY_OR_VALUE, 1.1e-04),
    Bug(
        "keys-in-int8-said-to-be-exact", "mistral", _reads(1, lambda k, v, p: (_whole_numbers(8)(k), v)), (1,), KEY, 1.2e-03
    ),
    Bug("old-values-in-int4-said-to-be-exact", "qwen2", _reads(0, _old_values_in_int4), (0,), VALUE, 2.7e-02),
    Bug("values-off-by-1e-5", "olmo2", _reads(0, lambda k, v, p: (k, v * (1 + 1e-5))), (0,), VALUE, 5.4e-07),
    Bug("one-head-of-keys-off-by-1e-4", "phi", _reads(1, lambda k, v, p: (_one_head(1.0001, 1)(k), v)), (1,), KEY, 3.4e-06),
    Bug("one-number-of-values-off-by-one-percent", "gpt2", _reads(1, _one_number), (1,), VALUE, 1.6e-05),
    Bug("second-kv-head-reads-the-firsts-keys", "cohere", _reads(1, _first_kv_head_twice), (1,), KEY, 1.2e-01),
    Bug("key-and-value-exchanged", "gptj", _stores(0, _exchanged), (0,), KEY_OR_VALUE, 6.1e-02),
    Bug("new-keys-turned-by-neighbouring-pairs", "llama", _stores(1, _pairs), (1,), KEY, 9.2e-02),
    Bug("fastest-pair-of-new-keys-not-turned", "stablelm", _stores(1, _fastest_pair_still), (1,), KEY, 3.1e-02),
    Bug("latents-in-float16", "deepseek_v3", _reads(0, lambda k, v, p: (_through(HALF)(k), v)), (0,), (), 3.1e-04),
    Bug(
        "latent-of-one-position",
        "deepseek_v2",
        _reads(1, lambda k, v, p: (edited(k, lambda t: t[:, :, 6].mul_(1.01)), v)),
        (1,),
        (),
        6.0e-04,
    ),  # fmt: skip
    Bug("rotary-latent-in-bfloat16", "minicpm3", _reads(1, lambda k, v, p: (k, _through(BRAIN)(v))), (1,), (), 1.8e-05),
    # Windows and masks.
    Bug(
        "window-one-short-in-decode",
        "mistral",
        _attends(0, _window_one_short),
        (0,),
        ("attention", "model.layers.0.self_attn", "K", "V"),
        2.7e-01,
    ),  # fmt: skip
    Bug(
        "global-layer-has-a-window-in-decode",
        "olmo3",
        _attends(1, _global_layer_has_a_window),
        (1,),
        SCORES,
        2.8e-01,
        config=TWO,
    ),  # fmt: skip
    Bug("local-layer-sees-everything-in-decode", "gpt_neo", _local_layer_sees_everything, (1,), (), 2.2e-01),
    Bug("a-chunk-sees-one-ahead", "granite", _attends(1, _sees_one_ahead), (1,), ("attention",), 2.8e-02, path="chunks"),
    Bug(
        "a-tile-of-16-sees-itself-whole",
        "llama",
        _attends(1, _tile_of_16_sees_itself_whole),
        (1,),
        ("attention",),
        2.9e-02,
        path="sixteen",
    ),  # fmt: skip
    Bug(
        "first-key-unseen-in-bfloat16",
        "llama",
        _attends(1, _first_key_unseen_in_bfloat16),
        (1,),
        SCORES,
        7.7e-02,
        dtype="bfloat16",
    ),  # fmt: skip
    Bug(
        "chunks-of-llama4-forgotten-in-decode",
        "llama4_text",
        _given(0, lambda keywords: {"attention_mask": None}, mixes=False),
        (0,),
        (),
        1.1e00,
        config={"attention_chunk_size": 10},
    ),  # fmt: skip
    Bug(
        "temperature-of-llama4-missing-in-decode",
        "llama4_text",
        _attribute("model.layers.1.self_attn", "attn_temperature_tuning", False),
        (1,),
        (),
        1.7e-01,
        config={"floor_scale": 4, "no_rope_layers": [1, 0]},
    ),  # fmt: skip
    # Attention's numbers.
    Bug(
        "scale-of-one-head",
        "starcoder2",
        _attends(1, _scale_of_one_head),
        (1,),
        ("attention", "Q", "model.layers.1.self_attn"),
        4.6e-04,
    ),  # fmt: skip
    Bug("probabilities-in-bfloat16", "llama", _soft_max_in_half(1, BRAIN), (1,), (), 5.6e-04),
    Bug(
        "sinks-of-the-next-head",
        "gpt_oss",
        _attribute("model.layers.0.self_attn", "sinks", lambda s: s.roll(1)),
        (0,),
        ("attention", "model.layers.0.self_attn"),
        9.6e-03,
    ),  # fmt: skip
    Bug("alibi-of-the-newest-key-missing", "bloom", _given(0, _newest_without_alibi), (0,), (), 6.0e-02),
    Bug("alibi-counted-backwards", "falcon", _given(1, _alibi_backwards), (1,), (), 1.0e-01, config={"alibi": True}),
    Bug(
        "lambda-of-another-layer",
        "diffllama",
        _attribute("model.layers.1.self_attn", "lambda_init", 0.2),
        (1,),
        (),
        9.3e-02,
    ),
    Bug(
        "key-norm-skipped",
        "qwen3_moe",
        _skipped("model.layers.1.self_attn.k_norm"),
        (1,),
        ("K", "model.layers.1.self_attn"),
        7.8e-02,
    ),  # fmt: skip
    Bug(
        "clip-of-q-k-and-v-forgotten",
        "olmo",
        _config_of("model.layers.1.self_attn", "clip_qkv", None),
        (1,),
        ("Q", "K", "V"),
        6.3e-02,
        config={"clip_qkv": 0.4},
    ),  # fmt: skip
    Bug(
        "heads-of-a-fused-projection-exchanged",
        "phi3",
        _returns(
            "model.layers.1.self_attn.qkv_proj",
            lambda x: torch.cat((x[..., :32], x[..., 40:48], x[..., 32:40], x[..., 48:]), -1),
        ),
        (1,),
        (),
        8.1e-02,
    ),  # fmt: skip
    # Positions.
    Bug("angles-in-bfloat16", "qwen3", _given(0, _angles_in(BRAIN)), (0,), ANGLES, 1.3e-03),
    Bug(
        "local-layer-turned-by-the-global-theta", "gemma3_text", _other_theta, (0,), ANGLES, 1.4e-01, config=TWO
    ),  # fmt: skip
    Bug(
        "factor-of-yarn-missing-in-decode",
        "llama",
        _attribute("model.rotary_emb", "attention_scaling", 1.0),
        (0,),
        ANGLES,
        8.9e-02,
        config={
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),  # fmt: skip
    Bug(
        "rope-in-a-layer-that-has-none",
        "smollm3",
        _attribute("model.layers.1.self_attn", "use_rope", 1),
        (1,),
        ANGLES,
        2.8e-01,
        config={"no_rope_layers": [1, 0]},
    ),  # fmt: skip
    Bug("learned-positions-end-at-32", "gpt2", _clamped_positions, (None, -1, 0), (), 7.8e-01),
    Bug("positions-of-the-first-row", "llama", _positions_of_the_first_row, (0,), (), 2.4e-01, path="batch"),
    # Blocks.
    Bug("variance-in-bfloat16", "llama", _variance_in(BRAIN), (1,), (), 3.8e-03),
    Bug("logits-in-float16", "seed_oss", _returns("lm_head", _through(HALF)), (None, 1, 2), LOGITS, 2.1e-04),
    Bug(
        "multiplier-of-the-residual-forgotten",
        "granite",
        _attribute("model.layers.1", "residual_multiplier", 1.0),
        (1,),
        (),
        4.1e-01,
        config={"residual_multiplier": 0.5},
    ),  # fmt: skip
    Bug(
        "multiplier-of-a-parallel-attention-forgotten",
        "falcon_h1",
        _attribute("model.layers.1", "attn_out_multiplier", 1.0),
        (1,),
        (),
        7.3e-02,
        config={"attention_out_multiplier": 0.9},
    ),  # fmt: skip
    Bug(
        "norm-of-the-embedding-skipped",
        "bloom",
        _skipped("transformer.word_embeddings_layernorm"),
        (None, -1, 0),
        (),
        1.5e00,
    ),  # fmt: skip
    Bug(
        "one-row-of-the-mlp-off-by-1e-4",
        "gpt_neox",
        _returns("gpt_neox.layers.1.mlp", lambda x: edited(x, lambda t: t[..., 7].mul_(1.0001))),
        (1,),
        (),
        2.5e-05,
    ),  # fmt: skip
    Bug(
        "normalised-weight-of-a-norm-plus-one",
        "gemma",
        _returns("model.layers.0.post_attention_layernorm", lambda x: edited(x, lambda t: t[..., 0].mul_(1.02))),
        (0,),
        (),
        2.1e-03,
    ),  # fmt: skip
    # Experts.
    Bug("bias-of-the-router-added-in-decode", "deepseek_v3", _bias_of_the_router, (1,), (), 8.9e-01),
    Bug(
        "factor-of-routed-experts-missing",
        "glm4_moe",
        _attribute("model.layers.1.mlp.gate", "routed_scaling_factor", 1.0),
        (1,),
        (),
        3.5e-01,
        config={"routed_scaling_factor": 2.5},
    ),  # fmt: skip
    Bug("experts-take-three-tokens-of-a-chunk", "qwen2_moe", _capacity, (1,), (), 1.3e-01, path="chunks"),
    Bug(
        "two-tokens-of-a-chunk-change-places-among-experts",
        "mixtral",
        _permuted_back_wrong,
        (0,),
        (),
        3.1e-01,
        path="chunks",
    ),
    # States.
    Bug("state-in-float16", "mamba2", _state(1, _through(HALF)), (1,), STATE, 1.3e-06),
    Bug("state-of-a-hybrid-in-bfloat16", "granitemoehybrid", _state(0, _through(BRAIN)), (0,), STATE, 1.5e-05),
    Bug("skip-of-a-state-space-missing", "mamba2", _inner_attribute(1, "", "D", torch.zeros_like), (1,), (), 7.8e-01),
    Bug(
        "bias-of-a-convolution-missing",
        "mamba2",
        _inner_attribute(0, "conv1d", "bias", torch.zeros_like),
        (0,),
        (),
        5.2e-01,
    ),
    Bug(
        "decay-of-one-head-off",
        "qwen3_next",
        _inner_attribute(0, "", "A_log", lambda a: edited(a, lambda t: t[1].add_(0.5))),
        (0,),
        (),
        7.7e-06,
    ),  # fmt: skip
    Bug(
        "step-bias-of-one-head-off",
        "qwen3_5_text",
        _inner_attribute(0, "", "dt_bias", lambda a: edited(a, lambda t: t[0].add_(0.1))),
        (0,),
        (),
        1.4e-05,
    ),  # fmt: skip
    Bug(
        "decay-of-lightning-reversed",
        "minimax",
        _attribute("model.layers.1.self_attn", "slope_rate", lambda s: s.flip(0)),
        (1,),
        (),
        4.1e-06,
    ),  # fmt: skip
    Bug(
        "convolution-state-old-after-a-chunk",
        "lfm2",
        _convolution_keeps_a_chunks_head,
        (0,),
        CONVOLUTION,
        1.5e-01,
        config={"num_hidden_layers": 2, "layer_types": ["conv", FULL]},
        path="chunks",
    ),  # fmt: skip
    Bug("state-of-the-first-row", "qwen3_5_text", _state_of_the_first_row, (0,), STATE, 2.8e-01, path="batch"),
    # What moves a cache.
    Bug(
        "rows-reordered-the-inverse-way",
        "llama",
        _patched(DynamicLayer, "reorder_cache", _inverse_order),
        (0, None),
        KEY_OR_VALUE,
        1.1e00,
        path="thirds",
    ),  # fmt: skip
    Bug(
        "rows-repeated-in-turn",
        "qwen3",
        _patched(DynamicLayer, "batch_repeat_interleave", _repeated_in_turn),
        (0, None),
        KEY_OR_VALUE,
        8.0e-01,
        path="repeat",
    ),  # fmt: skip
    Bug(
        "crop-drops-the-oldest-values",
        "llama",
        _patched(DynamicLayer, "crop", _oldest_dropped),
        (0, None),
        VALUE,
        4.7e-01,
        path="crop",
    ),  # fmt: skip
    Bug(
        "static-cache-skips-the-first-step",
        "qwen2",
        _patched(StaticLayer, "update", _static_skips_the_first_step),
        (0, None),
        KEY,
        1.1e-02,
        path="static",
    ),  # fmt: skip
    Bug(
        "static-window-rolls-twice",
        "mistral",
        _patched(StaticSlidingWindowLayer, "update", _static_window_rolls_twice),
        (0, None),
        VALUE,
        2.2e-01,
        path="static",
    ),  # fmt: skip
    Bug(
        "indexer-reads-keys-one-late",
        "deepseek_v32",
        _patched(DynamicIndexedLayer, "update_indexer", _stale_indexer),
        (0,),
        (),
        1.4e00,
        config={"index_topk": 4},
    ),  # fmt: skip
    Bug("mask-of-generate-lost", "llama", _mask_of_generate_lost, (0, None), (), 6.9e-02, path="generate-padded"),
)
