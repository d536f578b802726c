"""Planted cache bugs of the kinds engineers report, each found: the word, the layer, the tensor and the position.

Each plant changes transformers' own code for the length of one test, in the cached step only, as the real bugs did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import WINDOW, build

from kvinterp.auditing import audit

pytestmark = [pytest.mark.bits, pytest.mark.slow]

PREFILL = 9


@dataclasses.dataclass(frozen=True)
class Plant:
    """A bug and what the audit must say about it.

    Attributes:
        name: What it is, and where such a one was reported.
        architecture: The model it is planted in.
        plant: Plants it.
        layer: The first wrong layer.
        tensor: The first wrong tensor, or the start of the module's name.
        position: The first wrong absolute position.
        rungs: Precisions to climb.
        prefill: Prompt length.
        verdict: The word.
    """

    name: str
    architecture: str
    plant: Callable[[pytest.MonkeyPatch], None]
    layer: int
    tensor: str
    position: int
    rungs: tuple[str, ...] = ("float32", "float64")
    prefill: int = PREFILL
    verdict: str = "bug"


def on_update(change: Callable[[Any, Any, Any, int, bool], Any], layer: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes what one layer's cache is given or gives; ``change`` gets store, keys, values, layer, and if it is decoding."""
    from transformers.cache_utils import Cache

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Cache.update

        def update(self: Any, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            def store(k: Any, v: Any, at: int = layer_idx) -> Any:
                return original(self, k, v, at, *args, **kwargs)

            return change(store, keys, values, self, keys.shape[2] == 1) if layer_idx == layer else store(keys, values)

        patch.setattr(Cache, "update", update)

    return plant


def key_wrong_by_a_thousandth(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    return store(k * 1.001 if decoding else k, v)


def keys_where_values_belong(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    return store(k, k if decoding else v)


def zeros_for_a_prefix(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    if decoding:
        return store(k, v)
    kept = k.clone(), v.clone()
    kept[0][:, :, 2:5], kept[1][:, :, 2:5] = 0, 0
    store(*kept)
    return k, v


def bits_of_another_dtype(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    wrong = decoding and k.dtype == torch.bfloat16
    return store(k.view(torch.float16).to(k.dtype) if wrong else k, v)


def heads_in_reverse(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    return store(k, v.flip(1) if decoding else v)


def first_position_dropped(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    keys, values = store(k, v)
    return (keys[:, :, 1:], values[:, :, 1:]) if decoding else (keys, values)


def another_layers_cache(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    keys, values = store(k, v)
    if not decoding:
        return keys, values
    other = cache.layers[0]
    return other.keys[:, :, : keys.shape[2]], other.values[:, :, : values.shape[2]]


def newest_written_twice(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    keys, values = store(k, v)
    if decoding:
        keys, values = keys.clone(), values.clone()
        keys[:, :, -2], values[:, :, -2] = keys[:, :, -1], values[:, :, -1]
    return keys, values


def keys_in_bfloat16(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    keys, values = store(k.to(torch.bfloat16).to(k.dtype), v)
    return (keys, values) if decoding else (k, v)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Rotary

    original = Rotary.forward
    patch.setattr(Rotary, "forward", lambda s, x, position_ids: original(s, x, position_ids + (x.shape[1] == 1)))


def learned_position_stuck(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    original = GPT2Model.forward

    def forward(self: Any, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and input_ids.shape[1] == 1:
            kwargs["position_ids"] = torch.tensor([[PREFILL - 1]])
        return original(self, input_ids, past_key_values, **kwargs)

    patch.setattr(GPT2Model, "forward", forward)


def mask_made_once(patch: pytest.MonkeyPatch) -> None:
    """Each cached step is masked as the first row of a mask made for the first one: it sees positions 0 to 5 only."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.create_causal_mask

    def masks(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if not past:
            return original(*args, past_key_values=past_key_values, **kwargs)
        return (torch.arange(past + 1) < 6)[None, None, None]

    patch.setattr(modeling_llama, "create_causal_mask", masks)


def window_missing_in_decode(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    from transformers.models.mistral import modeling_mistral

    original = modeling_mistral.create_sliding_window_causal_mask
    for name in ("update", "get_seq_length", "get_mask_sizes"):
        patch.setattr(DynamicSlidingWindowLayer, name, getattr(DynamicLayer, name))

    def masks(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        decoding = past_key_values is not None and past_key_values.get_seq_length()
        return None if decoding else original(*args, past_key_values=past_key_values, **kwargs)

    patch.setattr(modeling_mistral, "create_sliding_window_causal_mask", masks)


def soft_cap_missing_in_decode(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention as Attention

    original = Attention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.attn_logit_softcapping
        if hidden_states.shape[1] == 1 and self.layer_idx == 1:
            self.attn_logit_softcapping = None
        try:
            return original(self, hidden_states, *args, **kwargs)
        finally:
            self.attn_logit_softcapping = before

    patch.setattr(Attention, "forward", forward)


def other_scale_in_decode(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention as Attention

    original = Attention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.scaling
        self.scaling = before * (1.02 if hidden_states.shape[1] == 1 and self.layer_idx == 2 else 1)
        try:
            return original(self, hidden_states, *args, **kwargs)
        finally:
            self.scaling = before

    patch.setattr(Attention, "forward", forward)


def slopes_of_other_heads(patch: pytest.MonkeyPatch) -> None:
    """The ALiBi bias of the wrong rows in a cached step (TransformerLens#776)."""
    from transformers.models.bloom import modeling_bloom

    decoding, forward, slopes = [False], modeling_bloom.BloomModel.forward, modeling_bloom._get_alibi_slopes

    def noting(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        decoding[0] = input_ids.shape[1] == 1
        return forward(self, input_ids, *args, **kwargs)

    def wrong(*args: Any) -> Any:
        return slopes(*args).roll(1) if decoding[0] else slopes(*args)

    patch.setattr(modeling_bloom, "_get_alibi_slopes", wrong)
    patch.setattr(modeling_bloom.BloomModel, "forward", noting)


def second_expert_forgotten(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Router

    original = Router.forward

    def forward(self: Any, hidden_states: Any) -> Any:
        logits, scores, indices = original(self, hidden_states)
        return logits, scores * torch.tensor([1.0, 0.0]) if hidden_states.shape[0] == 1 else scores, indices

    patch.setattr(Router, "forward", forward)


def state_kept(kind: str, layer: int) -> Callable[[pytest.MonkeyPatch], None]:
    """A state that cached steps use but no longer update (modular#6681)."""
    from transformers.cache_utils import Cache

    def plant(patch: pytest.MonkeyPatch) -> None:
        get, update = getattr(Cache, f"get_{kind}_state"), getattr(Cache, f"update_{kind}_state")

        def a_copy(self: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            held = get(self, layer_idx, *args, **kwargs)
            # Some models write the new state into the tensor they were given.
            return held.clone() if held is not None and layer_idx == layer else held

        def no_update(self: Any, new: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            held = get(self, layer_idx)
            return new if held is not None and layer_idx == layer else update(self, new, layer_idx, *args, **kwargs)

        patch.setattr(Cache, f"get_{kind}_state", a_copy)
        patch.setattr(Cache, f"update_{kind}_state", no_update)

    return plant


def norm_scaled_in_decode(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    original = Olmo2MLP.forward
    patch.setattr(Olmo2MLP, "forward", lambda s, x: original(s, x) * (1.01 if x.shape[1] == 1 else 1))


PLANTS = [
    Plant("a key wrong by 0.1% in one layer", "llama", on_update(key_wrong_by_a_thousandth, 1), 1, "K", PREFILL),
    Plant("K saved where V belongs", "qwen3", on_update(keys_where_values_belong, 2), 2, "V", PREFILL),
    Plant("zeros in place of a prefix (mlx-examples#977)", "gpt_neox", on_update(zeros_for_a_prefix, 0), 0, "K", 2),
    Plant(
        "bfloat16 bits read as float16 (vllm#54338)", "llama", on_update(bits_of_another_dtype, 1), 1, "K", PREFILL,
        rungs=("bfloat16", "float32"),
    ),
    Plant("KV heads in reverse", "qwen2", on_update(heads_in_reverse, 1), 1, "V", PREFILL),
    Plant("the first position dropped", "phi3", on_update(first_position_dropped, 1), 1, "K", 0),
    Plant("another layer's cache read", "starcoder2", on_update(another_layers_cache, 2), 2, "K", 0),
    Plant("the newest written over the one before", "olmoe", on_update(newest_written_twice, 0), 0, "K", PREFILL - 1),
    Plant("position off by one", "llama", position_off_by_one, 0, "Q", PREFILL),
    Plant("a learned position that does not move on", "gpt2", learned_position_stuck, -1, "embedding", PREFILL),
    Plant("a causal mask made only once (torchtune#959)", "llama", mask_made_once, 0, "attention mask", 6),
    Plant("the sliding window missing in decode", "mistral", window_missing_in_decode, 0, "attention mask", 0, prefill=WINDOW + 9),
    Plant("the soft cap missing in decode", "gemma2", soft_cap_missing_in_decode, 1, "attention scores", PREFILL),
    Plant("another attention scale in decode", "qwen2", other_scale_in_decode, 2, "attention output", PREFILL),
    Plant("ALiBi of the wrong rows (TransformerLens#776)", "bloom", slopes_of_other_heads, 0, "attention scores", PREFILL),
    Plant("the second expert forgotten in decode", "mixtral", second_expert_forgotten, 0, "model.layers.0.mlp", PREFILL),
    Plant("a stale recurrent state (modular#6681)", "mamba", state_kept("recurrent", 1), 1, "recurrent state", PREFILL),
    Plant("a stale recurrent state, Gated DeltaNet", "qwen3_5", state_kept("recurrent", 2), 2, "recurrent state", PREFILL),
    Plant("a convolution state that does not move on", "mamba2", state_kept("conv", 0), 0, "convolution state", PREFILL),
    Plant("an MLP scaled in decode", "olmo2", norm_scaled_in_decode, 0, "model.layers.0.mlp", PREFILL),
    Plant(
        "K kept in bfloat16 under a float32 model", "llama", on_update(keys_in_bfloat16, 1), 1, "K", 0, verdict="hidden-cast"
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "plant",
    # One in three by default: the bank holds many more of each kind. Experts are slow, and test_excuses.py plants in them.
    [
        pytest.param(p, id=p.name, marks=[pytest.mark.long] if number % 3 or p.architecture == "mixtral" else [])
        for number, p in enumerate(PLANTS)
    ],
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(plant.architecture)
    prompt = torch.randint(3, 131, (plant.prefill + 2,), generator=torch.Generator().manual_seed(5)).tolist()
    plant.plant(monkeypatch)
    verdict = audit(model, [prompt], rungs=plant.rungs, lengths=(plant.prefill,), steps=2, sweep="no", checks="none")
    assert (verdict.verdict, verdict.first_layer) == (plant.verdict, plant.layer), verdict.reading
    assert verdict.tensor.startswith(plant.tensor), verdict.reading
    assert verdict.first_position == plant.position, verdict.reading
    assert verdict.exit_code == 1
