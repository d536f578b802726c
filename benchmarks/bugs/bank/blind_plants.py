"""How the bugs of ``bugs_blind.py`` are planted: of windows, rotations, masks, states, experts, casts, and of what moves a cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from bank.bug import Plant
from bank.clean_blind import seen
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

NUMBER = itertools.count()


# What the cache holds ------------------------------------------------------------------------------------------------------


def reads(layer: int, change: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Plant:
    """Attention of one layer reads other keys and values where it continues a cache, told how many tokens were on it."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, read=lambda k, v, past, cache: change(k, v, past) if past else (k, v))

    return plant


def stores(layer: int, change: Callable[[Tensor, Tensor, int, dict], tuple[Tensor, Tensor]]) -> Plant:
    """One layer stores other keys and values where it continues a cache."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, store=lambda k, v, past, given: change(k, v, past, given) if past else (k, v))

    return plant


def spoils(layer: int, spoil: Callable[[Any, int, int], None]) -> Plant:
    """What a layer's cache keeps is spoilt after it was read: `spoil(cached layer, tokens before, tokens new)`."""

    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        found = k.clone(), v.clone()
        cached = cache.layers[layer]
        spoil(cached, past, cached.get_seq_length() - past)
        return found

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        bend(model, layer, read=read)

    return plant


def last_prompt_key_missing(cached: Any, past: int, new: int) -> None:
    if past == 0 and new > 1:
        cached.keys[..., -1, :] = 0.0


def last_row_of_a_chunk_missing(cached: Any, past: int, new: int) -> None:
    if past and new > 1:
        cached.values[..., -1, :] = 0.0


def page_end_missing(cached: Any, past: int, new: int) -> None:
    if new == 1 and (past + 1) % 16 == 0:
        cached.keys[..., -1, :] = cached.keys[..., -2, :]


def old_in_float16(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return tuple(edited(t, lambda t: t[..., :-8, :].copy_(t[..., :-8, :].half())) for t in (k, v))


def whole_numbers(bits: int) -> Callable[[Tensor], Tensor]:
    """A token's vector as whole numbers of so many bits with one scale, and back."""

    def through(t: Tensor) -> Tensor:
        top = 2 ** (bits - 1) - 1
        scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-8) / top
        return (t / scale).round().clamp(-top, top) * scale

    return through


def old_values_in_int4(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return k, edited(v, lambda t: t[..., :-8, :].copy_(whole_numbers(4)(t[..., :-8, :])))


def one_head(factor: float, head: int) -> Callable[[Tensor], Tensor]:
    return lambda t: edited(t, lambda t: t[:, head].mul_(factor))


def one_number(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return k, edited(v, lambda t: t[:, 1, 3, 5].mul_(1.01))


def first_kv_head_twice(k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
    return k[:, :1].expand_as(k), v


def exchanged(k: Tensor, v: Tensor, past: int, given: dict) -> tuple[Tensor, Tensor]:
    return v, k


def pairs(k: Tensor, v: Tensor, past: int, given: dict) -> tuple[Tensor, Tensor]:
    """The new key is turned by neighbouring pairs instead of by halves."""
    cos, sin = given["position_embeddings"]
    raw, half = rotate(k, cos, -sin), k.shape[-1] // 2
    cos, sin = (t[..., :half].repeat_interleave(2, -1).unsqueeze(1) for t in (cos, sin))
    turned = torch.stack((-raw[..., 1::2], raw[..., ::2]), -1).flatten(-2)
    return raw * cos + turned * sin, v


def fastest_pair_still(k: Tensor, v: Tensor, past: int, given: dict) -> tuple[Tensor, Tensor]:
    """The first pair of the new key is not turned."""
    cos, sin = given["position_embeddings"]
    width = cos.shape[-1]
    raw, at = rotate(k[..., :width], cos, -sin), [0, width // 2]
    new = k.clone()
    new[..., at] = raw[..., at]
    return new, v


# Attention -----------------------------------------------------------------------------------------------------------------

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, dict], tuple[Tensor, Tensor, Tensor, Any, dict]]


def attends(layer: int, change: Attend) -> Plant:
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


def window_one_short(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    if q.shape[-2] == 1 and k.shape[-2] == 16:
        mask = seen(q, k, mask).expand(q.shape[0], 1, 1, 16).clone()
        mask[..., 0] = False
    return q, k, v, mask, given


def global_layer_has_a_window(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    mask = seen(q, k, mask).expand(q.shape[0], 1, *seen(q, k, mask).shape[-2:]).clone()
    mask[..., :-24] = False
    return q, k, v, mask, given


def sees_one_ahead(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    rows, keys = q.shape[-2], k.shape[-2]
    if rows > 1:
        mask = seen(q, k, mask) | torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows + 1).triu(keys - rows + 1)
    return q, k, v, mask, given


def tile_of_16_sees_itself_whole(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    if q.shape[-2] == 16:
        mask = seen(q, k, mask).clone()
        mask[..., :8, -16:-8] = True
    return q, k, v, mask, given


def first_key_unseen_in_bfloat16(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    if q.dtype == torch.bfloat16:
        mask = seen(q, k, mask).clone()
        mask[..., 0] = mask[..., 0] & (mask.sum(-1) == 1)
    return q, k, v, mask, given


def scale_of_one_head(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict) -> Any:
    return edited(q, lambda t: t[:, 2].mul_(1.01)), k, v, mask, given


def soft_max_in_half(layer: int, dtype: torch.dtype) -> Plant:
    """Probabilities of one layer are kept in a narrower dtype where it decodes."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, Any]:
        if module.layer_idx != layer or query.shape[-2] > 1 or key.shape[-2] == 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = (query @ key.transpose(-1, -2) * given["scaling"]).masked_fill(
            ~seen(query, key, attention_mask), -float("inf")
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


def returns(name: str, change: Callable[[Tensor], Tensor], *, from_token: int = 1) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        in_decode(watched(model).get_submodule(name), lambda module, out: first(out, change), from_token=from_token)

    return plant


def skipped(name: str) -> Plant:
    """A module is left out where the model decodes."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return args[0] if Now.past else forward(*args, **keywords)

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(watched(model).get_submodule(name), wrapper)

    return plant


def attribute(name: str, attribute: str, value: Any) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        set_in_decode(watched(model).get_submodule(name), attribute, value)

    return plant


def inner_attribute(layer: int, inner: str, attribute: str, value: Callable[[Tensor], Tensor]) -> Plant:
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


def config_of(name: str, field: str, value: Any) -> Plant:
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


def handed(layer: int, change: Callable[[dict], dict], *, mixes: bool = True) -> Plant:
    """A mixer (or its block) is handed other keywords where it decodes."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return forward(*args, **(keywords | change(keywords) if Now.past else keywords))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(mixer(watched(model), layer) if mixes else blocks(watched(model))[layer], wrapper)

    return plant


def angles_in(dtype: torch.dtype) -> Callable[[dict], dict]:
    def change(keywords: dict) -> dict:
        return {"position_embeddings": tuple(t.to(dtype).to(t.dtype) for t in keywords["position_embeddings"])}

    return change


def newest_without_alibi(keywords: dict) -> dict:
    return {"alibi": edited(keywords["alibi"], lambda t: t[..., -1].zero_())}


def alibi_backwards(keywords: dict) -> dict:
    # Falcon's mask has the bias in it. Distances are counted from the first key instead of to the newest.
    mask = keywords["attention_mask"]
    return {"attention_mask": mask.flip(-1) if mask is not None and mask.shape[-2] == 1 else mask}


def variance_in(dtype: torch.dtype) -> Plant:
    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if not Now.past:
            return forward(*args, **keywords)
        stream = args[0]
        variance = stream.to(dtype).pow(2).mean(-1, keepdim=True)
        return self.weight * (stream * torch.rsqrt(variance + self.variance_epsilon).to(stream.dtype))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(watched(model).get_submodule("model.layers.1.post_attention_layernorm"), wrapper)

    return plant


def other_theta(model: nn.Module, monkeypatch: Any) -> None:
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


def clamped_positions(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past:
            args, keywords = (
                tuple(a.clamp(max=32) for a in args),
                {n: v.clamp(max=32) if n == "input" else v for n, v in keywords.items()},
            )
        return forward(*args, **keywords)

    around(watched(model).get_submodule("transformer.wpe"), wrapper)


def positions_of_the_first_row(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past:
            args = tuple(a[:1].expand_as(a) if a.dtype == torch.long else a for a in args)
            keywords = {
                n: v[:1].expand_as(v) if isinstance(v, Tensor) and n == "position_ids" else v for n, v in keywords.items()
            }
        return forward(*args, **keywords)

    around(watched(model).get_submodule("model.rotary_emb"), wrapper)


def capacity(model: nn.Module, monkeypatch: Any) -> None:
    # An expert layer that takes three tokens of a chunk, and lets the rest pass.
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        out = forward(*args, **keywords)
        full = Now.past and Now.rows > 3
        return first(out, lambda t: edited(t, lambda t: t[:, 3:].zero_())) if full else out

    around(watched(model).get_submodule("model.layers.1.mlp"), wrapper)


def permuted_back_wrong(model: nn.Module, monkeypatch: Any) -> None:
    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        out = forward(*args, **keywords)
        if not (Now.past and Now.rows > 2):
            return out
        flat = out.reshape(-1, out.shape[-1]).clone()
        flat[[0, 1]] = flat[[1, 0]]
        return flat.reshape(out.shape)

    around(watched(model).get_submodule("model.layers.0.mlp.experts"), wrapper)


def bias_of_the_router(model: nn.Module, monkeypatch: Any) -> None:
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


def local_layer_sees_everything(model: nn.Module, monkeypatch: Any) -> None:
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


def state(layer: int, change: Callable[[Tensor], Tensor], name: str = "recurrent_states") -> Plant:
    def apply(cached: Any, past: int) -> None:
        states = getattr(cached, name)
        states[0].copy_(change(states[0]))

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        state_before(model, layer, apply)

    return plant


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype).to(t.dtype)


def convolution_keeps_a_chunks_head(model: nn.Module, monkeypatch: Any) -> None:
    """After several tokens on a cache the convolution state is one token old."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        past = Now.past
        out = forward(*args, **keywords)
        if past and Now.rows > 1:
            states = cache_of(keywords).layers[self.layer_idx].conv_states
            states[0].copy_(states[0].roll(1, -1))
        return out

    around(mixer(watched(model), 0), wrapper)


def state_of_the_first_row(model: nn.Module, monkeypatch: Any) -> None:
    state(0, lambda s: s[:1].expand_as(s).clone())(model, monkeypatch)


# What moves a cache --------------------------------------------------------------------------------------------------------


def patched(kind: type, name: str, made: Callable[[Callable], Callable]) -> Plant:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        monkeypatch.setattr(kind, name, made(getattr(kind, name)))

    return plant


def inverse_order(reorder: Callable) -> Callable:
    @functools.wraps(reorder)
    def wrong(self: Any, beam_idx: Tensor) -> None:
        reorder(self, beam_idx.argsort())

    return wrong


def repeated_in_turn(repeat: Callable) -> Callable:
    @functools.wraps(repeat)
    def wrong(self: Any, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self.keys, self.values = (t.repeat(repeats, 1, 1, 1) for t in (self.keys, self.values))

    return wrong


def oldest_dropped(crop: Callable) -> Callable:
    @functools.wraps(crop)
    def wrong(self: Any, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.is_initialized:
            gone = abs(tokens_to_remove)
            self.values = self.values[..., gone:, :]
            self.keys = self.keys[..., :-gone, :]
            return
        crop(self, tokens_to_remove)

    return wrong


def static_skips_the_first_step(update: Callable) -> Callable:
    @functools.wraps(update)
    def wrong(self: Any, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
        found = update(self, keys, values, *args, **more)
        if keys.shape[-2] == 1 and not getattr(self, "stepped", False) and int(self.cumulative_length) > 1:
            self.stepped = True
            self.keys[:, :, int(self.cumulative_length) - 1] = 0.0
        return found

    return wrong


def static_window_rolls_twice(update: Callable) -> Callable:
    @functools.wraps(update)
    def wrong(self: Any, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> Any:
        if keys.shape[-2] == 1 and self.cumulative_length_int >= self.max_cache_len:
            self.values.copy_(self.values.roll(-1, dims=-2))
        return update(self, keys, values, *args, **more)

    return wrong


def stale_indexer(update: Callable) -> Callable:
    @functools.wraps(update)
    def wrong(self: Any, states: Tensor) -> Tensor:
        past = self.is_indexer_initialized
        found = update(self, states)
        return found.roll(1, 1) if past else found

    return wrong


def mask_of_generate_lost(model: nn.Module, monkeypatch: Any) -> None:
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
