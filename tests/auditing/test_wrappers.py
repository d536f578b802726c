"""Somebody's wrapper is run as the model that it holds where both compute the same, and refused in one sentence elsewhere."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

import kvinterp as kv
from command_line import wrong
from kvinterp.errors import InputError
from kvinterp.models.adapter import _TOKENIZERS
from kvinterp.testing import assert_cache_consistent
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


def test_a_model_that_was_wrapped_with_a_tokenizer_is_found_to_have_it() -> None:
    """kv.attention_comparison(adapter.model, TEXT) asked for a tokenizer which the adapter had; nothing is put on the model."""
    model = llama()
    before = {**vars(model)}
    tokenizer = kv.load_model("zoo:gqa2-mini").tokenizer
    gc.collect()
    kept = len(_TOKENIZERS)
    with pytest.raises(InputError, match="has no tokenizer"):
        kv.wrap(model).encode("2")
    kv.wrap(model, tokenizer)
    assert kv.wrap(model).tokenizer is tokenizer
    assert vars(model).keys() == before.keys()
    assert kv.wrap(copy.deepcopy(model)).tokenizer is None, "a copy is another model"
    del model, before
    gc.collect()
    assert len(_TOKENIZERS) == kept, "it keeps no model alive"


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


# What stands before the text -------------------------------------------------------------------------------------------


class PromptTuned(Wrapper):
    """As peft's prompt tuning: learned embeddings stand before those of the tokens, and their logits come out, too."""

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        embedded = self.module.get_input_embeddings()(input_ids)
        learned = torch.full_like(embedded[:, :1], 0.3).expand(-1, 5, -1)
        return self.module(inputs_embeds=torch.cat([learned, embedded], 1), **given)


class PrefixTuned(Wrapper):
    """As peft's prefix tuning: learned keys and values stand in the cache before the text."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **given: Any) -> Any:
        if past_key_values is None:
            config, past_key_values = self.module.config, DynamicCache()
            for layer in range(config.num_hidden_layers):
                learned = torch.full((len(input_ids), config.num_key_value_heads, 5, config.head_dim), 0.3)
                past_key_values.update(learned, learned, layer)
        return self.module(input_ids, past_key_values=past_key_values, **given)


def of_peft(name: str) -> Callable[[nn.Module], nn.Module]:
    """The real ones, where peft is installed."""

    def made(held: nn.Module) -> nn.Module:
        peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
        return peft.get_peft_model(held, getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()

    return made


TUNED = {"prompt": PromptTuned, "prefix": PrefixTuned} | {
    f"peft, {name}": of_peft(name) for name in ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")
}
IDS = list(range(3, 12))
SHORT = {"max_new_tokens": 2, "stop": "length"}
VERBS: dict[str, Callable[[Any], Any]] = {
    "wrap": kv.wrap,
    "run": lambda model: kv.run(model, IDS, "cached", **SHORT),
    "compare": lambda model: kv.compare(model, [IDS], **SHORT),
    "audit": lambda model: kv.audit(model, rungs=("float32",), lengths=(5,)),
    "record": lambda model: kv.record(model, "resid_post").__enter__(),
    "patched": lambda model: kv.patched(model, kv.Patch("resid_post", donor="zero")).__enter__(),
    "sweep": lambda model: kv.sweep(model, [IDS], "resid_post", **SHORT),
    "decompose": lambda model: kv.decompose(model, [IDS], max_new_tokens=2),
    "localise": lambda model: kv.localise(model, IDS),
    "kernels": lambda model: kv.kernels_table(model, sizes=(1, 4), length=8),
    "assert_cache_consistent": assert_cache_consistent,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("tuned", TUNED)
def test_what_puts_something_before_the_text_is_one_sentence_in_every_verb(tuned: str, verb: str) -> None:
    with pytest.raises(
        InputError, match=r"cannot wrap a .*; give model\.(module|base_model) to look at that without"
    ) as said:
        VERBS[verb](TUNED[tuned](llama()))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("tuned", TUNED)
def test_and_exit_code_2_on_the_command_line(tuned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = TUNED[tuned](llama())
    monkeypatch.setattr("kvinterp.auditing.building._imported", lambda code: lambda: model)
    wrong("to look at that without what the", "audit", "mine:tuned", "--dtype", "float32")


def test_a_folder_with_an_adapter_alone_says_what_to_save(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    wrong("holds a PEFT adapter and no model", "compare", tmp_path, "--out", tmp_path / "out")
