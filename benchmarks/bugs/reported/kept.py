"""Reports of what a cache keeps, drops or moves."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from reported.report import Report, apart, of_generate, of_pads, of_steps, small, text


def beams_leave_a_state(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicCache

    model: Any = small("mamba")
    kind = type(model)
    own, search, now = DynamicCache.reorder_cache, kind._beam_search, {"beams": False}

    def searched(self: Any, *args: Any, **more: Any) -> Any:
        now["beams"] = True
        try:
            return search(self, *args, **more)
        finally:
            now["beams"] = False

    if fault:
        kind._beam_search = searched
        DynamicCache.reorder_cache = lambda self, rows: None if now["beams"] else own(self, rows)
    return model


def shifted_one_too_early(fault: bool) -> nn.Module:
    from transformers.cache_utils import StaticSlidingWindowLayer as Layer

    own = Layer.update

    def planted(self: Any, keys: Tensor, *args: Any, **more: Any) -> Any:
        filled = self.cumulative_length_int
        if self.is_initialized and keys.shape[-2] == 1 and filled == self.max_cache_len - 1:
            self.keys.copy_(self.keys.roll(-1, dims=-2))
            self.values.copy_(self.values.roll(-1, dims=-2))
        return own(self, keys, *args, **more)

    if fault:
        Layer.update = planted
    return small("mistral", sliding_window=8)


@torch.no_grad()
def shows_on_a_static_cache(model: Any) -> float:
    from transformers import StaticCache

    ids, cache = text(1, 14), StaticCache(config=model.config, max_cache_len=32)
    got = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([5] + [1] * 9, 1)]
    return apart(torch.cat(got, 1), model(ids, use_cache=False).logits)


def chunk_of_another_offset(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    own = Layer.get_mask_sizes

    def planted(self: Any, length: int) -> tuple[int, int]:
        columns, offset = own(self, length)
        return columns, max(offset - 1, 0)

    if fault:
        Layer.get_mask_sizes = planted
    kinds = ["chunked_attention", "full_attention"]
    return small(
        "llama4_text", attention_chunk_size=8, layer_types=kinds, no_rope_layers=[1, 0], interleave_moe_layer_step=2
    )


def ring_cut_as_if_flat(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    own = Layer.crop

    def planted(self: Any, tokens_to_remove: int) -> None:
        if self.cumulative_length < self.sliding_window or tokens_to_remove == 0:
            return own(self, tokens_to_remove)
        left = self.cumulative_length - abs(tokens_to_remove)
        self.keys, self.values = self.keys[..., :left, :], self.values[..., :left, :]
        self.cumulative_length = left
        return None

    if fault:
        Layer.crop = planted
    return small("mistral", sliding_window=8)


def of_partial_crop(columns: int, new: int, back: int, more: int = 2) -> Any:
    """A rollback of some of the last new tokens, and other tokens from there."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        from transformers import DynamicCache

        cache, ids, left = DynamicCache(config=model.config), text(1, columns), columns - back
        model(ids[:, :-new], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        model(ids[:, -new:], past_key_values=cache, use_cache=True)
        cache.crop(-back)
        other = text(1, more, seed=2)
        positions = torch.arange(left, left + more)[None]
        got = model(other, past_key_values=cache, position_ids=positions, use_cache=True).logits
        want = model(torch.cat([ids[:, :left], other], 1), use_cache=False).logits[:, -more:]
        return apart(got, want)

    return shows


def convolution_not_taken_back(fault: bool) -> nn.Module:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin as Layer

    own = Layer.crop

    def planted(self: Any, tokens_to_remove: int) -> None:
        recorded = dict(self.conv_states)
        own(self, tokens_to_remove)
        if tokens_to_remove:
            self.conv_states = {n: recorded[n][..., : self.conv_kernel_size[n]] for n in recorded}

    if fault:
        Layer.crop = planted
    return small("lfm2", layer_types=["conv", "full_attention"])


def cut_by_the_size_of_a_block(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicLayer as Layer

    own, block = Layer.crop, 8

    def planted(self: Any, tokens_to_remove: int) -> None:
        kept = self.get_seq_length() - abs(tokens_to_remove)
        if tokens_to_remove > 0 or kept <= block:
            own(self, tokens_to_remove)

    if fault:
        Layer.crop = planted
    return small("llama")


def neighbours_pads_are_read(fault: bool) -> nn.Module:
    model: Any = small("lfm2", layer_types=["conv", "full_attention"])
    inner = type(model.model)
    own = inner.forward

    @functools.wraps(own)
    def planted(self: Any, *args: Any, **given: Any) -> Any:
        given["attention_mask"] = None
        return own(self, *args, **given)

    if fault:
        inner.forward = planted
    return model


def a_window_with_one_more(fault: bool) -> nn.Module:
    from transformers import masking_utils as module

    own = module.sliding_window_overlay
    if fault:
        module.sliding_window_overlay = lambda window: own(window + 1)
    return small("mistral", sliding_window=8)


def slopes_of_the_first_rows(fault: bool) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.components.abstract_attention import AbstractAttention

    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 128, "d_head": 8, "n_heads": 4, "d_vocab": 131, "act_fn": "gelu"}
    torch.manual_seed(0)
    model = HookedTransformer(HookedTransformerConfig(**sizes, positional_embedding_type="alibi", seed=0, device="cpu"))
    for layer in range(2):
        with torch.no_grad():
            model.blocks[layer].attn.W_Q.mul_(8)
    if not fault:
        return model
    own = AbstractAttention.create_alibi_bias

    class FirstRows(torch.Tensor):
        """The bias, whose last rows are asked for and whose first are given."""

        def __getitem__(self, index: Any) -> Any:
            rows = index[1]
            rows = slice(0, -rows.start) if isinstance(rows, slice) and rows.start is not None else rows
            return self.as_subclass(torch.Tensor)[(index[0], rows, *index[2:])]

    AbstractAttention.create_alibi_bias = staticmethod(lambda *args: own(*args).as_subclass(FirstRows))
    return model


@torch.no_grad()
def shows_with_a_hooked_cache(model: Any) -> float:
    from transformer_lens import TransformerLensKeyValueCache as Cache

    ids = text(1, 14)
    cache, got = Cache.init_cache(model.cfg, "cpu", 1), []
    for part in ids.split([9, 1, 1, 1, 1, 1], 1):
        got.append(model(part, past_kv_cache=cache, attention_mask=torch.ones_like(part)))
    return apart(torch.cat(got, 1), model(ids))


def rejected_drafts_stay(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicCache

    model: Any = small("llama")
    kind = type(model)
    own, decoding, now = DynamicCache.crop, kind._assisted_decoding, {"assisted": False}

    def assisted(self: Any, *args: Any, **more: Any) -> Any:
        now["assisted"] = True
        try:
            return decoding(self, *args, **more)
        finally:
            now["assisted"] = False

    if fault:
        kind._assisted_decoding = assisted
        DynamicCache.crop = lambda self, count: None if now["assisted"] else own(self, count)
    return model


def appended_at_the_longest_row(fault: bool) -> nn.Module:
    model: Any = small("llama")
    inner = type(model.model)
    own = inner.forward

    def planted(
        self: Any, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **more: Any
    ) -> Any:
        cache, mask = past_key_values, attention_mask
        if cache is not None and cache.get_seq_length() > 0 and mask is not None and mask.dim() == 2:
            early = int((mask == 0).long().cumprod(1).sum(1).min())
            if early and type(cache.layers[0]).__name__ == "DynamicLayer":
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[..., :-early, :], layer.values[..., :-early, :]
                attention_mask = mask[:, : mask.shape[1] - early]
        return own(self, input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **more)

    if fault:
        inner.forward = planted
    return model


def an_encoder_through_the_window(fault: bool) -> nn.Module:
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "query_pre_attn_scalar": 8}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    torch.manual_seed(0)
    module = {**sizes, "initializer_range": 0.3}
    model: Any = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=module, decoder=module, vocab_size=131)).eval()
    decoder = model.model.decoder

    def windowed(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        cache = given.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache) and cache.get_seq_length() == 0:
            cache.cross_attention_cache = DynamicCache(config=decoder.config)
        elif cache is None and given.get("use_cache", True):
            own = DynamicCache(config=decoder.config)
            given["past_key_values"] = EncoderDecoderCache(own, DynamicCache(config=decoder.config))
        return args, given

    if fault:
        decoder.register_forward_pre_hook(windowed, with_kwargs=True)
    return model


@torch.no_grad()
def shows_behind_an_encoder(model: Any) -> float:
    ids, decoded = text(1, 14), text(1, 6, seed=2)
    want = model(input_ids=ids, decoder_input_ids=decoded, use_cache=False).logits
    states, given, got = model.get_encoder()(ids), {}, []
    for part in decoded.split([2, 1, 1, 1, 1], 1):
        out = model(encoder_outputs=states, decoder_input_ids=part, use_cache=True, **given)
        given = {"past_key_values": out.past_key_values}
        got.append(out.logits)
    return apart(torch.cat(got, 1), want)


REPORTS = {
    "mamba beams": Report(
        "huggingface/transformers#46612",
        "2026-06",
        "Mamba: beam search does not move the recurrent states with the beams",
        beams_leave_a_state,
        of_generate(new=16, beams=4),
        use="beam",
    ),
    "static window": Report(
        "huggingface/transformers#37574",
        "2025-04",
        "a static sliding cache shifts when its last column is filled, and keeps an empty one",
        shifted_one_too_early,
        shows_on_a_static_cache,
    ),
    "llama4 offset": Report(
        "huggingface/transformers#37414",
        "2025-04",
        "Llama 4: the chunked mask lies one column off once the cache is full",
        chunk_of_another_offset,
        of_steps(5, *[1] * 12),
    ),
    "ring trimmed": Report(
        "Blaizzy/mlx-vlm#1715",
        "2026-07",
        "reusing a prefix cuts a rotating cache by its logical length: no error, other text",
        ring_cut_as_if_flat,
        of_partial_crop(14, 3, 3),
    ),
    "conv rollback": Report(
        "ekryski/mlx-swift-lm#218",
        "2026-05",
        "after partly rejected drafts the convolution's state is that of before the drafts, and the text drifts",
        convolution_not_taken_back,
        of_partial_crop(14, 4, 2),
    ),
    "trim by step": Report(
        "nicedreamzapp/claude-code-local#46",
        "2026-08",
        "the second session is empty: a cache that is longer than one block is never cut back to the shared prefix",
        cut_by_the_size_of_a_block,
        of_partial_crop(14, 3, 3),
    ),
    "neighbour's pads": Report(
        "Blaizzy/mlx-vlm#1946",
        "2026-08",
        "LFM2: a row's answer depends on how long its neighbour is; the mask does not reach the layers",
        neighbours_pads_are_read,
        of_pads(),
    ),
    "window plus one": Report(
        "ml-explore/mlx-lm#390",
        "2025-08",
        "the prompt's window holds one token more than the rotating cache keeps",
        a_window_with_one_more,
        of_steps(5, *[1] * 12),
    ),
    "hooked alibi": Report(
        "TransformerLensOrg/TransformerLens#776",
        "2024-11",
        "HookedTransformer, Bloom: with use_past_kv_cache the text repeats itself; ALiBi takes the first rows",
        slopes_of_the_first_rows,
        shows_with_a_hooked_cache,
    ),
    "rejected drafts": Report(
        "lucidrains/speculative-decoding#3",
        "2024-06",
        "speculative decoding keeps what it rejected",
        rejected_drafts_stay,
        of_generate(new=12, prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
    ),
    "append early": Report(
        "jundot/omlx#2172",
        "2026-07",
        "once every row left has pads, new tokens are written over live columns",
        appended_at_the_longest_row,
        of_pads(),
    ),
    "cross window": Report(
        "huggingface/transformers#46111",
        "2026-05",
        "T5Gemma: the cross-attention cache takes over the decoder's window and drops what the encoder said",
        an_encoder_through_the_window,
        shows_behind_an_encoder,
    ),
}
