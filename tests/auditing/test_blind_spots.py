"""Where the audit once looked away: prompts, tokens fed at once, dropout, casts beside a bug, and models at the edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build
from planting import on_update, quick

import kvinterp as kv

pytestmark = [pytest.mark.bits, pytest.mark.slow]


def small(kind: str, attention: str | None = None, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=131, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def in_attention(patch: pytest.MonkeyPatch, change: Callable[[int, int, dict[str, Any]], None], layer: int) -> None:
    """Changes what one Llama layer's attention is called with; ``change`` gets the new tokens, those cached, the arguments."""
    from transformers.models.llama.modeling_llama import LlamaAttention as Attention

    original = Attention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and self.layer_idx == layer:
            change(hidden_states.shape[1], cache.get_seq_length(layer), kwargs)
        return original(self, hidden_states, *args, **kwargs)

    patch.setattr(Attention, "forward", forward)


def where(verdict: Any) -> tuple[Any, ...]:
    return verdict.verdict, verdict.first_layer, verdict.tensor, verdict.first_position


# Several tokens at once ------------------------------------------------------------------------------------------------


def test_a_prompt_that_sees_the_future_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the cached prefill is wrong, and in the last layer, so that no key and no later token is."""

    def change(new: int, past: int, kwargs: dict[str, Any]) -> None:
        if new > 1 and not past:
            kwargs["attention_mask"] = torch.ones(new, new, dtype=torch.bool).tril(1)[None, None]

    in_attention(monkeypatch, change, 2)
    verdict = quick(build("llama"))
    assert where(verdict) == ("bug", 2, "attention mask", 1), verdict.reading
    assert "a prompt's 9 tokens" in verdict.reading


def test_a_last_row_of_the_prompt_that_misses_a_key_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(new: int, past: int, kwargs: dict[str, Any]) -> None:
        if new > 4 and not past:
            mask = torch.ones(new, new, dtype=torch.bool).tril()
            mask[-1, 3] = False
            kwargs["attention_mask"] = mask[None, None]

    in_attention(monkeypatch, change, 0)
    verdict = quick(build("llama"))
    assert where(verdict) == ("bug", 0, "attention mask", 3), verdict.reading


def test_tokens_fed_at_once_on_a_cache_are_exercised(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(new: int, past: int, kwargs: dict[str, Any]) -> None:
        if new > 1 and past:
            kwargs["attention_mask"] = torch.ones(1, 1, new, past + new, dtype=torch.bool)

    in_attention(monkeypatch, change, 1)
    verdict = quick(build("llama"))
    assert where(verdict)[:3] == ("bug", 1, "attention mask"), verdict.reading
    assert "on a cache of 9" in verdict.reading


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.long)])
def test_a_cast_in_the_prompt_is_no_wrong_prompt(attention: str) -> None:
    """Softmax in float32 inside a float64 model: the same cast in the prompt's rows of both paths."""
    found = quick(
        small("Llama", attention, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
    )
    assert found.exit_code == 0, found.reading
    assert found.evidence["float64"]["prompt_rows_error_in_unit_roundoffs"] < 32


@pytest.mark.parametrize("lost", [True, False])
def test_a_mask_that_is_lost_with_and_without_a_cache_leads_where_padding_was_asked_for(lost: bool) -> None:
    """The cache adds nothing to it, so that it passes; whoever asked about padded prompts read PASS and was done."""
    model = build("llama")

    def unpadded(attention: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Every key up to the newest is seen, the pads too."""
        mask, cache = given["attention_mask"], given["past_key_values"]
        new = given["hidden_states"].shape[1]
        keys = new + (0 if cache is None else cache.get_seq_length(attention.layer_idx))
        if mask is None or mask.shape[-1] != keys:
            return args, given
        return args, {**given, "attention_mask": torch.ones(new, keys, dtype=torch.bool).tril(keys - new)[None, None]}

    for layer in model.model.layers if lost else ():
        layer.self_attn.register_forward_pre_hook(unpadded, with_kwargs=True)
    asked = quick(model, rungs=("float32",), lengths=(5,), checks="default", programs=1, calls="padded(left,5)")
    lead = (
        "not the cache: left padding changes the answer with and without one: without a cache the same columns are off by"
    )
    assert (lead in asked.reading) is lost, asked.reading
    assert asked.reading.startswith("FAIL  not-the-cache" if lost else "PASS")
    assert asked.exit_code == int(lost), asked.reading


def test_what_was_asked_for_is_shrunk_to_what_it_takes() -> None:
    """Rows that see each other are off without pads too: where padded rows were asked for, padding was named."""
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda m, args, out: out + 1e-2 * (out.mean(0, keepdim=True) - out))
    asked = quick(model, rungs=("float32",), lengths=(5,), checks="default", programs=1, calls="batched(8)")
    assert "\nnot the cache: batch changes the answer with and without one: " in asked.reading, asked.reading


# Kernels and casts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, pytest.param(99, marks=pytest.mark.long)])
def test_dropout_left_on_is_a_bug(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.functional.scaled_dot_product_attention

    def dropping(query: Any, *args: Any, **kwargs: Any) -> Any:
        return original(query, *args, **{**kwargs, "dropout_p": 0.1 if query.shape[-2] <= rows else 0.0})

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", dropping)
    verdict = quick(build("llama"))
    assert where(verdict)[:3] == ("bug", 0, "attention output"), verdict.reading


def test_constants_made_in_float32_are_no_bug() -> None:
    """MiniMax's decays are computed in float32 before the model runs: leaving out its casts does not bring them back."""
    model = small(
        "MiniMax", hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=10, num_local_experts=2, num_experts_per_tok=1, block_size=16, max_position_embeddings=200,
        initializer_range=0.15,
    )  # fmt: skip
    verdict = quick(model, lengths=(18,))
    assert verdict.exit_code == 0, verdict.reading
    assert any("float32 inside" in note for note in verdict.notes)


def eight_bits_with_half_scales(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    scale = (k.abs().amax(-1, keepdim=True) / 127).half().to(k.dtype)
    return store((k / scale).round().clamp(-127, 127) * scale if decoding else k, v)


def a_little_more(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    return store(k * (1 + 1e-5) if decoding else k, v)


@pytest.mark.parametrize(
    ("architecture", "change"), [("llama", eight_bits_with_half_scales), ("qwen3", a_little_more)], ids=["int8", "1e-5"]
)
def test_a_cast_nearby_does_not_excuse_a_wrong_key(
    architecture: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bits with scales in float16, and an error of 1e-5 beside norms that compute in float32."""
    on_update(change, 1)(monkeypatch)
    assert where(quick(build(architecture))) == ("bug", 1, "K", 9)


def test_a_key_dropped_in_the_middle_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_fourth(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
        keys, values = store(k, v)
        if not decoding:
            return keys, values
        left = [i for i in range(keys.shape[2]) if i != 3]
        return keys[:, :, left], values[:, :, left]

    on_update(without_the_fourth, 1)(monkeypatch)
    assert where(quick(build("llama"))) == ("bug", 1, "K", 3)


# Models at the edge ----------------------------------------------------------------------------------------------------


def test_a_model_in_memory_that_is_not_causal_is_refused() -> None:
    model = small(
        "Gemma3Text", hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=10, sliding_window=16, use_bidirectional_attention=True, initializer_range=0.15,
    )  # fmt: skip
    with pytest.raises(kv.InputError, match="not causal") as caught:
        quick(model)
    assert "\n" not in str(caught.value)


def test_an_interrupt_leaves_nothing_open() -> None:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model, calls, stop = build("llama"), [0], [-1]

    def counting(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == stop[0]:
            raise KeyboardInterrupt

    handle = model.model.layers[0].mlp.register_forward_hook(counting)
    choices: dict[str, Any] = {"lengths": (5,), "steps": 1, "rungs": ("float32",)}
    quick(model, **choices)
    for at in range(1, calls[0] + 1, 3):
        calls[0], stop[0] = 0, at
        with pytest.raises(KeyboardInterrupt):
            quick(model, **choices)
        assert not _get_current_function_mode_stack()
        assert not _get_current_dispatch_mode_stack()
    handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
