"""A library's crash in decoding fails an audit; what it does not offer, and says so, is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvinterp as kv
from kvinterp.auditing.programs.crashes import CRASHES, REFUSES, whose
from kvinterp.auditing.programs.subject import casts_lifted
from kvinterp.errors import UnsupportedError
from kvinterp.models.hooks import Functions

SIZES = "Attention mask should be of size (3, 1, 1, 13), but is torch.Size([3, 1, 1, 12])"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raise NotImplementedError", REFUSES),
        ("raise ValueError('a model with a state takes no draft tokens')", REFUSES),
        ("raise ValueError", CRASHES),
        (f"raise ValueError({SIZES!r})", CRASHES),
        ("assert not 1, 'expected one token'", CRASHES),
        ("[][1]", CRASHES),
        ("torch.ones(2) @ torch.ones(3)", CRASHES),
    ],
)
def test_a_sentence_of_its_own_is_a_refusal_unless_tensors_do_not_fit(line: str, expected: str) -> None:
    library: dict[str, Any] = {"__name__": "transformers.models.some.modeling_some", "torch": torch}
    exec(f"def forward():\n    {line}", library)
    with pytest.raises(Exception) as caught:
        library["forward"]()
    assert whose(caught.value, torch.nn.Linear(1, 1))[0] == expected


def decoding(raises: BaseException | None) -> Any:
    """A model that raises this, or meets an empty list, from its third cached token on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=99, num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64, **sizes)

    class Crashing(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **given: Any) -> Any:
            if past_key_values is not None and past_key_values.get_seq_length() >= 7:
                if raises is not None:
                    raise raises
                [][1]
            return super().forward(input_ids, past_key_values=past_key_values, **given)

    return Crashing(config).eval()


FEW: dict[str, Any] = {"rungs": ("float32",), "lengths": (5,), "sweep": "no", "programs": 9, "seconds": 8}


def test_a_crash_of_plain_decoding_fails_and_is_named() -> None:
    """It was "this model cannot be run as the audit runs it", exit code 2, as if the user had given something wrong."""
    verdict = kv.audit(decoding(None), **FEW)
    assert verdict.exit_code == 1
    assert "IndexError" in verdict.reading
    assert "test_crashes.py" in verdict.reading


def test_a_model_that_refuses_to_decode_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no decoding here"):
        kv.audit(decoding(NotImplementedError("no decoding here")), **FEW)


@pytest.mark.parametrize(
    "around", [contextlib.nullcontext, casts_lifted, lambda: Functions(lambda func, args, kwargs: func(*args))]
)
def test_what_a_model_runs_through_a_mode_of_ours_crashes_as_it_does_without(around) -> None:
    class Unequal(torch.nn.Module):
        def forward(self, x):
            return x + torch.zeros(4)

    model = Unequal()
    with around(), pytest.raises(RuntimeError) as raised:
        model(torch.zeros(3))
    assert whose(raised.value, model)[0] == CRASHES


def test_a_model_that_skips_its_last_block_is_audited() -> None:
    """As Mllama skips its cross-attention where there is no image."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, max_position_embeddings=64, **sizes)).eval()
    whole = model.model.forward

    def shorter(*given: Any, **named: Any) -> Any:
        model.config.num_hidden_layers = 2  # Its loop ends there.
        try:
            return whole(*given, **named)
        finally:
            model.config.num_hidden_layers = 3

    model.model.forward = shorter
    verdict = kv.audit(model, **FEW)
    assert verdict.exit_code == 0, verdict.reading
