"""The first reports of the bank, found by those who wrote the programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reported.report import Report, apart, changed, of_chunks, of_pads, of_steps, small, text


def pads_reach_a_state(fault: bool) -> nn.Module:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    own = module.create_recurrent_attention_mask

    def planted(config: Any, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any = None, **more: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            return None
        return own(config, inputs_embeds, attention_mask, past_key_values, **more)

    if fault:
        module.create_recurrent_attention_mask = planted
    return small("qwen3_next", layer_types=["linear_attention", "full_attention"])


def mask_of_a_second_part_dropped(fault: bool) -> nn.Module:
    def change(ids: Tensor, cache: Any, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is not None and ids.shape[1] > 1:
            given["attention_mask"] = given["attention_mask"].clone()
            given["attention_mask"][:, cache.get_seq_length() :] = 1

    return changed("llama", change, fault)


def second_turn_numbered_from_0(fault: bool) -> nn.Module:
    model = small("llama")
    own = type(model).prepare_inputs_for_generation

    @functools.wraps(own)
    def planted(self: Any, input_ids: Tensor, past_key_values: Any = None, **more: Any) -> Any:
        out = own(self, input_ids, past_key_values=past_key_values, **more)
        new, cache = out.get("input_ids"), out.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0 and new is not None and new.shape[1] > 1:
            out["position_ids"] = torch.arange(new.shape[1])[None].expand_as(new)
        return out

    if fault:
        type(model).prepare_inputs_for_generation = planted  # type: ignore[method-assign]
    return model


def chunks_of_mamba2(zero: bool) -> Callable[[bool], nn.Module]:
    def build(fault: bool) -> nn.Module:
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Mixer

        own = Mixer.forward

        def planted(self: Any, hidden_states: Tensor, cache_params: Any = None, *args: Any, **more: Any) -> Tensor:
            many = hidden_states.shape[1] > 1 and cache_params is not None
            if not many or not cache_params.has_previous_state(self.layer_idx):
                return own(self, hidden_states, cache_params, *args, **more)
            if zero:
                return own(self, hidden_states, None, *args, **more)
            first = own(self, hidden_states[:, :1], cache_params, *args, **more)
            return first.expand(-1, hidden_states.shape[1], -1)

        if fault:
            Mixer.forward = planted
        return small("mamba2", n_groups=2, chunk_size=16)

    return build


def window_forgotten_while_recording(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    own = Layer.update

    def planted(self: Any, *args: Any, **more: Any) -> Any:
        out = own(self, *args, **more)
        return (self.keys, self.values) if self.record_past else out

    if fault:
        Layer.update = planted
    return small("mistral", sliding_window=8)


def keys_shared_through_the_cache(fault: bool) -> nn.Module:
    model: Any = small("llama", num_hidden_layers=4)
    source, reader = model.model.layers[1].self_attn, model.model.layers[3].self_attn
    kept: dict[str, Any] = {}

    def asked(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        kept["cache"] = given.get("past_key_values")

    reader.register_forward_pre_hook(asked, with_kwargs=True)
    for name in ("k_proj", "v_proj"):
        getattr(source, name).register_forward_hook(lambda m, a, out, name=name: kept.update({name: out}))
        getattr(reader, name).register_forward_hook(
            lambda m, a, out, name=name: kept[name] if kept["cache"] is not None or not fault else out
        )
    return model


def queries_turned_too_far(fault: bool) -> nn.Module:
    from transformers.models.llama import modeling_llama as module

    model: Any = small("llama")
    own, now = module.apply_rotary_pos_emb, dict[str, Any]()

    def asked(layer: nn.Module, args: Any, given: dict[str, Any]) -> None:
        states, positions = given["hidden_states"], given.get("position_ids")
        batch = given.get("past_key_values") is not None and states.shape[0] > 1 and positions is not None
        now["positions"] = positions + states.shape[1] if batch else None

    def planted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **more: Any) -> Any:
        turned, keys = own(q, k, cos, sin, *args, **more)
        if now.get("positions") is not None:
            turned, _ = own(q, k, *model.model.rotary_emb(q, now["positions"]), *args, **more)
        return turned, keys

    if fault:
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(asked, with_kwargs=True)
        module.apply_rotary_pos_emb = planted
    return model


def frequencies_that_switch(fault: bool) -> nn.Module:
    rope = {"rope_theta": 1e4, "rope_type": "longrope" if fault else "default"}
    longrope = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0], "factor": 8.0}
    rope |= {**longrope, "original_max_position_embeddings": 32} if fault else {}
    return small("phi3", rope_parameters=rope, original_max_position_embeddings=32, sliding_window=None)


def state_of_another_request(fault: bool) -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text = {**sizes, "num_hidden_layers": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
    }
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()
    if not fault:
        model.register_forward_pre_hook(lambda module, args: setattr(module.model, "rope_deltas", None))
    return model


class Scratch(nn.Module):
    """A model from scratch with learned positions, which every cached step begins at 0."""

    def __init__(self, fault: bool, width: int = 32) -> None:
        super().__init__()
        self.fault = fault
        self.tokens, self.positions, self.head = nn.Embedding(99, width), nn.Embedding(256, width), nn.Linear(width, 99)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        start = 0 if cache is None or self.fault else cache[0][0].shape[1]
        x, new = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1])), []
        for n, layer in enumerate(self.layers):
            q, k, v = layer(x).chunk(3, -1)
            if cache is not None:
                k, v = torch.cat([cache[n][0], k], 1), torch.cat([cache[n][1], v], 1)
            sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
            new.append((k, v))
        return self.head(x), new


def from_scratch(fault: bool) -> nn.Module:
    torch.manual_seed(0)
    return Scratch(fault).eval()


def pads_numbered(fault: bool) -> nn.Module:
    return small("gpt2") if fault else small("llama")


def a_step_forgets_pads(fault: bool) -> nn.Module:
    def change(ids: Tensor, cache: Any, given: dict[str, Any]) -> None:
        given["position_ids"] = torch.arange(ids.shape[1])[None].expand_as(ids) + cache.get_seq_length()

    return changed("gpt2", change, fault)


@torch.no_grad()
def shows_in_a_second_turn(model: Any) -> float:
    ids, other = text(1, 6), text(1, 4, seed=2)
    greedy = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    first = model.generate(ids, max_new_tokens=3, min_new_tokens=3, **greedy)
    whole = torch.cat([first.sequences, other], 1)
    more = {"attention_mask": torch.ones_like(whole), "past_key_values": first.past_key_values}
    second = model.generate(whole, max_new_tokens=1, **more, **greedy)
    return apart(second.logits[0], model(whole, use_cache=False).logits[:, -1])


@torch.no_grad()
def shows_on_a_cache_that_records(model: Any) -> float:
    from transformers import DynamicCache

    cache, ids, got = DynamicCache(config=model.config), text(1, 14), []
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    try:
        for part in ids.split([6] + [1] * 8, 1):
            got.append(model(part, past_key_values=cache, use_cache=True).logits)
    except RuntimeError:
        return 1.0
    return apart(torch.cat(got, 1), model(ids, use_cache=False).logits)


@torch.no_grad()
def shows_in_a_batch(model: Any) -> float:
    ids = text(2, 9)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    got = model(ids[:, 8:], past_key_values=cache, use_cache=True).logits[:, -1]
    return apart(got, torch.cat([model(row[None], use_cache=False).logits[:, -1] for row in ids]))


@torch.no_grad()
def shows_behind_another_request(model: Any) -> float:
    ids, ones = text(1, 8), torch.ones(1, 8, dtype=torch.long)
    want = model(ids, attention_mask=ones, use_cache=False).logits[:, -1]
    cache = model(ids[:, :7], attention_mask=ones[:, :7], use_cache=True).past_key_values
    model.generate(text(3, 5, seed=2), max_new_tokens=2, do_sample=False, pad_token_id=0)
    try:
        got = model(ids[:, 7:], attention_mask=ones, past_key_values=cache, use_cache=True).logits[:, -1]
    except RuntimeError:
        return 1.0
    return apart(got, want)


@torch.no_grad()
def shows_from_scratch(model: Any) -> float:
    ids = text(1, 11)
    want, (_, cache) = model(ids)[0], model(ids[:, :9])
    got, _ = model(ids[:, 9:10], cache)
    return apart(got, want[:, 9:10])


@torch.no_grad()
def shows_behind_pads_without_a_cache(model: Any) -> float:
    ids = text(1, 9)
    padded, mask = nn.functional.pad(ids, (4, 0), value=5), nn.functional.pad(torch.ones_like(ids), (4, 0))
    got = model(padded, attention_mask=mask, use_cache=False).logits[:, 4:]
    return apart(got, model(ids, use_cache=False).logits)


def earlier(
    link: str,
    date: str,
    symptom: str,
    build: Callable[[bool], Any],
    shows: Callable[[Any], float],
    use: str = "",
) -> Report:
    """A report found by those who wrote the programs."""
    return Report(link, date, symptom, build, shows, blind=False, use=use)


REPORTS = {
    "pads of a later part": earlier(
        "huggingface/transformers#47086",
        "2026-07",
        "pads in a second chunk or turn reach the recurrent state of a hybrid",
        pads_reach_a_state,
        of_chunks(),
    ),
    "its twin in attention": earlier(
        "of the same kind", "", "the mask of new columns is dropped", mask_of_a_second_part_dropped, of_chunks()
    ),
    "second turn": earlier(
        "huggingface/transformers#36151, #38727, #47597",
        "2025-02",
        "a second generate() on the first one's cache",
        second_turn_numbered_from_0,
        shows_in_a_second_turn,
    ),
    "Mamba2, first of a chunk": earlier(
        "huggingface/transformers#46032",
        "2026-05",
        "Mamba2: a chunk on a cache computes its first token alone",
        chunks_of_mamba2(zero=False),
        of_steps(6, 3, 3),
        "chunks",
    ),
    "Mamba2, from zero": earlier(
        "huggingface/transformers#46741",
        "2026-06",
        "Mamba2: a chunk begins from a state of zero",
        chunks_of_mamba2(zero=True),
        of_steps(6, 3, 3),
        "chunks",
    ),
    "assistant, window": earlier(
        "huggingface/transformers#48280",
        "2026-08",
        "with an assistant a window has more keys than its mask",
        window_forgotten_while_recording,
        shows_on_a_cache_that_records,
    ),
    "use_cache=False": earlier(
        "huggingface/transformers#45242",
        "2026-04",
        "use_cache=False gives garbage: K and V are shared through the cache",
        keys_shared_through_the_cache,
        of_steps(9, 1, 1),
    ),
    "offset": earlier(
        "ml-explore/mlx-lm#1699",
        "2026-08",
        "in a batch queries are rotated one forward too far",
        queries_turned_too_far,
        shows_in_a_batch,
    ),
    "longrope": earlier(
        "ggml-org/llama.cpp#24875, vllm-project/vllm#52665",
        "2026-06",
        "longrope: keys keep the frequencies of before the switch",
        frequencies_that_switch,
        of_steps(29, *[1] * 8),
    ),
    "state left behind": earlier(
        "huggingface/transformers#44158",
        "2026-02",
        "Qwen3-VL: rope_deltas of another request stay on the model",
        state_of_another_request,
        shows_behind_another_request,
    ),
    "from scratch": earlier(
        "Lightning-AI/litgpt#2165",
        "2025-11",
        "a model and cache of one's own: every cached step begins at position 0",
        from_scratch,
        shows_from_scratch,
    ),
    "left padding, positions": earlier(
        "unslothai/unsloth#3699", "2025-12", "decode counts the pads among its positions", a_step_forgets_pads, of_pads()
    ),
    "left padding, mask alone": earlier(
        "GPT-2, asked often",
        "",
        "left padding with a mask alone changes the answer",
        pads_numbered,
        shows_behind_pads_without_a_cache,
    ),
}
