"""The README and the pages that begin from it run as they stand, but smaller, in a process that has none of this suite's settings."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import one_after_another, parsed
from kvinterp.models import real, zoo
from kvinterp.paths import path_named
from support import SUITES_OWN_SETTINGS, has_hooked_transformer

pytestmark = [pytest.mark.bits, pytest.mark.xdist_group("readme"), pytest.mark.slow]

ROOT = Path(__file__).parents[1]
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "docs/ci.md", *sorted(ROOT.glob("docs/start/*.md")))
}
README = PAGES["README"]
SMALLER = {
    "README": {"arithmetic:3": "arithmetic:2", "max_new_tokens=16": "max_new_tokens=10"},
    "notebook": {"arithmetic:12": "arithmetic:2", "max_new_tokens=32": "max_new_tokens=10"},
}
"""What is replaced in a page's Python; each must be found there."""
LEFT_TO_THE_READER = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM as MyModelForCausalLM
torch.manual_seed(3)
sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=61, num_key_value_heads=1, max_position_embeddings=128, **sizes)
my_model = AutoModelForCausalLM.from_pretrained("/path/to/checkpoint").eval()
my_tokenizer = None
tokens, other_tokens = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 8, 7, 6]])


class MyModelTester:
    def __init__(self, parent):
        pass

    def prepare_config_and_inputs_for_common(self):
        return config, {}


class engine:
    model = MyModelForCausalLM(config).eval()

    def full(ids):
        return engine.model(ids, use_cache=False).logits

    def step(ids, cache):
        out = engine.model(ids, past_key_values=cache, use_cache=True)
        return out.logits, out.past_key_values
"""
"""Names that the pages use for a reader's own model, config and tokens."""
MORE = {
    "README": "print(len(both.steps), len(both.layers), len(both.heads), len(both.kv_steps))\ntest_cache()",
    "ci": """
for test in (test_cache, test_any_program, test_rollouts, test_engine):
    test()
tried = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(MyModelTest))
assert (tried.testsRun, tried.wasSuccessful()) == (1, True)
""",
}
"""What follows a page's blocks: what they define is called."""


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", page)


def environment() -> dict[str, str]:
    """A new user's, who has none of what this suite sets."""
    return {name: value for name, value in os.environ.items() if name not in SUITES_OWN_SETTINGS}


def page_program(name: str) -> str:
    """All Python of a page, as its reader types it in from top to bottom."""
    source = "".join(blocks("python", PAGES[name]))
    for old, new in SMALLER.get(name, {}).items():
        assert old in source, old
        source = source.replace(old, new)
    source = f"{LEFT_TO_THE_READER}{source}\n{MORE.get(name, '')}"
    return source.replace("/path/to/checkpoint", str(zoo.folder("llama-mini")))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What each page's Python printed; all run in one process, since importing torch is most of the time."""
    sources = {name: page_program(name) for name, page in PAGES.items() if blocks("python", page)}
    said = one_after_another(sources, tmp_path_factory.mktemp("readme"), environment())

    def get(name: str) -> str:
        out, error = said[name]
        assert not error, error[-3000:]
        return out

    return get


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks("python", page)])
def test_a_pages_python_runs(name: str, printed: Callable[[str], str]) -> None:
    for package, use in {"anywidget": "patch_panel", "hypothesis": "import given"}.items():
        if use in PAGES[name]:
            pytest.importorskip(package, reason="its page says that it needs this")
    printed(name)


def test_in_a_notebook(printed: Callable[[str], str]) -> None:
    """A cache in eight bits differs on any processor, and K and V, put there as they were computed, are all of it."""
    first, *lines, cause, counts = printed("README").strip().splitlines()
    kind = "hooked" if has_hooked_transformer() else "bridge"
    assert first.startswith(f"cached+int8 against recompute on zoo:mistral-mini ({kind}, float16, matched; ")
    assert re.search(r"The logits differ at \d+ of \d+ steps", first), first
    assert any(re.search(r"(?i)layers 0 to 3 together recover most: (9\d|10\d)\s%", line) for line in lines), lines
    assert "K and V as the cached path keeps them" in cause
    assert all(int(count) > 0 for count in counts.split())


def commands() -> list[list[str]]:
    """Every kvinterp command of the pages, each once."""
    lines = "\n".join(block for page in PAGES.values() for block in blocks("bash", page)).splitlines()
    written = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kvinterp ")]
    return [command for number, command in enumerate(written) if command not in written[:number]]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_is_one_that_there_is(command: list[str]) -> None:
    """Its verb and options are parsed as the command line would; nothing is run."""
    for name in (each.removeprefix("real:") for each in command if each.startswith("real:")):
        if not (real.home() / name).exists():
            pytest.skip(f"{name} was not fetched (make real), which the command line says at once")
    parsed(command)


def test_every_path_that_is_written_is_one() -> None:
    written = re.findall(r"`((?:cached|recompute)[^`]*)`", README)
    assert len(written) > 8
    for text in written:
        path_named(text)
