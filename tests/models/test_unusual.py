"""Configs unlike the rest: answered, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvinterp as kv

SMALL = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def gemma4() -> Any:
    """Its full-attention layers have wider heads, and fewer KV heads: a number for each layer, none for the model."""
    import transformers as t

    config = t.Gemma4TextConfig(
        **SMALL, sliding_window=24, global_head_dim=24, num_global_key_value_heads=1, attention_k_eq_v=True,
        vocab_size_per_layer_input=131, hidden_size_per_layer_input=8, initializer_range=0.12,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    return t.AutoModelForCausalLM.from_config(config)


def openai_gpt() -> Any:
    import transformers as t

    return t.OpenAIGPTLMHeadModel(t.OpenAIGPTConfig(vocab_size=131, n_positions=64, n_embd=48, n_layer=3, n_head=4))


def hrm() -> Any:
    import transformers as t

    return t.HrmTextForCausalLM(t.HrmTextConfig(**SMALL))


def gemma3n() -> Any:
    import transformers as t

    config = t.Gemma3nTextConfig(
        **SMALL | {"num_hidden_layers": 5}, sliding_window=24, vocab_size_per_layer_input=131, laurel_rank=8,
        hidden_size_per_layer_input=8, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0] * 5,
    )  # fmt: skip
    return t.AutoModelForCausalLM.from_config(config)


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return make().eval().requires_grad_(False)


@pytest.mark.slow
def test_layers_with_heads_of_their_own_are_compared_and_audited() -> None:
    model = kv.wrap(made(gemma4))
    assert (model.facts.head_dim, model.facts.kv_heads) == (24, 2)
    both = kv.compare(model, [5, 6, 7, 8], max_new_tokens=3, stop="length", progress="none")
    assert both.failures.empty
    assert both.kv_steps[both.kv_steps["layer"] == 2]["kv_head"].unique().tolist() == [0]
    assert both.kv_steps[both.kv_steps["layer"] == 0]["kv_head"].unique().tolist() == [0, 1]
    assert kv.audit(model, lengths=[5, 30], steps=2, rungs=["float32"], sweep="no").exit_code == 0


@pytest.mark.parametrize(
    ("make", "verb", "said"),
    [
        (openai_gpt, "compare", "takes and returns no cache that it uses"),
        (openai_gpt, "audit", "there is no cached path to audit"),
        (hrm, "compare", "has no list of 24 blocks"),
        (gemma3n, "compare", "several residual streams side by side"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(make: Callable[[], Any], verb: str, said: str) -> None:
    model = made(make)
    with pytest.raises(kv.KvinterpError, match=said) as error:
        if verb == "compare":
            kv.compare(model, [5, 6, 7, 8], max_new_tokens=3, progress="none")
        else:
            kv.audit(model, lengths=[5], steps=1, rungs=["float32"], sweep="no")
    assert "\n" not in str(error.value)


def test_several_streams_are_compared_by_their_cache() -> None:
    both = kv.compare(made(gemma3n), [5, 6, 7, 8], max_new_tokens=3, record="kv", stop="length", progress="none")
    assert both.failures.empty
    assert not both.kv_steps.empty


def test_a_softmax_whose_argument_is_named_shows_its_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a user's own may write ``torch.softmax(input=...)``, which ended in an IndexError."""
    import transformers as t

    def given_by_name(func: Callable[..., Any]) -> Callable[..., Any]:
        return lambda scores, *args, **kwargs: func(*args, input=scores, **kwargs)

    kept = {name: value for name, value in SMALL.items() if name != "head_dim"}
    model = made(lambda: t.LlamaForCausalLM(t.LlamaConfig(**kept, attn_implementation="eager")))
    tokens = torch.arange(3, 9)[None]
    shown = []
    for softmax in (torch.nn.functional.softmax, given_by_name(torch.softmax)):
        monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
        with kv.record(model, "pattern") as seen:
            model(tokens)
        shown.append(seen.kept["pattern", 0][0])
    assert torch.equal(*shown)
