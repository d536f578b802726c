"""What users put on a model may keep the tensors that it was made with: then the audit judges in the model's own dtype and says so.

A ``forward`` replaced on an instance, or an SAE in a hook, was reported as a prompt that raises "expected double, got float".
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import kvinterp as kv
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import REFUSED, WRONG
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.search import Searched
from kvinterp.auditing.subjects import subject_instead
from kvinterp.errors import UnsupportedError
from support import PROMPT, bare_hooked_transformer, random_model

FEW: dict[str, Any] = {"lengths": (5, 9), "steps": 2, "programs": 6, "seconds": 15}


def _native() -> Any:
    return random_model(LlamaForCausalLM, initializer_range=0.3)


def _mlp(model: Any) -> Any:
    return model.model.layers[1].mlp if hasattr(model, "config") else model.blocks[1].mlp


def _replaced(model: Any) -> None:
    w = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * 0.2
    _mlp(model).forward = lambda x: torch.relu(x @ w)


def _sae(model: Any) -> None:
    sae = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    _mlp(model).register_forward_hook(lambda _, __, out: sae(out))


def _checking(model: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise ValueError("float32 is expected")
        return torch.tanh(x)

    _mlp(model).forward = forward


@pytest.mark.parametrize("put", [_replaced, _sae, _checking])
@pytest.mark.parametrize(
    "make", [_native, pytest.param(lambda: bare_hooked_transformer("rotary"), marks=pytest.mark.hooked, id="hooked")]
)
def test_the_own_dtype_is_judged_and_float64_said_to_be_missing(
    make: Callable[[], Any], put: Callable[[Any], None]
) -> None:
    model = make()
    put(model)
    verdict = kv.audit(model, **FEW)
    assert verdict.verdict in ("rounding", "equal"), str(verdict)
    assert {check.name for check in verdict.checks if check.status == "right"} >= {
        "prompt",
        "decode step",
        "several chunks",
    }
    (said,) = [check for check in verdict.checks if check.name == "float64"]
    assert said.status == "not run"
    assert "judged in its own float32" in said.detail
    assert "not reached: float64" in str(verdict)


def _on_a_cache(scale: float) -> Any:
    """A model whose attention runs its user's own float32 code on a filled cache alone, so that no prompt shows it."""
    model = _native()
    attention, w = model.model.layers[1].self_attn, torch.eye(32) * scale

    def forward(self: Any, hidden_states: Any, **more: Any) -> Any:
        cache = more.get("past_key_values")
        filled = cache is not None and cache.get_seq_length(1) > 0
        out = type(self).forward(self, hidden_states, **more)
        return (out[0] @ w, *out[1:]) if filled else out

    attention.forward = types.MethodType(forward, attention)
    return model


@pytest.mark.parametrize(("scale", "word"), [(1.0, "rounding"), (1.05, "bug")])
def test_code_that_only_a_step_runs(scale: float, word: str) -> None:
    verdict = kv.audit(_on_a_cache(scale), **FEW)
    assert verdict.verdict == word
    assert any(check.name == "float64" for check in verdict.checks)
    raised = [check for check in verdict.checks if "dtype" in check.detail and check.status == "wrong"]
    assert not raised, raised
    if word == "bug":
        assert "decode step is wrong" in str(verdict)
        assert verdict.first_layer == 1


def test_what_no_order_of_additions_can_be_off_by_is_a_bug_without_float64_too() -> None:
    """A step that scales its input by 1.05 does so without a cache too, so that programs have nothing to hold it against."""
    model = _native()
    _replaced(model)

    def longer(_: Any, args: Any, kwargs: Any) -> Any:
        states = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": states * 1.05 if states.shape[1] == 1 else states}

    model.model.layers[0].self_attn.register_forward_pre_hook(longer, with_kwargs=True)
    verdict = kv.audit(model, **FEW)
    assert (verdict.verdict, verdict.first_layer) == ("bug", 0)
    assert "further off than the root of what float32 rounds" in str(verdict)


def test_a_path_in_another_dtype_is_refused_in_a_sentence() -> None:
    model = _native()
    _sae(model)
    with pytest.raises(UnsupportedError, match="does not follow a cast to float64"):
        kv.run(model, PROMPT, "recompute@float64", max_new_tokens=2)


def test_the_precision_is_the_weights_where_logits_come_wider():
    """Mamba2 computes in bfloat16 and gives its logits in float32: a decode step was off by a rounding, and called wrong."""
    model = _native().bfloat16()
    own = model.lm_head.forward
    model.lm_head.forward = lambda rows: own(rows).float()
    subject = ModelSubject(kv.wrap(model), ())
    assert subject.plain(subject.tensor([[5, 6]])).dtype == torch.float32
    assert subject.noise >= torch.finfo(torch.bfloat16).eps
    assert ModelSubject(kv.wrap(_native())).noise < 1e-12


def test_what_is_wrong_before_it_could_be_refused_does_not_say_that_a_cast_is_not_followed():
    model = _native()
    adapter = kv.wrap(model)
    raised = Run(ModelSubject(adapter), program_named("rows(0)+feed(3)+feed(1)"))
    raised.raised, raised.word = "ValueError: no cache", REFUSED
    found = Searched(others={"decode step": raised})
    own, said = subject_instead(adapter, found, ModelSubject) or (None, "")
    assert own is not None
    assert said == raised.raised
    forward = model.forward

    @functools.wraps(forward)
    def late(*given: Any, past_key_values: Any = None, **more: Any) -> Any:
        filled = past_key_values is not None and past_key_values.get_seq_length() > 0
        out = forward(*given, past_key_values=past_key_values, **more)
        out.logits = out.logits * (1.1 if filled else 1.0)
        return out

    model.forward = late
    assert subject_instead(adapter, found, ModelSubject) is None
    raised.word = WRONG
    assert subject_instead(adapter, found, ModelSubject) is not None
