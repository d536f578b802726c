"""Somebody's wrapper is run as the model that it holds where both compute the same, and refused in one sentence elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import kvinterp as kv
from kvinterp.errors import InputError
from support import TINY


def llama() -> Any:
    """A tiny transformers model of its own each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY["llama-gqa"]()).eval()


class Wrapper(nn.Module):
    """As DistributedDataParallel, PeftModel and a trainer's value head: it calls what it holds, and may add to that."""

    def __init__(self, held: nn.Module, more: float = 0.0) -> None:
        super().__init__()
        self.module, self.more = held, more

    def forward(self, ids: Tensor, **given: Any) -> Any:
        made = self.module(ids, **given)
        made.logits = made.logits + self.more
        return made


class Bare(Wrapper):
    """Whose forward hands the logits on alone, past the call of what it holds, as peft does."""

    def forward(self, ids: Tensor, **given: Any) -> Tensor:
        return self.module.forward(ids, **given).logits


class Holder:
    """As nnsight's LanguageModel: no module itself."""

    def __init__(self, held: nn.Module) -> None:
        self.held = held

    def __call__(self, ids: Tensor) -> Any:
        return self.held(ids)


@pytest.fixture(params=[Wrapper, Bare, Holder, lambda held: Wrapper(Wrapper(held)), nn.DataParallel])
def wrapped(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    held = llama()
    return request.param(held), held


def test_what_computes_the_same_is_run_as_what_it_holds(wrapped: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrapper, held = wrapped
    with caplog.at_level(logging.INFO, "kvinterp"):
        assert kv.wrap(wrapper).model is held
    assert "bit for bit" in caplog.text
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        with kv.record(wrapper, "resid_post") as seen:
            wrapper(ids)
        with kv.record(held, "resid_post") as own:
            held(ids)
    assert torch.equal(seen["resid_post", 1], own["resid_post", 1])
    runs = [kv.run(model, ids[0].tolist(), max_new_tokens=2, logits="keep", stop="length") for model in (wrapper, held)]
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert runs[0].tokens == runs[1].tokens


def test_what_adds_something_is_refused_with_what_to_give() -> None:
    with pytest.raises(
        InputError, match=r"its logits differ by 0\.5 from those of the LlamaForCausalLM.*give model\.module"
    ):
        kv.wrap(Wrapper(llama(), 0.5))


def test_a_wrapper_whose_call_raises_is_refused_with_its_words() -> None:
    class Raising(Wrapper):
        def forward(self, ids: Tensor, **given: Any) -> Any:
            raise RuntimeError("no process group")

    with pytest.raises(InputError, match=r"raises RuntimeError \(no process group\).*give model\.module"):
        kv.wrap(Raising(llama()))
