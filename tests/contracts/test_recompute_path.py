"""Law 21: the recompute path is the forward that users call with ``use_cache=False``, whatever looks into it; and whether a
prompt itself differs with and without a cache is asked and said before anything is decoded."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import kvinterp as kv
from kvinterp.errors import UnsupportedError
from kvinterp.paths.prompt import prompt_difference
from support import random_model

IDS = list(range(5, 17))
ONE = {"max_new_tokens": 1, "logits": "keep"}
ZOO = ("llama-mini", "llama64-mini", "gqa2-mini", "mqa-mini", "mistral-mini", "gemma2-mini", "moe-mini")
RECORDED = (None, "resid_post", "kv", "resid_post,kv,cache_k_pre")


def plain(model):
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("name", ZOO)
def test_the_recompute_path_has_the_bits_of_use_cache_false(name, attention):
    adapter = kv.load_model(f"zoo:{name}", kind="native", dtype="float32", attention=attention)
    expected = plain(adapter.model)
    for record in RECORDED:
        made = kv.run(adapter, IDS, "recompute", **ONE, **({} if record is None else {"record": record}))
        assert torch.equal(made.logits[0], expected), record


@pytest.mark.hooked
def test_a_hooked_transformer_is_run_without_a_cache():
    adapter = kv.load_model("zoo:gqa2-mini", kind="hooked", dtype="float32")
    with torch.no_grad():
        expected = adapter.model(torch.tensor([IDS]), prepend_bos=False)[0, -1]
    for record in (None, "kv", "cache_k_pre"):
        made = kv.run(adapter, IDS, "recompute", **ONE, **({} if record is None else {"record": record}))
        assert torch.equal(made.logits[0], expected)


def minding(model, wrong="without"):
    """A model that asks whether a cache object is there: its third layer then reads other keys, as Gemma 4 did without one."""
    made = copy.deepcopy(model)
    attention, told = made.model.layers[2].self_attn, {}

    def hear(_, __, given):
        told["cache"] = given.get("past_key_values") is not None

    attention.register_forward_pre_hook(hear, with_kwargs=True)
    attention.k_proj.register_forward_hook(
        lambda _, __, keys: keys.flip(-1) if told["cache"] == (wrong == "with") else None
    )
    return made


@pytest.fixture(scope="module")
def model():
    return random_model(LlamaForCausalLM, num_hidden_layers=3, initializer_range=0.2)


@pytest.fixture(scope="module")
def minds(model):
    return minding(model)


def test_what_users_see_without_a_cache_is_what_the_recompute_path_sees(minds):
    with torch.no_grad():
        cached = minds(torch.tensor([IDS]), use_cache=True).logits[0, -1]
    symptom = float((cached - plain(minds)).abs().max())
    for record in ("", "resid_post", "kv"):
        found = kv.compare(minds, [IDS], record=record, max_new_tokens=1, progress="none")
        assert float(found.steps["max_abs_logit"].iloc[0]) == pytest.approx(symptom, rel=1e-6)
        assert symptom > 1e-2


def test_keys_are_those_that_attention_reads_without_a_cache(model, minds):
    """The other keys are seen in layer 2, and are put back there: what is moved into the recompute path reaches it."""
    traces = [kv.run(each, IDS, "recompute", record="kv", max_new_tokens=1, positions="all") for each in (model, minds)]
    apart = [float((traces[0]["cache_k", n] - traces[1]["cache_k", n]).abs().max()) for n in range(3)]
    assert apart[:2] == [0, 0]
    assert apart[2] > 1e-2
    found = kv.sweep(minds, [IDS], "kv", layers=2, max_new_tokens=2, steps=(1,), controls="none", progress="none")
    whole = (
        found.recovery[found.recovery["positions"] == "all"]
        if "all" in set(found.recovery["positions"])
        else found.recovery
    )
    assert whole["d_before"].min() > 0
    assert not whole["unchanged"].any()


@pytest.mark.parametrize("wrong", ["without", "with"])
def test_that_the_prompt_differs_is_said_first(model, wrong):
    """Float64 keeps either fault, and tokens on a cache share that of the cached prompt: neither side is called the wrong one."""
    minds = minding(model, wrong)
    said = kv.compare(minds, [IDS], max_new_tokens=3, progress="none").where()
    assert said.index("The prompt itself, 12 tokens, differs") < said.index("give different logits")
    assert "The forward without a cache stands alone" in said
    verdict = kv.audit(minds, rungs=("float32",), lengths=(5,), sweep="no", checks="none")
    first, second, third = str(verdict).splitlines()[:3]
    assert first.startswith("FAIL")
    assert second.startswith("The prompt itself")
    assert "layer 2" in third
    assert "is another without a cache than with one" in third


@pytest.mark.parametrize("kind", ["native", "hooked", "bridge"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_sound_model_has_one_prompt(kind, dtype):
    adapter = kv.load_model("zoo:gqa2-mini", kind=kind, dtype=dtype)
    assert prompt_difference(adapter, torch.tensor([IDS])) is None


def test_where_float64_agrees_the_side_that_is_farther_from_it_is_off(model):
    """Attention that loses bits in one forward alone, in the model's own precision alone."""
    for wrong, off in (("without", "without a cache"), ("with", "with a cache")):
        made, told = copy.deepcopy(model), {}
        attention = made.model.layers[1].self_attn
        attention.register_forward_pre_hook(
            lambda _, __, given, told=told: told.update(cache=given.get("past_key_values") is not None), with_kwargs=True
        )

        def lose(_, __, out, told=told, wrong=wrong):
            return (
                out.bfloat16().to(out.dtype) if told["cache"] == (wrong == "with") and out.dtype == torch.float32 else None
            )

        attention.v_proj.register_forward_hook(lose)
        found = prompt_difference(kv.wrap(made), torch.tensor([IDS]))
        assert found is not None
        assert found.off == off
        assert found.in_float64 < found.size / 2


def test_where_float64_cannot_be_had_the_side_is_not_told(minds):
    def refuse(_, __, out):
        if out.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")

    made = copy.deepcopy(minds)
    made.model.norm.register_forward_hook(refuse)
    found = prompt_difference(kv.wrap(made), torch.tensor([IDS]))
    assert found is not None
    assert found.off == ""
    assert "cannot be told" in found.said


def test_a_model_whose_attention_shows_no_keys_is_handed_a_cache_only_where_that_changes_no_bit(model, minds, monkeypatch):
    for each, differs in ((model, False), (minds, True)):
        adapter = kv.wrap(copy.deepcopy(each))
        adapter.checked[adapter.facts.attention, "hands over keys and values"] = False
        expected = plain(adapter.model)
        if differs:
            with pytest.raises(UnsupportedError, match="with one the prompt itself has other logits"):
                kv.run(adapter, IDS, "recompute", record="kv", **ONE)
        else:
            assert torch.equal(kv.run(adapter, IDS, "recompute", record="kv", **ONE).logits[0], expected)
        assert torch.equal(kv.run(adapter, IDS, "recompute", record="resid_post", **ONE).logits[0], expected)
