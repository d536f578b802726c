"""Right models whose decode, or whose cache, is made another way than their prompt: by one who had not read the audit.

What engines do: fuse or split products, fold a norm's weight, absorb a latent, keep keys unturned, permuted or projected, attend by parts,
add in another order, keep a state in other units, compute the head in float32. Each is the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, apply_rotary_pos_emb_interleave
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention

from bank.planting import around, blocks, cache_of, length, mixer, rotate
from bank.small import small


def seen(query: Tensor, key: Tensor, mask: Any) -> Tensor:
    """The mask that is meant, of (rows of the batch or 1, 1, queries, keys): True where a key is seen.

    As transformers leaves a mask out: one query sees every key, several see so many as their number says.
    """
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    rows, keys = query.shape[-2], key.shape[-2]
    every = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=key.device)
    return every if rows == 1 else every.tril()


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """Attention written out, of (batch, heads, queries, value's last size)."""
    scores = query @ _repeated(key, query).transpose(-1, -2) * scaling
    weights = scores.masked_fill(~seen(query, key, mask), torch.finfo(scores.dtype).min).softmax(-1)
    return weights @ _repeated(value, query)


# Attention that is called otherwise where the keys are more than the queries -----------------------------------------------


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """Query heads of one group side by side, keys not repeated, the scale in the query."""
    batch, heads, rows, size = query.shape
    groups = key.shape[1]
    query = (query * scaling).view(batch, groups, heads // groups, rows, size)
    scores = torch.einsum("bgrqd,bgkd->bgrqk", query, key)
    scores = scores.masked_fill(~seen(query, key, mask).unsqueeze(1), torch.finfo(scores.dtype).min)
    return torch.einsum("bgrqk,bgkd->bgrqd", scores.softmax(-1), value).reshape(batch, heads, rows, -1)


def _base_two(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """Softmax by powers of two, normalised after the values, as flash kernels do."""
    scores = query * (scaling * math.log2(math.e)) @ _repeated(key, query).transpose(-1, -2)
    scores = scores.masked_fill(~seen(query, key, mask), torch.finfo(scores.dtype).min)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return weights @ _repeated(value, query) / weights.sum(-1, keepdim=True)


def _cascade(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """The shared prefix and what is new are attended apart, and joined by their logarithms of sums."""
    key, value, visible = _repeated(key, query), _repeated(value, query), seen(query, key, mask)
    at, made, sums = max(1, key.shape[-2] // 2), [], []
    for part in (slice(0, at), slice(at, None)):
        scores = (query @ key[..., part, :].transpose(-1, -2) * scaling).masked_fill(~visible[..., part], -1e4)
        made.append(scores.softmax(-1) @ value[..., part, :])
        sums.append(scores.logsumexp(-1, keepdim=True))
    share = torch.sigmoid(sums[0] - sums[1])
    return made[0] * share + made[1] * (1 - share)


def _heads_permuted(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """Heads stand in the opposite order, and back."""
    return plain(query.flip(1), key.flip(1), value.flip(1), mask, scaling).flip(1)


def _transposed(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """Keys kept with positions last and values with heads last, as some kernels lay them out."""
    batch, heads, rows, _ = query.shape
    key = _repeated(key, query).transpose(-1, -2).contiguous().flatten(0, 1)
    value = _repeated(value, query).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).flatten(0, 1)
    bias = torch.zeros(batch, heads, rows, key.shape[-1], dtype=query.dtype).masked_fill(
        ~seen(query, key.transpose(-1, -2), mask), torch.finfo(query.dtype).min
    )
    scores = torch.baddbmm(bias.flatten(0, 1), query.flatten(0, 1), key, alpha=scaling)
    return torch.bmm(scores.softmax(-1), value).view(batch, heads, rows, -1)


DECODES = {each.__name__.strip("_"): each for each in (_grouped, _base_two, _cascade, _heads_permuted, _transposed)}


def _blockwise(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """A prompt attends block of queries by block, each to no more keys than it sees; one token attends as it is."""
    if query.shape[-2] == 1:
        return plain(query, key, value, mask, scaling)
    visible, before = seen(query, key, mask), key.shape[-2] - query.shape[-2]
    made = []
    for start in range(0, query.shape[-2], 8):
        rows, keys = slice(start, start + 8), slice(0, max(1, before + start + 8))
        made.append(plain(query[..., rows, :], key[..., keys, :], value[..., keys, :], visible[..., rows, keys], scaling))
    return torch.cat(made, -2)


def _retention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """Linear attention with a decay: of a prompt by all pairs, of one token by a state that is folded up token by token."""
    key, value, visible = _repeated(key, query), _repeated(value, query), seen(query, key, mask)
    rows, keys = query.shape[-2], key.shape[-2]
    decay = 0.9
    if rows == 1:
        key = key * visible.transpose(-1, -2)
        state = torch.zeros_like(key[..., 0, :, None] * value[..., 0, None, :])
        for at in range(keys):
            state = decay * state + key[..., at, :, None] * value[..., at, None, :]
        return query * scaling @ state
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    weights = (decay ** distance.clamp(min=0).double()).to(query.dtype) * visible
    return (query @ key.transpose(-1, -2) * scaling * weights) @ value


def _biased(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
    """A bias by distance, in buckets that widen: of a prompt looked up pair by pair, of one token computed from the newest back."""
    rows, keys, heads = query.shape[-2], key.shape[-2], query.shape[1]
    slopes = torch.arange(1, heads + 1, dtype=query.dtype)[:, None, None] * 0.1
    if rows == 1:
        bias = -slopes * torch.arange(keys - 1, -1, -1, dtype=query.dtype).add(1).log2().floor()
    else:
        table = -slopes * torch.arange(1, keys + 1, dtype=query.dtype).log2().floor()
        distance = (torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)).clamp(min=0)
        bias = table[:, 0][:, distance]
    scores = query @ _repeated(key, query).transpose(-1, -2) * scaling + bias
    weights = scores.masked_fill(~seen(query, key, mask), torch.finfo(scores.dtype).min).softmax(-1)
    return weights @ _repeated(value, query)


WHOLE = {each.__name__.strip("_"): each for each in (_blockwise, _retention, _biased)}


def _attention(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    if name in DECODES and query.shape[-2] == key.shape[-2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    made = (DECODES | WHOLE)[name](query, key, value, attention_mask, given["scaling"])
    return made.transpose(1, 2).contiguous(), None


def _registered(model: Any, name: str, attention: Callable, mask: str = "sdpa") -> nn.Module:
    AttentionInterface.register(f"{mask}_{name}", attention)
    AttentionMaskInterface.register(f"{mask}_{name}", ALL_MASK_ATTENTION_FUNCTIONS[mask])
    model.set_attn_implementation(f"{mask}_{name}")
    return model


def attending(name: str, kind: str = "llama", **config: Any) -> nn.Module:
    """A model that attends in one of these ways."""
    model = _registered(small(kind, **config), f"blind_{name}", partial(_attention, name))
    if name in WHOLE:
        model._can_compile_fullgraph = False  # They count the keys, and read the empty slots of a static cache.
    return model


def _sinks_in_the_sum(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """The sink is no column of the scores but a summand below the fraction, where one token is decoded."""
    if query.shape[-2] > 1:
        return gpt_oss_attention(module, query, key, value, attention_mask, **given)
    scores = query @ _repeated(key, query).transpose(-1, -2) * given["scaling"]
    scores = scores.masked_fill(~seen(query, key, attention_mask), torch.finfo(scores.dtype).min)
    sinks = module.sinks.view(1, -1, 1, 1)
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - most).exp()
    made = weights @ _repeated(value, query) / (weights.sum(-1, keepdim=True) + (sinks - most).exp())
    return made.transpose(1, 2), None


def _cap_in_the_query(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, Any]:
    """Scale and soft cap are one factor of the query, where one token is decoded."""
    if query.shape[-2] > 1:
        return gemma2_attention(module, query, key, value, attention_mask, **given)
    cap = given["softcap"]
    scores = torch.tanh(query * (given["scaling"] / cap) @ _repeated(key, query).transpose(-1, -2)) * cap
    scores = scores.masked_fill(~seen(query, key, attention_mask), torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ _repeated(value, query)).transpose(1, 2), None


def _own(kind: str, attention: Callable, **config: Any) -> nn.Module:
    return _registered(small(kind, **config), f"blind_{kind}", attention, "eager")


# Modules of another make ---------------------------------------------------------------------------------------------------


def _of(kind: str, old: type, new: type, **config: Any) -> nn.Module:
    """A model in which every module of one class is of another."""
    model = small(kind, **config)
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new
    return model


class _Attention(LlamaAttention):
    """Llama's attention in pieces that can be replaced."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length(self.layer_idx))
        made = self.attended(hidden_states, position_embeddings, attention_mask, past_key_values, past)
        return self.out(made.transpose(1, 2)), None

    def projected(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, of (batch, heads, rows, head_dim)."""
        return tuple(self._heads(each(stream)) for each in (self.q_proj, self.k_proj, self.v_proj))  # type: ignore[return-value]

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.view(*tensor.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        """What the heads return."""
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return plain(query, key, value, mask, self.scaling)

    def out(self, made: Tensor) -> Tensor:
        """Of (batch, rows, heads, size) what the layer returns."""
        return self.o_proj(made.flatten(2))


class _Fused(_Attention):
    """One product for queries, keys and values, where one token comes."""

    def projected(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if stream.shape[1] > 1:
            return super().projected(stream)
        weights = [each.weight for each in (self.q_proj, self.k_proj, self.v_proj)]
        parts = F.linear(stream, torch.cat(weights)).split([len(weight) for weight in weights], -1)
        return tuple(self._heads(part) for part in parts)  # type: ignore[return-value]


class _Unturned(_Attention):
    """The cache holds keys as they were projected; all of them are turned at each call, by the slots they stand in."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        query = rotate(query, *self._angles(past, past + query.shape[-2], query))
        return plain(query, rotate(key, *self._angles(0, key.shape[-2], key)), value, mask, self.scaling)

    def _angles(self, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
        speed = 10000.0 ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        turned = torch.outer(torch.arange(start, stop, dtype=torch.float64), speed).repeat(1, 2)[None]
        return turned.cos().to(like), turned.sin().to(like)


class _OtherLayout(_Attention):
    """The cache holds keys with their dimensions in another order, and queries follow."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            order = torch.arange(self.head_dim).view(2, -1).T.reshape(-1)
            query, (key, value) = query[..., order], cache.update(key[..., order], value, self.layer_idx)
        return plain(query, key, value, mask, self.scaling)


class _Scaled(_Attention):
    """The cache holds keys that are multiplied by the scale already, and halved values."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is None:
            return plain(query, key, value, mask, self.scaling)
        key, value = cache.update(key * self.scaling, value / 2, self.layer_idx)
        return plain(query, key, value, mask, 1.0) * 2


class _ByHead(_Attention):
    """What each head adds to the stream is computed apart and summed, where one token comes."""

    def out(self, made: Tensor) -> Tensor:
        if made.shape[1] > 1:
            return super().out(made)
        parts = self.o_proj.weight.view(len(self.o_proj.weight), -1, self.head_dim)
        return sum(made[..., head, :] @ parts[:, head].T for head in reversed(range(made.shape[2])))  # type: ignore[return-value]


class _Projected(_Attention):
    """The cache holds for each head the values as the output's weight makes them: a head's part is only summed."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        if cache is None:
            return super().attended(stream, angles, mask, cache, past)
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        parts = self.o_proj.weight.view(len(self.o_proj.weight), -1, self.head_dim).permute(1, 2, 0)
        key, value = cache.update(_repeated(key, query), _repeated(value, query) @ parts, self.layer_idx)
        return plain(query, key, value, mask, self.scaling)

    def out(self, made: Tensor) -> Tensor:
        return super().out(made) if made.shape[-1] == self.head_dim else made.sum(2)


class _FusedMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return super().forward(x)
        gate, up = F.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight))).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class _TwoShards(LlamaMLP):
    """Two devices hold half of the inner width each, and their results are added, where one token comes."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return super().forward(x)
        inner = (F.silu(self.gate_proj(x)) * self.up_proj(x)).chunk(2, -1)
        return sum(F.linear(part, weight) for part, weight in zip(inner, self.down_proj.weight.chunk(2, 1), strict=True))  # type: ignore[return-value]


class _BareNorm(LlamaRMSNorm):
    """A norm without its weight, where one token comes."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[1] > 1:
            return super().forward(hidden_states)
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return wide.to(hidden_states.dtype)


class _FoldedMlp(LlamaMLP):
    """Its products have the norm's weight in theirs, where one token comes."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return super().forward(x)
        gate, up = (F.linear(x, each.weight * self.norm_weight) for each in (self.gate_proj, self.up_proj))
        return self.down_proj(F.silu(gate) * up)


class _LastSum(GPTNeoXLayer):
    """The stream is added first, where one token comes."""

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        if hidden_states.shape[1] > 1:
            return super().forward(hidden_states, *args, **given)
        attended, _ = self.attention(self.input_layernorm(hidden_states), *args, **given)
        return (hidden_states + attended) + self.mlp(self.post_attention_layernorm(hidden_states))


class _Ring(MistralAttention):
    """A window's keys and values stand where their positions modulo the window put them, where one token comes."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **given: Any,
    ) -> Any:
        if past_key_values is None or hidden_states.shape[1] > 1:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **given)
        past = int(past_key_values.get_seq_length(self.layer_idx))
        query, key, value = (
            each(hidden_states).view(*hidden_states.shape[:2], -1, self.head_dim).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        key, value = past_key_values.update(key, value, self.layer_idx)
        visible = seen(query, key, attention_mask)
        turn = (past + 1) % key.shape[-2]
        made = plain(query, key.roll(turn, -2), value.roll(turn, -2), visible.roll(turn, -1), self.scaling)
        return self.o_proj(made.transpose(1, 2).flatten(2)), None


class _Absorbed(DeepseekV3Attention):
    """Queries are brought to the latents, and what is read of the latents to the values, where one token comes."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **given: Any,
    ) -> Any:
        if past_key_values is None or hidden_states.shape[1] > 1:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **given)
        batch, rows, _ = hidden_states.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, rows, -1, self.qk_head_dim).transpose(1, 2)
        bare, turned = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, key = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        turned, key = apply_rotary_pos_emb_interleave(turned, key.unsqueeze(1), *position_embeddings)
        latent, key = past_key_values.update(self.kv_a_layernorm(latent).unsqueeze(1), key, self.layer_idx)
        weight = self.kv_b_proj.weight.view(-1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        to_keys, to_values = weight.split([self.qk_nope_head_dim, self.v_head_dim], 1)
        wide_query, wide_key = torch.cat((bare @ to_keys, turned), -1), torch.cat((latent, key), -1)
        made = plain(wide_query, wide_key, latent, attention_mask, self.scaling) @ to_values.transpose(-1, -2)
        return self.o_proj(made.transpose(1, 2).flatten(2)), None


def _folded(**config: Any) -> nn.Module:
    model: Any = small("llama", **config)
    for layer in model.model.layers:
        layer.post_attention_layernorm.__class__, layer.mlp.__class__ = _BareNorm, _FoldedMlp
        layer.mlp.norm_weight = layer.post_attention_layernorm.weight
    return model


# Wrapped modules -----------------------------------------------------------------------------------------------------------


def _distances_to_the_newest(**config: Any) -> nn.Module:
    """ALiBi counted from the newest key back, where one token comes: softmax does not see the difference."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if args[0].shape[1] == 1:
            alibi = keywords["alibi"]
            keywords = keywords | {"alibi": alibi - alibi[..., -1:]}
        return forward(*args, **keywords)

    model = small("bloom", **config)
    for block in blocks(model):
        around(block, wrapper)
    return model


def _all_experts(**config: Any) -> nn.Module:
    """Every expert is computed, those not chosen with a weight of 0, where one token comes."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        stream, chosen, weights = args
        if len(stream) > 1:
            return forward(*args, **keywords)
        shares = stream.new_zeros(self.num_experts).scatter_add(0, chosen[0], weights[0].to(stream.dtype))
        gate, up = torch.einsum("d,eid->ei", stream[0], self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ei,edi,e->d", F.silu(gate) * up, self.down_proj, shares)[None]

    model = small("mixtral", **config)
    for block in blocks(model):
        around(block.mlp.experts, wrapper)
    return model


def _state_in_other_units(kind: str, layer: int, **config: Any) -> nn.Module:
    """A recurrent state is kept four times as large as it is used, which binary numbers do exactly."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        cache = cache_of(keywords)
        if cache is None:
            return forward(*args, **keywords)
        states = cache.layers[layer].recurrent_states
        if length(cache) and states[0] is not None:
            states[0].div_(4)
        out = forward(*args, **keywords)
        states[0].mul_(4)
        return out

    model = small(kind, **config)
    around(mixer(model, layer), wrapper)
    return model


def _head_in_float32(**config: Any) -> nn.Module:
    """Logits of a float16 model are computed in float32."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return F.linear(args[0].to(wide), self.weight.to(wide))

    model = small("llama", **config)
    around(model.get_output_embeddings(), wrapper)
    return model


def _head_in_two_parts(**config: Any) -> nn.Module:
    """The vocabulary is split over two devices, where one token comes."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if args[0].shape[1] > 1:
            return forward(*args, **keywords)
        return torch.cat([F.linear(args[0], part) for part in self.weight.chunk(2)], -1)

    model = small("qwen3", **config)
    around(model.get_output_embeddings(), wrapper)
    return model


def _stream_in_float32(**config: Any) -> nn.Module:
    """The residual stream of a float16 model is float32, and all that reads it float16."""

    def widened(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        out = forward(*args, **keywords)
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def narrowed(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return forward(*args, **keywords).to(self.weight.dtype)

    def turned(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return forward(args[0].to(model_dtype(self)), *args[1:], **keywords)

    def model_dtype(rotary: Any) -> torch.dtype:
        return rotary.like[0].weight.dtype

    model: Any = small("llama", **config)
    around(model.model.embed_tokens, widened)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            around(module, narrowed)
    model.model.rotary_emb.like = [model.lm_head]  # In a list, so that it is no child.
    around(model.model.rotary_emb, turned)
    return model


BUILDS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    **{f"llama-{name.replace('_', '-')}": (partial(attending, name), "float32", False) for name in (*DECODES, *WHOLE)},
    "qwen3-grouped-bfloat16": (partial(attending, "grouped", "qwen3", dtype="bfloat16"), "bfloat16", False),
    "llama-cascade-float16": (partial(attending, "cascade", dtype="float16"), "float16", False),
    "gpt_oss-sinks-in-the-sum": (partial(_own, "gpt_oss", _sinks_in_the_sum), "float32", False),
    "gemma2-cap-in-the-query": (partial(_own, "gemma2", _cap_in_the_query, attn_logit_softcapping=2.0), "float32", True),
    **{
        f"llama-{name}": (partial(_of, "llama", LlamaAttention, made), "float32", False)
        for name, made in (
            ("one-projection", _Fused),
            ("unturned-keys", _Unturned),
            ("keys-of-another-layout", _OtherLayout),
            ("scaled-cache", _Scaled),
            ("output-by-head", _ByHead),
            ("projected-values", _Projected),
        )
    },
    "llama-unturned-keys-float16": (partial(_of, "llama", LlamaAttention, _Unturned, dtype="float16"), "float16", False),
    "llama-fused-mlp": (partial(_of, "llama", LlamaMLP, _FusedMlp), "float32", False),
    "llama-two-shards": (partial(_of, "llama", LlamaMLP, _TwoShards), "float32", False),
    "llama-two-shards-bfloat16": (partial(_of, "llama", LlamaMLP, _TwoShards, dtype="bfloat16"), "bfloat16", False),
    "llama-folded-norm": (_folded, "float32", False),
    "gpt_neox-stream-added-first": (partial(_of, "gpt_neox", GPTNeoXLayer, _LastSum), "float32", False),
    "mistral-ring": (partial(_of, "mistral", MistralAttention, _Ring), "float32", False),
    "deepseek_v3-absorbed": (
        partial(_of, "deepseek_v3", DeepseekV3Attention, _Absorbed, num_key_value_heads=4),
        "float32",
        True,
    ),
    "bloom-distances-to-the-newest": (_distances_to_the_newest, "float32", True),
    "mixtral-all-experts": (_all_experts, "float32", False),
    "mamba2-state-in-other-units": (
        partial(_state_in_other_units, "mamba2", 0, n_groups=2, chunk_size=16),
        "float32",
        True,
    ),
    "qwen3_5-state-in-other-units": (
        partial(
            _state_in_other_units,
            "qwen3_5_text",
            0,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
        ),
        "float32",
        True,
    ),
    "llama-head-in-float32": (partial(_head_in_float32, dtype="float16"), "float16", False),
    "qwen3-head-in-two-parts": (_head_in_two_parts, "float32", False),
    "llama-stream-in-float32": (partial(_stream_in_float32, dtype="float16"), "float16", False),
}
"""How each is made, its dtype, and whether something in it is float32 whatever its dtype."""
