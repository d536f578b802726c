"""The plugin in other people's pytest runs: a test for each part of one audit, and nothing at all unless it is asked for."""

from __future__ import annotations

import pytest

import kvinterp as kv

SNAPSHOT = "_pytest.pytester.SysModulesSnapshot"
QUICK = ("--kvinterp-rungs=float32", "--kvinterp-lengths=5", "--kvinterp-steps=2")
MODELS = '''
import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

def clean():
    torch.manual_seed(0)
    open("made", "a").write("x")
    config = LlamaConfig(vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.12)
    return LlamaForCausalLM(config).eval()

def stale():
    """Its second layer makes keys too large where a token is fed alone."""
    model = clean()
    late = lambda module, args, output: output * 1.05 if output.shape[1] == 1 else output
    model.model.layers[1].self_attn.k_proj.register_forward_hook(late)
    return model

def padded():
    """It forgets the mask where a token is fed alone: only pads show it."""
    model = clean()
    class Forgets(type(model)):
        @functools.wraps(LlamaForCausalLM.forward)
        def forward(self, input_ids=None, attention_mask=None, **given):
            if input_ids is not None and input_ids.shape[1] == 1:
                attention_mask = None
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **given)
    model.__class__ = Forgets
    return model

def raises():
    raise ValueError("no weights here")
'''


class _KeptModules:
    """What an inner run imports stays: torch and what rests on it cannot be imported twice."""

    def __init__(self, preserve=None):
        pass

    def restore(self):
        pass


@pytest.fixture
def modules_kept(monkeypatch):
    monkeypatch.setattr(SNAPSHOT, _KeptModules)


@pytest.fixture
def inner(modules_kept, pytester, pytestconfig):
    """Runs pytest in a folder with models, in this process."""
    name = f"plugin_models_{abs(hash(pytester.path)):x}"
    pytester.makepyfile(**{name: MODELS})
    # Where the package was installed with its entry point, the plugin is there already.
    loaded = [] if pytestconfig.pluginmanager.hasplugin("kvinterp") else ["-p", "kvinterp.pytest_plugin"]

    def run(*arguments, model=None):
        given = [] if model is None else [f"--kvinterp-model={model if ':' in model else f'{name}:{model}'}"]
        return pytester.runpytest_inprocess(*loaded, "-p", "no:cacheprovider", "-rs", "-v", *given, *arguments)

    return run


def failed(result):
    return {line.split("::")[1].split(" FAILED")[0] for line in result.outlines if " FAILED" in line and "::" in line}


def test_a_clean_model_passes_part_by_part_and_what_was_not_run_is_skipped(inner, pytester):
    result = inner(*QUICK, "--kvinterp-calls=padded(left,5),beams(3)", model="clean")
    found = result.parseoutcomes()
    assert "failed" not in found
    assert found["passed"] >= 10
    result.stdout.fnmatch_lines(["kvinterp::ladder float32 PASSED*", "kvinterp::call=beams(3) PASSED*"])
    result.stdout.fnmatch_lines(["kvinterp::verdict PASSED*", "SKIPPED*no layer of this model has a sliding window*"])
    # One audit served all of them.
    assert (pytester.path / "made").read_text() == "x"


def test_a_stale_key_fails_with_its_layer_and_tensor(inner):
    result = inner(*QUICK, "--kvinterp-checks=none", model="stale")
    assert failed(result) == {"ladder float32", "verdict"}
    result.stdout.fnmatch_lines(["*FAIL*bug*", "*layer 1*"])


def test_a_fault_of_one_plan_fails_that_plan_and_those_like_it_alone(inner):
    result = inner(*QUICK, "--kvinterp-calls=padded(left,5),forked(2)", model="padded")
    assert "call=padded(left,5)" in failed(result)
    result.stdout.fnmatch_lines(["kvinterp::ladder float32 PASSED*", "kvinterp::call=forked(2) PASSED*"])
    result.stdout.fnmatch_lines(["*call=padded(left,5) failed: *first at position*"])


def test_fixtures_and_selection(inner, pytester):
    pytester.makepyfile("""
        def test_verdict(kvinterp_model, kvinterp_verdict):
            assert kvinterp_model.facts.layers == 2
            assert kvinterp_verdict.exit_code == 0

        def test_own():
            pass
    """)
    result = inner(*QUICK, "--kvinterp-checks=none", "-k", "verdict", model="clean")
    result.assert_outcomes(passed=2, deselected=2)
    without = inner()
    without.assert_outcomes(passed=1, skipped=1)
    without.stdout.fnmatch_lines(["*no model was given; give one with --kvinterp-model*"])


def test_a_model_that_cannot_be_audited_fails_with_one_sentence_each_time(inner, monkeypatch):
    def broken(*args, **kwargs):
        raise kv.InputError("this model sees the future")

    monkeypatch.setattr("kvinterp.auditing.audit", broken)
    result = inner(*QUICK, "--kvinterp-checks=none", model="clean")
    result.assert_outcomes(failed=2)
    assert "Traceback" not in result.stdout.str()
    result.stdout.fnmatch_lines(["this model sees the future"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kvinterp-model=zoo:nothing"], "nothing"),
        (["--kvinterp-model=nothing.there:Model"], "nothing"),
        (["--kvinterp-calls=beams(3)"], "--kvinterp-calls was given without a model"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-lengths=5,x"], "expected whole numbers, as in 5,63,64,65"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-lengths=99999999"], "expected lengths up to 32,768"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-steps=0"], "at least 1"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-steps=3,4"], "expected one whole number"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-seed=none"], "expected one whole number, as in 0"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-rungs=float17"], "float17"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-checks=some"], "some"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-calls=forkd"], "did you mean 'forked'"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-calls=padded(left,999999)"], "999999"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-allow=bugs"], "bugs"),
        (["--kvinterp-model=zoo:gqa2-mini", "--kvinterp-dtype=int3"], "int3"),
    ],
)
def test_bad_input_is_a_usage_error_of_one_sentence(inner, arguments, said):
    result = inner(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.errlines if line.startswith("ERROR: ")]
    assert len(errors) == 1, result.errlines
    assert said in errors[0]
    assert "Traceback" not in "\n".join([*result.errlines, *result.outlines])


def test_what_a_users_code_raises_is_a_usage_error(inner):
    result = inner(model="raises")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "no weights here" in "\n".join(result.errlines)


def test_without_the_option_nothing_heavy_is_imported(pytester, pytestconfig):
    pytester.makepyfile("""
        import sys

        def test_nothing():
            assert "kvinterp.pytest_plugin" in sys.modules
            assert not {"torch", "pandas", "transformers", "kvinterp.auditing"} & set(sys.modules)
    """)
    # Where the package was installed with its entry point, the plugin is there already.
    loaded = () if pytestconfig.pluginmanager.hasplugin("kvinterp") else ("-p", "kvinterp.pytest_plugin")
    pytester.runpytest_subprocess(*loaded).assert_outcomes(passed=1)
