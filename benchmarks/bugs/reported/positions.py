"""Reports of tokens that are given another position with a cache than without."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from reported.report import Report, changed, of_generate, of_steps, small, text


def single_tokens_without_position(fault: bool) -> nn.Module:
    model: Any = small("gpt2")

    def skipped(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.zeros_like(out) if out.shape[-2] == 1 else out

    if fault:
        model.transformer.wpe.register_forward_hook(skipped)
    return model


def drafts_numbered_one_too_far(fault: bool) -> nn.Module:
    model: Any = small("llama")
    kind, now = type(model), {"assisted": False}
    decoding, prepare = kind._assisted_decoding, kind.prepare_inputs_for_generation

    def assisted(self: Any, *args: Any, **more: Any) -> Any:
        now["assisted"] = True
        try:
            return decoding(self, *args, **more)
        finally:
            now["assisted"] = False

    @functools.wraps(prepare)
    def prepared(self: Any, input_ids: Tensor, **more: Any) -> Any:
        out = prepare(self, input_ids, **more)
        cache = out.get("past_key_values")
        if now["assisted"] and cache is not None and (length := int(cache.get_seq_length())) > 0:
            new = out["input_ids"]
            out["position_ids"] = torch.arange(length + 1, length + 1 + new.shape[1])[None].expand_as(new)
        return out

    if fault:
        kind._assisted_decoding, kind.prepare_inputs_for_generation = assisted, prepared
    return model


def frequencies_of_each_length(fault: bool) -> nn.Module:
    rope = {"rope_type": "dynamic" if fault else "default", "rope_theta": 1e4, "factor": 4.0}
    return small("llama", rope_parameters=rope, max_position_embeddings=24 if fault else 256)


def frequencies_of_the_longest_request(fault: bool) -> nn.Module:
    model: Any = small("llama")
    rotary, longest = model.model.rotary_emb, 16
    base = rotary.inv_freq.clone()

    def grown(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        nonlocal longest
        positions = given.get("position_ids", args[1] if len(args) > 1 else None)
        if not fault or positions is None:
            return
        module.longest = max(getattr(module, "longest", longest), int(positions.max()) + 1)
        stretch = module.longest / longest
        powers = torch.arange(len(base)) / len(base)
        module.inv_freq = (base * stretch ** (-powers)).to(module.inv_freq)

    rotary.register_forward_pre_hook(grown, with_kwargs=True)
    return model


@torch.no_grad()
def shows_after_a_longer_request(model: Any) -> float:
    ids = text(1, 12)
    want = model(ids, use_cache=False).logits
    model(text(1, 40), use_cache=False)
    got = model(ids, use_cache=False).logits
    return float((got - want).abs().max() / want.abs().max())


def shared_layers_read_a_moved_offset(fault: bool) -> nn.Module:
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 64}
    kinds = ["full_attention", "full_attention", "full_attention", "full_attention"]
    model: Any = small("gemma3n_text", **layers, layer_types=kinds, activation_sparsity_pattern=[0.0] * 4)
    inner = model.model

    def moved(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        if given.get("past_key_values") is None:
            return None
        states, positions = args[0] if args else given["hidden_states"], given["position_ids"]
        kind = layer.layer_type
        given["position_embeddings"] = inner.rotary_emb(states, positions + positions.shape[-1], kind)
        return args, given

    if fault:
        for layer in inner.layers:
            if layer.self_attn.is_kv_shared_layer:
                layer.self_attn.register_forward_pre_hook(moved, with_kwargs=True)
    return model


def no_mask_told(fault: bool) -> nn.Module:
    def change(ids: Tensor, cache: Any, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is None:
            given["attention_mask"] = torch.ones_like(ids)
            given["position_ids"] = None

    return changed("opt", change, fault, word_embed_proj_dim=32)


@torch.no_grad()
def shows_without_a_mask(model: Any) -> float:
    try:
        return of_steps(9, 1, 1)(model)
    except (RuntimeError, IndexError):
        return 1.0


def the_last_token_alone(fault: bool) -> nn.Module:
    model: Any = small("llama")
    own = type(model).prepare_inputs_for_generation

    @functools.wraps(own)
    def planted(self: Any, input_ids: Tensor, is_first_iteration: bool = False, **more: Any) -> Any:
        if not is_first_iteration and more.get("past_key_values") is None:
            more["next_sequence_length"] = 1
        return own(self, input_ids, is_first_iteration=is_first_iteration, **more)

    if fault:
        type(model).prepare_inputs_for_generation = planted
    return model


def one_embedding_at_every_step(fault: bool) -> nn.Module:
    model: Any = small("llama")
    own = type(model).prepare_inputs_for_generation

    @functools.wraps(own)
    def planted(
        self: Any, input_ids: Tensor, inputs_embeds: Any = None, is_first_iteration: bool = False, **more: Any
    ) -> Any:
        again = is_first_iteration or (inputs_embeds is not None and inputs_embeds.shape[1] == 1)
        return own(self, input_ids, inputs_embeds=inputs_embeds, is_first_iteration=again, **more)

    if fault:
        type(model).prepare_inputs_for_generation = planted
    return model


@torch.no_grad()
def shows_from_an_embedding(model: Any) -> float:
    ids, given = text(1, 1), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **given)
    return float(not torch.equal(got, model.generate(ids, **given)[:, 1:]))


REPORTS = {
    "gpt2 single": Report(
        "ml-explore/mlx-lm#93",
        "2025-04",
        "GPT-2: a forward of one token gets no position embedding, small models decode garbage",
        single_tokens_without_position,
        of_steps(9, 1, 1),
    ),
    "drafts": Report(
        "huggingface/transformers#30042, #30413",
        "2024-04",
        "with a draft model greedy decoding gives another text: drafted tokens have wrong positions",
        drafts_numbered_one_too_far,
        of_generate(prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
    ),
    "dynamic ntk": Report(
        "huggingface/transformers#25104",
        "2023-07",
        "dynamic NTK: cached keys keep the base of the length at which they were written",
        frequencies_of_each_length,
        of_steps(20, *[1] * 20),
    ),
    "ntk stays": Report(
        "huggingface/transformers#27226, #27227",
        "2023-11",
        "dynamic NTK: after a long text a short one is rotated with the long one's base",
        frequencies_of_the_longest_request,
        shows_after_a_longer_request,
    ),
    "gemma3n shared": Report(
        "ml-explore/mlx-lm#1396",
        "2026-06",
        "Gemma 3n: layers that share K and V rotate their queries by an offset that another layer has moved on",
        shared_layers_read_a_moved_offset,
        of_steps(9, 1, 1),
    ),
    "opt mask": Report(
        "huggingface/transformers#21685",
        "2023-02",
        "OPT: a cached forward without a mask raises: the mask is made for the new tokens alone",
        no_mask_told,
        shows_without_a_mask,
    ),
    "no cache": Report(
        "EricLBuehler/mistral.rs#765",
        "2024-09",
        "without a cache generation is garbage: the last token alone is fed",
        the_last_token_alone,
        of_generate(use_cache=False),
    ),
    "one embedding": Report(
        "huggingface/transformers#41863",
        "2025-10",
        "generate() from inputs_embeds of length 1 is incoherent: the embedding is fed at every step",
        one_embedding_at_every_step,
        shows_from_an_embedding,
    ),
}
