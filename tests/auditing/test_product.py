"""The audit as its users meet it: the command line, JSON, the assertion for tests and the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from architectures import build

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.auditing.audit import audit
from kvinterp.auditing.checks import Check
from kvinterp.auditing.page import page
from kvinterp.auditing.programs.outcome import PLAIN
from kvinterp.testing import assert_cache_consistent

pytestmark = [pytest.mark.xdist_group("audit's product"), pytest.mark.slow]
QUICK = {"lengths": (5,), "steps": 2, "rungs": ("float32",)}
OPTIONS = (
    "--lengths",
    "5",
    "--steps",
    "2",
    "--rungs",
    "float32",
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--checks",
    "none",
)

MODULE = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM

print("a module may print")
SMALL = dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.12)

class TinyConfig(LlamaConfig):
    def __init__(self, **kwargs):
        super().__init__(**{**SMALL, **kwargs})

class Mine(LlamaForCausalLM):
    config_class = TinyConfig

class Stale(Mine):
    """Decodes with keys that are too large."""
    def __init__(self, config):
        super().__init__(config)
        def late(module, args, output):
            return output * 1.05 if output.shape[1] == 1 else output
        self.model.layers[1].self_attn.k_proj.register_forward_hook(late)

class Noisy(Mine):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_hook(lambda m, a, o: o + 0.01 * torch.randn_like(o))

class Raising(Mine):
    def forward(self, *args, past_key_values=None, **kwargs):
        if past_key_values is not None:
            raise KeyError("no such layer")
        return super().forward(*args, **kwargs)

class Large(LlamaForCausalLM):
    config_class = LlamaConfig

def tiny():
    return Mine(TinyConfig())

def needs(path):
    return tiny()

def text():
    return "no model"

number = 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a user's module in it."""
    (tmp_path / "users_code.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("raise RuntimeError('not today')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("users_code", "users_broken"):
        sys.modules.pop(name, None)


# The command line ------------------------------------------------------------------------------------------------------


def test_a_users_class_passes_with_exit_code_0_and_is_audited_again_into_the_same_folder(here: Path) -> None:
    made = kvinterp("audit", "users_code:Mine", *OPTIONS)
    assert made.exit_code == 0, made.output
    first = made.stdout.splitlines()[0]
    assert first.startswith("PASS  ")
    assert first.endswith("users_code:Mine (native, float32), decoding token by token alone")
    folder = here / "out/audit-Mine"
    assert json.loads((folder / "verdict.json").read_text())["exit_code"] == 0
    assert (folder / "sweep.parquet").is_file()
    # Again, of another model, without --overwrite; what an audit writes is all of this one.
    again = kvinterp("audit", "users_code:Stale", "--json", "--out", "out/audit-Mine", *OPTIONS)
    assert again.exit_code == 1, again.output
    verdict = json.loads(again.stdout)
    held = json.loads((folder / "verdict.json").read_text())
    assert verdict == {**held, "verb": "audit", "folder": "out/audit-Mine"}
    assert (verdict["verdict"], verdict["first_layer"], verdict["exit_code"]) == ("bug", 1, 1)
    assert "a module may print" in made.stderr, "what a user's code prints stays out of standard output"
    # A file of no audit is not replaced, and nothing slow is begun.
    (folder / "verdict.json").unlink()
    wrong("'report.html', which is of no audit", "audit", "users_code:Mine", "--out", "out/audit-Mine", *OPTIONS)


def test_allow_and_cannot_tell(here: Path) -> None:
    allowed = kvinterp("audit", "users_code:Stale", "--allow", "bug", "--allow", "overflow", *OPTIONS)
    assert allowed.exit_code == 0, allowed.output
    assert allowed.stdout.startswith("PASS  bug (allowed)")
    noisy = kvinterp("audit", "users_code:Noisy", *OPTIONS)
    assert noisy.exit_code == 3, noisy.output
    assert noisy.stdout.startswith("CANNOT TELL  cannot-tell")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("users_code:Mien",), "unknown name in module 'users_code' 'Mien': did you mean 'Mine'"),
        (("no_such_module:Mine",), "module 'no_such_module' of 'no_such_module:Mine' cannot be imported (there is no such"),
        (("users_broken:Mine",), "importing it raised RuntimeError: not today"),
        (("users_code:number",), "is a int: expected a transformers model class"),
        (("users_code:Large",), "too many to be made for an audit"),
        (("users_code:Raising",), "no such layer"),
        ((), "no model was given"),
        (("zoo:gqa2-mini", "--allow", "hiden-cast"), "did you mean 'hidden-cast'"),
    ],
)
def test_bad_input_is_one_sentence(here: Path, arguments: tuple[str, ...], said: str) -> None:
    wrong(said, "audit", *arguments, *OPTIONS)
    assert not (here / "out/audit-Mine").exists()


@pytest.mark.parametrize("options", [("--random-init",), (), ("--kind", "hooked")])
def test_code_that_comes_with_a_checkpoint_is_refused_and_nothing_asks(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """transformers asks on standard input and waits, and loads the code on a yes."""
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("it asked"))
    folder = here / "repository"
    folder.mkdir()
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "their_own", "auto_map": auto}))
    (folder / "code.py").write_text("from pathlib import Path\nPath('it_ran').write_text('')\n")
    target = folder / "config.json" if "--random-init" in options else folder
    wrong("--remote-code", "audit", target, *options, *OPTIONS)
    assert not (here / "it_ran").exists()


def test_code_that_comes_with_a_checkpoint_runs_where_it_is_trusted(here: Path) -> None:
    folder = here / "repository"
    folder.mkdir()
    auto = {"AutoConfig": "code.TheirConfig", "AutoModelForCausalLM": "code.Their"}
    (folder / "config.json").write_text(json.dumps({"model_type": "their_own", "auto_map": auto}))
    code = MODULE.replace("TinyConfig", "TheirConfig").replace("Mine", "Their")
    (folder / "code.py").write_text(
        code.replace("    def __init__(self, **kwargs)", "    model_type = 'their_own'\n    def __init__(self, **kwargs)")
    )
    made = kvinterp("audit", folder / "config.json", "--random-init", "--remote-code", *OPTIONS)
    assert made.exit_code == 0, made.output


# The page ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passing() -> kv.auditing.Audit:
    return audit(build("llama"), **{**QUICK, "rungs": ("float32", "float64")}, checks="none", detail="everything")


@pytest.fixture(scope="module")
def failing() -> kv.auditing.Audit:
    model = build("llama")
    projection = model.model.layers[1].self_attn.k_proj
    projection.register_forward_hook(lambda m, a, out: out * 1.05 if out.shape[1] == 1 else out)
    return audit(model, **QUICK, checks="none", detail="everything")


def _with(made: kv.auditing.Audit, **changed: object) -> kv.auditing.Audit:
    import dataclasses

    return dataclasses.replace(made, verdict=dataclasses.replace(made.verdict, **changed))


def test_the_page_says_what_the_verdict_says(passing: kv.auditing.Audit, failing: kv.auditing.Audit) -> None:
    off = _with(passing, checks=(Check("left padding", PLAIN, "off.", asked="rows(5)+feed(22)"),))
    unsure = (_with(passing, verdict="cannot-tell"), off)
    for made, mark in ((passing, "good"), (failing, "bad"), *((each, "unsure") for each in unsure)):
        text = page(made.verdict, (), made)
        assert f'<div class="answer {mark}"><strong>{made.verdict.reading.splitlines()[0]}' in text
        assert ("the audit was made without further checks" in text) is (made is not off)
        assert "fixed order: equal checks" in text
        assert text.count("<script") == 1, "the page's own"
    text = page(failing.verdict, (), failing)
    assert "first wrong: layer" in text
    assert '<tr class="here"><td>1</td>' in text
    assert "nothing: it is further from float64" in text
    assert "first wrong" not in page(passing.verdict, (), passing)


# The pytest helper -----------------------------------------------------------------------------------------------------


def test_the_helper_takes_a_model_in_training_mode_and_leaves_it_there() -> None:
    model = build("gpt2")  # Its config drops out.
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    assert_cache_consistent(model, lengths=(5,), steps=2, rungs=("float32",), checks="none")
    assert [module.training for module in model.modules()] == before
    assert kv.audit(model, **QUICK, checks="none").exit_code == 0
    with pytest.raises(kv.InputError, match="training mode"):
        kv.wrap(model)
