"""What other projects add to their tests: the baseline of known faults, and the mixin of transformers' model tests."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
from architectures import build
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import kvinterp as kv
from kvinterp import testing
from kvinterp.auditing.baseline import WRITE
from kvinterp.testing import CacheInconsistency, CacheTesterMixin, assert_cache_consistent

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# By its file: the folder on the path would hide modules of the tests that are called as some in it are.
_spec = importlib.util.spec_from_file_location("model_tests", BENCHMARKS / "model_tests.py")
assert _spec is not None
assert _spec.loader is not None
model_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(model_tests)

QUICKLY: dict[str, Any] = {"lengths": (5,), "steps": 1, "rungs": ("float32",), "seconds": 4.0}
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}


class Uncropped(LlamaForCausalLM):
    """A Llama whose cached forward counts two positions too many behind more than one row."""

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **more):
        held = past_key_values is not None and past_key_values.get_seq_length()
        if held and input_ids is not None and input_ids.shape[0] > 1 and position_ids is not None:
            position_ids = position_ids + 2
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **more)


def test_a_baseline_may_only_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, faulty = LlamaForCausalLM(LlamaConfig(**SIZES)), Uncropped(LlamaConfig(**SIZES))
    # Each model is audited once: the baseline alone is another.
    once = functools.cache(lambda model: kv.audit(model, sweep="no", checks="each", **QUICKLY))
    monkeypatch.setattr(testing, "audit", lambda model, *_, **__: once(model))
    file = tmp_path / "faults.json"
    how: dict[str, Any] = {**QUICKLY, "baseline": file, "name": "mine"}
    assert_cache_consistent(sound, **how)
    assert not file.exists()
    with pytest.raises(CacheInconsistency, match="not among the faults of mine"):
        assert_cache_consistent(faulty, **how)
    monkeypatch.setenv(WRITE, "write")
    assert assert_cache_consistent(faulty, **how).exit_code == 1
    known = json.loads(file.read_text())
    assert [*known] == ["mine"]
    assert known["mine"]
    monkeypatch.delenv(WRITE)
    assert assert_cache_consistent(faulty, **how).exit_code == 1
    with pytest.raises(CacheInconsistency, match=r"is right now in what .* lists as wrong"):
        assert_cache_consistent(sound, **how)
    monkeypatch.setenv(WRITE, "write")
    assert_cache_consistent(sound, **how)
    assert json.loads(file.read_text()) == {}


@pytest.mark.parametrize("text", ["[]", "no", '{"mine": "decode step"}'])
def test_what_is_no_baseline_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "faults.json").write_text(text)
    with pytest.raises(kv.InputError, match="is no baseline: expected a JSON object"):
        assert_cache_consistent(build("llama"), baseline=tmp_path / "faults.json", **QUICKLY)


class Maker:
    """As a ``model_tester`` of transformers: a config, and inputs that nobody needs here."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return self.config, {}


def ran(kinds: tuple[type, ...], config: Any, baseline: Path | None = None) -> unittest.TestResult:
    """Runs the mixin's test over such classes."""

    class ModelTest(CacheTesterMixin, unittest.TestCase):
        all_generative_model_classes, model_tester, cache_baseline = kinds, Maker(config), baseline

    result = unittest.TestResult()
    ModelTest("test_cached_decoding_is_recomputation").run(result)
    return result


@pytest.mark.slow
def test_each_class_of_a_model_test_is_audited() -> None:
    encoder = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    for kind, config in (
        (LlamaForCausalLM, LlamaConfig(**SIZES)),
        (GPT2LMHeadModel, GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
        (T5ForConditionalGeneration, T5Config(vocab_size=99, **encoder, decoder_start_token_id=0)),
    ):
        result = ran((kind,), config)
        assert (result.testsRun, result.failures, result.errors) == (1, [], []), (kind, result)


def test_a_class_that_is_wrong_is_named_and_the_others_are_tried(tmp_path: Path) -> None:
    result = ran((Uncropped, LlamaForCausalLM), LlamaConfig(**SIZES))
    assert not result.errors, result.errors
    ((test, said),) = result.failures
    assert "Uncropped" in str(test)
    assert "FAIL" in said


LIGHT = """
import sys

blocked = ("transformer_lens", "circuitsvis", "matplotlib", "statsmodels", "pyarrow", "typer", "rich")
sys.modules.update(dict.fromkeys(blocked))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvinterp.testing import CacheInconsistency, assert_cache_consistent

quickly = {"lengths": (5,), "steps": 1, "rungs": ("float32",), "seconds": 4.0}
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes))
print(assert_cache_consistent(model, **quickly).verdict)


def behind_a_cache_from_0(module, args, given):
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        given["position_ids"] = torch.zeros_like(given["input_ids"])


model.model.register_forward_pre_hook(behind_a_cache_from_0, with_kwargs=True)
try:
    assert_cache_consistent(model, **quickly)
except CacheInconsistency as error:
    print(error.verdict.verdict)
"""


def test_a_test_needs_no_package_of_the_pages(tmp_path: Path) -> None:
    """What draws pages, keeps tables and loads other kinds of models is imported where it is used, and not for an assertion."""
    command = [sys.executable, "-c", LIGHT]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said, wrong = ran.stdout.split()
    assert said in ("equal", "rounding"), said
    assert wrong == "bug"


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Uncropped])
def test_programs_for_hypothesis_are_right_or_shrunk(kind: type) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    ran = []

    @hypothesis.settings(max_examples=12, deadline=None, database=None, derandomize=True, print_blob=False)
    @hypothesis.given(testing.programs(kind(LlamaConfig(**SIZES))))
    def test(trial: Any) -> None:
        ran.append(trial)
        trial.check()

    if kind is LlamaForCausalLM:
        test()
        assert len({*map(str, ran)}) > 6
        return
    with pytest.raises(AssertionError, match=r"is wrong: row \d+ is off by"):
        test()
    # The fault is of two rows, behind a cache: the smallest program has no more.
    assert len(ran[-1].program.rows.pads) == 2
    assert len(ran[-1].program.steps) == 2


def test_the_models_of_transformers_own_tests_are_made_and_the_page_has_what_the_mixin_said() -> None:
    names = [*model_tests.OF_COMMON, *model_tests.WRITTEN]
    assert {model_tests.config_of(name).model_type for name in names} == {*names}
    config = model_tests.config_of("gpt2")  # By its own names of what the tester holds.
    assert (config.n_embd, config.n_layer, config.n_head, config.vocab_size) == (32, 2, 2, 99)
    assert model_tests.config_of("deepseek_v4").layer_types == model_tests.OF_COMMON["deepseek_v4"]["layer_types"]
    rows = [json.loads(line) for line in model_tests.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert [row["type"] for row in rows] == names
    assert model_tests.table(rows) in (BENCHMARKS.parent / "docs" / "ci.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_model_of_their_tests_fails_in_the_use_that_the_page_says() -> None:
    said = model_tests.tried("mamba2")
    assert (said["word"], said["wrong"]) == (
        "fails",
        {"Mamba2ForCausalLM": ["generate() on a filled cache, given the whole text"]},
    )
