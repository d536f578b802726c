"""The README's snippets run as they stand, but smaller, in a process that has none of this suite's settings."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import one_after_another, parsed
from kvinterp.models import real
from kvinterp.paths import path_named
from support import SUITES_OWN_SETTINGS, has_hooked_transformer, write_checkpoint

pytestmark = [pytest.mark.bits, pytest.mark.xdist_group("readme"), pytest.mark.slow]

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = (ROOT / "docs" / "start" / "notebook.md").read_text(encoding="utf-8")
SMALLER = {"arithmetic:3": "arithmetic:2", "max_new_tokens=16": "max_new_tokens=10"}
"""What is replaced in the first snippet; each must be found there."""


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", page)


def snippet(first_words: str) -> str:
    (found,) = [block for block in blocks("python") if block.startswith(first_words)]
    return found


def environment() -> dict[str, str]:
    """A new user's, who has none of what this suite sets."""
    return {name: value for name, value in os.environ.items() if name not in SUITES_OWN_SETTINGS}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What each snippet printed; all run in one process, since importing torch is most of the time."""
    folder = tmp_path_factory.mktemp("readme")
    sources = {"own": own_model(folder), "notebook": in_a_notebook(), "tests": in_tests()}
    said = one_after_another(sources, folder, environment())

    def get(name: str) -> str:
        out, error = said[name]
        assert not error, error[-3000:]
        return out

    return get


def test_every_python_block_is_run_here() -> None:
    """A snippet that is added must be added to these tests."""
    assert len(blocks("python")) == 3


def in_a_notebook() -> str:
    source = snippet("import kvinterp as kv")
    for old, new in SMALLER.items():
        assert old in source, old
        source = source.replace(old, new)
    (more,) = [block for block in blocks("python", NOTEBOOK) if block.startswith("both.save(")]
    return f"{source}{more}\nprint(len(both.steps), len(both.layers), len(both.heads), len(both.kv_steps))"


def test_in_a_notebook(printed: Callable[[str], str]) -> None:
    """A cache in eight bits differs on any processor, and K and V, put there as they were computed, are all of it."""
    first, *lines, cause, counts = printed("notebook").strip().splitlines()
    kind = "hooked" if has_hooked_transformer() else "bridge"
    assert first.startswith(f"cached+int8 against recompute on zoo:mistral-mini ({kind}, float16, matched; ")
    assert re.search(r"different logits at \d+ of \d+ steps", first), first
    assert any(re.search(r"(?i)layers 0 to 3 together recover most: (9\d|10\d)\s%", line) for line in lines), lines
    assert "K and V as the cached path keeps them" in cause
    assert all(int(count) > 0 for count in counts.split())


def in_tests() -> str:
    given = (
        "import torch\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as MyModelForCausalLM\n"
        "torch.manual_seed(3)\n"
        "config = Config(vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,\n"
        "                num_key_value_heads=1, max_position_embeddings=128)\n"
    )
    return f"{given}{snippet('from kvinterp.testing')}\n\ntest_cache()"


def test_in_another_projects_tests(printed: Callable[[str], str]) -> None:
    printed("tests")


def own_model(folder: Path) -> str:
    folder = write_checkpoint("llama-mha", folder / "checkpoint")
    source = snippet('kv.load_model("/path/to')
    assert source.count("/path/to/checkpoint") == 1
    assert source.count("my_model, tokenizer=my_tokenizer") == 1
    # The one name that the snippet leaves to its reader for a whole object is a transformers model, its layers three.
    given = (
        "import torch\nimport kvinterp as kv\nfrom transformers import AutoModelForCausalLM\n"
        f"my_model = AutoModelForCausalLM.from_pretrained({str(folder)!r}).eval()\nmy_tokenizer = None\n"
        "tokens = torch.tensor([[5, 6, 7, 8]])\nother_tokens = torch.tensor([[9, 8, 7, 6]])\n"
    )
    source = source.replace("/path/to/checkpoint", str(folder)).replace("layers=(3,)", "layers=(2,)")
    source = source.replace('"resid_post", 3]', '"resid_post", 2]')
    return given + source


def test_your_own_model(printed: Callable[[str], str]) -> None:
    printed("own")


def commands() -> list[list[str]]:
    """Every kvinterp command of the README."""
    lines = "\n".join(blocks("bash")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kvinterp ")]


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
