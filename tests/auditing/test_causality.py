"""What sees ahead is refused, and no rounding, tipped expert or masked NaN makes a causal model look as if it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build

import kvinterp as kv
from kvinterp.auditing.causality import check_causal, sees_ahead

pytestmark = pytest.mark.bits


def unmasked(model: Any, layers: Any = None) -> Any:
    """Lets every token of some layers see every other."""

    def show_all(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rows = (args[0] if args else kwargs["hidden_states"]).shape[1]
        return args, {**kwargs, "attention_mask": torch.zeros(1, 1, rows, rows)}

    for layer in layers or model.model.layers:
        layer.self_attn.register_forward_pre_hook(show_all, with_kwargs=True)
    return model


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "olmoe", "llama", "gemma3", "qwen3_5", "mamba2", "jamba", "bloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_models_are_causal(name: str, dtype: torch.dtype) -> None:
    assert sees_ahead(kv.wrap(build(name).to(dtype))) is False


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_a_model_that_sees_ahead_is_refused(name: str) -> None:
    with pytest.raises(kv.InputError, match="is not causal, its tokens see the ones after them"):
        check_causal(kv.wrap(unmasked(build(name))))


def test_one_layer_that_sees_ahead_is_enough() -> None:
    model = build("llama")
    with pytest.raises(kv.InputError, match="is not causal"):
        kv.audit(unmasked(model, [model.model.layers[-1]]), lengths=[5], steps=1)


def test_a_choice_that_the_last_token_tips_is_not_sight() -> None:
    """What another number of rows an expert does on some processors, planted: early rows change by a lot, without derivative.

    The logits were compared, and a mixture of experts was refused on the processors whose bits tipped a choice.
    """
    model = build("mixtral")

    def tip(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        odd = (output[0, -1].detach().sum().abs() * 1e4).floor() % 7
        return output * (1 + 0.1 * odd)

    model.model.layers[0].mlp.register_forward_hook(tip)
    tokens = torch.arange(1, 13)[None]
    other = tokens.clone()
    other[0, -1] = 13
    with torch.no_grad():
        apart = (model(tokens).logits - model(other).logits)[0, :-1].abs().max()
    assert apart > 1e-2, "the planted choice is not tipped"
    assert sees_ahead(kv.wrap(model)) is False


def test_without_derivatives_a_fixed_order_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvinterp.auditing import causality

    monkeypatch.setattr(causality, "_gradient_reaches", lambda *_: None)
    real = causality._bits_stay
    monkeypatch.setattr(causality, "_bits_stay", lambda *given: str(given[-1]) != "native" and real(*given))
    assert sees_ahead(kv.wrap(build("mixtral"))) is False
    assert sees_ahead(kv.wrap(unmasked(build("mixtral")))) is True


def test_the_model_is_left_as_it_was() -> None:
    model = unmasked(build("llama")).requires_grad_(True)
    adapter = kv.wrap(model)
    hooks = len(adapter.blocks[0]._forward_pre_hooks)
    assert sees_ahead(adapter) is True
    assert len(adapter.blocks[0]._forward_pre_hooks) == hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
