"""Bugs planted by one who had not read the audit: in decodes of another form than the prompt's, in routers, and where one seldom looks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

from bank import blind_plants as plants
from bank import clean_blind
from bank.bug import Bug, Plant
from bank.clean_blind import plain, seen
from bank.planting import Now, around, bend, cache_of, edited, length, mixer, rotate, state_before, watched

BRAIN, HALF = torch.bfloat16, torch.float16


def _becomes(old: type, new: type, *, layer: int | None = 1) -> Plant:
    """Modules of a class become those of another: in one layer, or everywhere."""

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        for module in model.modules():
            if type(module) is old and (layer is None or module.layer_idx == layer):
                module.__class__ = new

    return plant


# Another form, with an error in it ------------------------------------------------------------------------------------------


class _NormForgotten(clean_blind._Absorbed):
    """The absorbed form keeps the latent of a new token without its norm."""

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        norm = self.kv_a_layernorm
        if given.get("past_key_values") is not None and hidden_states.shape[1] == 1:
            self.kv_a_layernorm = nn.Identity()
        try:
            return super().forward(hidden_states, *args, **given)
        finally:
            self.kv_a_layernorm = norm


class _Attention(clean_blind._Attention):
    """Llama's own attention where nothing is on a cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        cache = given.get("past_key_values")
        if cache is None or not int(cache.get_seq_length(self.layer_idx)):
            return LlamaAttention.forward(self, hidden_states, *args, **given)
        return super().forward(hidden_states, *args, **given)


class _TurnedInBfloat16(_Attention):
    """Queries and keys are turned by a matrix that is kept in bfloat16, and so is no rotation any more."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if past:
            drawn = torch.randn(
                self.head_dim, self.head_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            turn = torch.linalg.qr(drawn).Q.to(BRAIN).to(query.dtype)
            query, key = query @ turn, key @ turn
        return plain(query, key, value, mask, self.scaling)


class _UnturnedOffByOne(clean_blind._Unturned):
    """Keys are kept unturned, and the queries of several tokens on a cache stand one slot too early."""

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        if given.get("past_key_values") is None:
            return LlamaAttention.forward(self, hidden_states, *args, **given)
        return super().forward(hidden_states, *args, **given)

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        start = past - 1 if past and query.shape[-2] > 1 else past
        query = rotate(query, *self._angles(start, start + query.shape[-2], query))
        return plain(query, rotate(key, *self._angles(0, key.shape[-2], key)), value, mask, self.scaling)


class _PaddingNotInTheRing(clean_blind._Ring):
    """A ring turns keys and values, and leaves the mask of the padding where it was."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **given: Any,
    ) -> Any:
        if attention_mask is None or past_key_values is None or hidden_states.shape[1] > 1:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **given)
        past = int(past_key_values.get_seq_length(self.layer_idx))
        keys = min(past + 1, self.config.sliding_window)
        turned = attention_mask[..., -keys:].roll(-((past + 1) % keys), -1)
        return super().forward(hidden_states, position_embeddings, turned, past_key_values, **given)


class _BiasTwice(Starcoder2MLP):
    """Two devices add their parts, and each adds the bias."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not Now.past:
            return super().forward(hidden_states)
        return super().forward(hidden_states) + self.c_proj.bias


class _PrefixTwice(_Attention):
    """Of a cascade of prefix and rest, the last key of the prefix is in both."""

    def attended(self, stream: Tensor, angles: Any, mask: Any, cache: Any, past: int) -> Tensor:
        query, key, value = self.projected(stream)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if past < 8 or query.shape[-2] > 1:
            return plain(query, key, value, mask, self.scaling)
        visible = seen(query, key, mask)
        twice = [torch.cat((each[..., :8, :], each[..., 7:, :]), -2) for each in (key, value)]
        return plain(query, *twice, torch.cat((visible[..., :8], visible[..., 7:]), -1), self.scaling)


# Routers --------------------------------------------------------------------------------------------------------------------


def _router_in(dtype: torch.dtype) -> Plant:
    """Where it decodes, a router computes in a narrower dtype."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if not Now.past:
            return forward(*args, **keywords)
        stream = args[0].reshape(-1, self.hidden_dim)
        logits = F.linear(stream.to(dtype), self.weight.to(dtype)).to(stream.dtype)
        chances = logits.float().softmax(-1)
        weights, chosen = chances.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights
        return logits, weights.to(stream.dtype), chosen

    def plant(model: nn.Module, monkeypatch: Any) -> None:
        around(watched(model).get_submodule("model.layers.1.mlp.gate"), wrapper)

    return plant


def _ties_to_the_other(model: nn.Module, monkeypatch: Any) -> None:
    """Where it decodes, one expert's score is 0.3 higher: only tokens that are near a tie choose otherwise."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        found = forward(*args, **keywords)
        if not Now.past:
            return found
        logits = edited(found[0], lambda t: t[..., 0].add_(0.3))
        chosen = logits.topk(found[2].shape[-1], -1).indices
        chances = found[0].float().softmax(-1).gather(-1, chosen)
        return found[0], (chances / chances.sum(-1, keepdim=True)).to(found[1].dtype), chosen

    around(watched(model).get_submodule("model.layers.0.mlp.gate"), wrapper)


# Where one seldom looks -----------------------------------------------------------------------------------------------------


def _last_shard_of_the_vocabulary(model: nn.Module, monkeypatch: Any) -> None:
    """Where it decodes, tokens of the vocabulary's last shard have no embedding."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        found = forward(*args, **keywords)
        return found * (args[0] < 64).unsqueeze(-1) if Now.past else found

    around(watched(model).get_submodule("model.embed_tokens"), wrapper)


def _row_before_is_kept(model: nn.Module, monkeypatch: Any) -> None:
    """Asked for the last row alone, the head takes the one before, where there is one and a cache."""
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        ids = args[0] if args else keywords.get("input_ids")
        if keywords.get("logits_to_keep") == 1 and ids is not None and ids.shape[1] > 1 and cache_of(keywords) is not None:
            out = base.forward(self, *args, **keywords | {"logits_to_keep": 2})
            out.logits = out.logits[:, :1]
            return out
        return base.forward(self, *args, **keywords)

    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _positions_from_the_mask(model: nn.Module, monkeypatch: Any) -> None:
    """Given a mask and no positions, a decode counts the mask's ones and forgets to start from 0."""
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        mask, ids = keywords.get("attention_mask"), args[0] if args else keywords.get("input_ids")
        if mask is not None and mask.ndim == 2 and keywords.get("position_ids") is None and length(cache_of(keywords)):
            keywords["position_ids"] = mask.cumsum(1)[:, -ids.shape[1] :]
        return base.forward(self, *args, **keywords)

    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _first_rows_selected(select: Callable) -> Callable:
    @functools.wraps(select)
    def wrong(self: Any, indices: Tensor) -> None:
        if self.get_seq_length() > 0:
            self.values = self.values[: len(indices)]
            self.keys = self.keys[indices, ...]

    return wrong


def _padding_enters_the_state(model: nn.Module, monkeypatch: Any) -> None:
    """A prompt that fills a cache forgets which of its tokens are padding."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        cached = cache_of(keywords) is not None
        return forward(*args, **(keywords | {"attention_mask": None} if cached else keywords))

    around(mixer(model, 0), wrapper)


def _table_ends(model: nn.Module, monkeypatch: Any) -> None:
    """A table of angles that ends at 128: later positions read its last row."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if Now.past:
            keywords = {n: v.clamp(max=127) if n == "position_ids" else v for n, v in keywords.items()}
        return forward(*args, **keywords)

    around(watched(model).get_submodule("model.rotary_emb"), wrapper)


def _third_row(model: nn.Module, monkeypatch: Any) -> None:
    """Only the third row of a batch reads another's values."""

    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        return (k, edited(v, lambda t: t[2].copy_(t[1]))) if past and len(v) > 2 else (k, v)

    bend(model, 1, read=read)


def _low_rank_part_missing(model: nn.Module, monkeypatch: Any) -> None:
    """An adapter of rank 1, small, is merged for prompts and missing where it decodes."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        found = forward(*args, **keywords)
        if not Now.past:
            return found
        draw = torch.Generator().manual_seed(5)
        out, within = (torch.randn(size, generator=draw, dtype=torch.float64) for size in self.weight.shape)
        return found - 1e-3 * (args[0] @ within.to(found.dtype)).unsqueeze(-1) * out.to(found.dtype)

    around(watched(model).get_submodule("model.layers.1.self_attn.v_proj"), wrapper)


def _state_decays_in_bfloat16(model: nn.Module, monkeypatch: Any) -> None:
    """A state loses 20% a step, in bfloat16 alone: as a kernel might that exists only there."""

    def decay(cached: Any, past: int) -> None:
        states = cached.recurrent_states
        if states[0].dtype == BRAIN or model_is_bfloat16[0]:
            states[0].mul_(0.8)

    model_is_bfloat16 = [False]

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        model_is_bfloat16[0] = next(self.parameters()).dtype == BRAIN
        return forward(*args, **keywords)

    state_before(model, 0, decay)
    around(mixer(model, 0), wrapper)


def _scale_of_the_embedding(model: nn.Module, monkeypatch: Any) -> None:
    """Where it decodes, the scale of the embedding is rounded to bfloat16."""

    def wrapper(self: Any, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        found = forward(*args, **keywords)
        if not Now.past:
            return found
        exact = torch.tensor(self.weight.shape[1] ** 0.5, dtype=torch.float64)
        return found * (exact.to(BRAIN).double() / exact).to(found.dtype)

    around(watched(model).get_submodule("model.embed_tokens"), wrapper)


def _request_before(model: nn.Module, monkeypatch: Any) -> None:
    """Where the request before had a prompt of another length, a decode stands one position late: a counter that is not reset."""
    counted = [0, 0]

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        if not Now.past:
            counted[:] = counted[1], Now.rows
        elif counted[0] and counted[0] != counted[1]:
            keywords = {n: v + 1 if n == "position_ids" else v for n, v in keywords.items()}
        return forward(*args, **keywords)

    around(watched(model).get_submodule("model.rotary_emb"), wrapper)


def _last_position(model: nn.Module, monkeypatch: Any) -> None:
    """The last position of the context reads the row before its own."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        return forward(*(a.clamp(max=254) if Now.past else a for a in args), **keywords)

    around(watched(model).get_submodule("transformer.wpe"), wrapper)


def _padding_forgotten_in_a_chunk(model: nn.Module, monkeypatch: Any) -> None:
    """Several tokens on a cache see its padding."""

    def wrapper(self: nn.Module, forward: Callable[..., Any], args: tuple, keywords: dict) -> Any:
        mask, rows = keywords.get("attention_mask"), args[0].shape[1] if args else keywords["input_ids"].shape[1]
        if mask is not None and mask.ndim == 2 and rows > 1 and length(cache_of(keywords)):
            keywords = keywords | {"attention_mask": torch.ones_like(mask)}
        return forward(*args, **keywords)

    around(model, wrapper)


def _rows_of_a_chunk_read_the_first(model: nn.Module, monkeypatch: Any) -> None:
    """In a batch, several tokens at once on a cache read the first row's keys of what was there before."""

    def read(k: Tensor, v: Tensor, past: int, cache: Any) -> tuple[Tensor, Tensor]:
        if not past or k.shape[-2] - past < 2 or len(k) < 2:
            return k, v
        return edited(k, lambda t: t[..., :past, :].copy_(t[:1, ..., :past, :].expand_as(t[..., :past, :]).clone())), v

    bend(model, 1, read=read)


CASTS = ("router-in-bfloat16", "output-of-a-block-in-float16")

BUGS = (
    Bug(
        "absorbed-latent-without-its-norm",
        "deepseek_v3",
        _becomes(DeepseekV3Attention, _NormForgotten),
        (1,),
        (),
        2.8e-02,
        config={"num_key_value_heads": 4},
    ),
    Bug("turned-by-a-matrix-in-bfloat16", "llama", _becomes(LlamaAttention, _TurnedInBfloat16), (1,), (), 5.7e-04),
    Bug(
        "unturned-keys-one-slot-early-in-a-chunk",
        "llama",
        _becomes(LlamaAttention, _UnturnedOffByOne),
        (1,),
        (),
        5.5e-02,
        path="chunks",
    ),
    Bug(
        "padding-not-in-the-ring",
        "mistral",
        _becomes(MistralAttention, _PaddingNotInTheRing, layer=0),
        (0,),
        (),
        1.2e-01,
        lengths=(9, 16),
        path="batch",
    ),
    Bug(
        "bias-added-by-both-devices",
        "starcoder2",
        lambda model, monkeypatch: _becomes(Starcoder2MLP, _BiasTwice, layer=None)(watched(model), monkeypatch),
        (0,),
        (),
        2.5e-01,
    ),
    Bug("one-key-in-both-parts-of-a-cascade", "llama", _becomes(LlamaAttention, _PrefixTwice), (1,), (), 4.8e-02),
    Bug("router-in-bfloat16", "qwen3_moe", _router_in(BRAIN), (1,), (), 1.0e-01),
    Bug("near-ties-of-a-router-to-the-first-expert", "mixtral", _ties_to_the_other, (0,), (), 1.5e-01),
    Bug("last-shard-of-the-vocabulary-lost", "qwen2", _last_shard_of_the_vocabulary, (None, -1, 0), (), 9.6e-01),
    Bug("last-row-alone-is-the-row-before", "qwen3", _row_before_is_kept, (None, 0, 1, 2), (), 5.5e-01, path="generate"),
    Bug("positions-from-the-mask-start-at-one", "gpt2", _positions_from_the_mask, (None, -1, 0), (), 1.8e-01, path="mask"),
    Bug(
        "rows-selected-but-their-values",
        "llama",
        plants.patched(DynamicLayer, "batch_select_indices", _first_rows_selected),
        (0, None),
        ("V",),
        7.8e-01,
        path="select",
    ),
    Bug("padding-enters-the-state", "qwen3_5_text", _padding_enters_the_state, (0,), (), 5.4e-02, path="batch"),
    Bug("table-of-angles-ends-at-128", "llama", _table_ends, (0, None), (), 2.0e-01, path="long"),
    Bug("third-row-reads-the-seconds-values", "llama", _third_row, (1, None), (), 4.7e-01, path="thirds"),
    Bug("adapter-missing-in-decode", "llama", _low_rank_part_missing, (1,), ("V", "model.layers.1.self_attn"), 1.3e-04),
    Bug(
        "output-of-a-block-in-float16",
        "olmo2",
        plants.returns("model.layers.0", lambda x: x.half().to(x.dtype)),
        (0,),
        (),
        2.4e-04,
    ),
    Bug("scale-of-the-embedding-in-bfloat16", "gemma", _scale_of_the_embedding, (None, -1, 0), (), 4.6e-05),
    Bug("state-decays-in-bfloat16-alone", "qwen3_5_text", _state_decays_in_bfloat16, (0,), (), 7.9e-02, dtype="bfloat16"),
    Bug(
        "values-of-one-head-off-by-1e-4-in-float32-alone",
        "llama",
        plants.reads(1, lambda k, v, p: (k, edited(v, lambda t: t[:, 0].mul_(1.0001)) if v.dtype == torch.float32 else v)),
        (1,),
        ("V",),
        7.9e-05,
    ),
    Bug(
        "keys-off-by-one-percent-beyond-128",
        "qwen3",
        plants.reads(0, lambda k, v, p: (edited(k, lambda t: t[..., 128:, :].mul_(1.01)), v)),
        (0, None),
        (),
        1.4e-03,
        path="long",
    ),
    Bug(
        "values-off-by-two-ulps-in-bfloat16-alone",
        "llama",
        plants.reads(0, lambda k, v, p: (k, v * (1 + 2**-6) if v.dtype == BRAIN else v)),
        (0,),
        ("V",),
        1.2e-02,
        dtype="bfloat16",
    ),
    Bug(
        "one-token-on-the-cache-is-not-seen",
        "mistral",
        plants.reads(0, lambda k, v, p: (k, v * 0.5 if p == 1 else v)),
        (0, None),
        (),
        3.5e-01,
        path="one",
    ),
    Bug("counter-left-by-the-request-before", "llama", _request_before, (0, None), (), 9.3e-02, path="twice"),
    Bug("last-position-of-the-context-twice", "gpt2", _last_position, (None, -1, 0), (), 6.8e-01, path="end"),
    Bug(
        "padding-forgotten-by-a-chunk", "llama", _padding_forgotten_in_a_chunk, (0, None), (), 1.8e-01, path="padded-chunks"
    ),
    Bug(
        "rows-of-a-chunk-read-the-first-rows-keys",
        "qwen2",
        _rows_of_a_chunk_read_the_first,
        (1, None),
        (),
        9.3e-02,
        path="padded-chunks",
    ),
    Bug(
        "padding-enters-a-convolution",
        "lfm2",
        _padding_enters_the_state,
        (0,),
        (),
        8.7e-03,
        config={"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        path="batch",
    ),
)
