"""Exit code 0 is given by a verdict alone: code that leaves is refused, and what cannot be printed was not delivered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.cli import app
from kvinterp.common.files import write_whole

OPTIONS = ["--lengths", "5", "--steps", "1", "--rungs", "float32", "--dtype", "float32", "--device", "cpu"]
OPTIONS += ["--checks", "none"]

MODULE = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.12)

class Config(LlamaConfig):
    def __init__(self, **kwargs):
        super().__init__(**{**SMALL, **kwargs})

class Mine(LlamaForCausalLM):
    config_class = Config

class Cached(Mine):
    def forward(self, input_ids, *args, past_key_values=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length() and input_ids.shape[1] == 1:
            WAY
        return super().forward(input_ids, *args, past_key_values=past_key_values, **kwargs)

def made():
    WAY

def whole():
    return Mine(Config())
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Writes a user's module whose parts leave in a way, into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def written(way: str) -> Any:
        (tmp_path / "leaving.py").write_text(MODULE.replace("WAY", way))
        import leaving

        return leaving

    yield written
    sys.modules.pop("leaving", None)


# Code that leaves ------------------------------------------------------------------------------------------------------


def test_what_is_no_model_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`audit builtins:exit` ended with 0 and printed nothing, which CI reads as PASS."""
    monkeypatch.chdir(tmp_path)
    wrong("code that was run raised SystemExit", "audit", "builtins:exit")
    assert list(tmp_path.iterdir()) == []


def test_a_users_code_that_leaves_is_bad_input(code: Callable[[str], Any]) -> None:
    code("sys.exit(0)")
    made = kvinterp("audit", "leaving:Cached", *OPTIONS, "--json")
    assert (made.exit_code, json.loads(made.stdout)["exit_code"]) == (2, 2)


def test_an_error_of_kvinterps_own_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a bug there is a traceback, and the exit code of no verdict: Python's own is 1."""
    from kvinterp import cli

    monkeypatch.setattr(cli, "LISTED", {"kinds": lambda: 1 / 0})
    monkeypatch.setattr(sys, "argv", ["kvinterp", "list", "kinds"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


# What is printed arrives -----------------------------------------------------------------------------------------------


COMMANDS = [("list", "kinds", "--json"), ("list",), ("show", "FOLDER", "--no-open")]


def _called(arguments: tuple[str, ...], folder: Path) -> int | str | None:
    write_whole(folder / "report.html", b"a page")
    with pytest.raises(SystemExit) as left:
        app([each.replace("FOLDER", str(folder)) for each in arguments])
    return left.value.code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_standard_output(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert _called(arguments, tmp_path) == 2
        assert sys.stdout is full
    assert "standard output cannot be written (No space left on device)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_closed_standard_output(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert _called(arguments, tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: standard output is closed")


# In a shell ------------------------------------------------------------------------------------------------------------


def _shell(line: str, folder: Path) -> tuple[int, str]:
    """The exit code of kvinterp, behind which a shell has put something, and what it said on standard error."""
    program = f"{sys.executable} -c 'from kvinterp.cli import main; main()'"
    made = subprocess.run(
        ["bash", "-c", f"{line.replace('kvinterp', program, 1)}; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in made.stderr
    assert "Exception ignored" not in made.stderr
    return made.returncode, made.stderr


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    assert _shell("kvinterp list | true", tmp_path) == (0, "")


# What a terminal, a reader and an environment do ------------------------------------------------------------------------


HOSTILE = "evil\x1b[2J\u202e\nPASS  rounding"
SAFE = r"evil\x1b[2J\u202e\nPASS  rounding"


def test_names_command_no_terminal_and_forge_no_line(tmp_path: Path, code: Callable[[str], Any]) -> None:
    """`print(both.where())` sent what a folder's name held to the terminal, and a line feed in it began a line of its own."""
    adapter = kv.wrap(code("pass").whole().eval(), name=HOSTILE)
    both = kv.compare(adapter, [5, 6, 7], max_new_tokens=2, record="resid_post")
    both.save(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["provenance"]["model"] == SAFE
    # A folder may come from anybody: what its summary says is shown alike.
    (tmp_path / "out" / "summary.json").write_text(json.dumps(summary).replace(json.dumps(SAFE), json.dumps(HOSTILE)))
    for found in (both, kv.load(tmp_path / "out"), kv.localise(adapter, [5, 6, 7])):
        said = [repr(found), *found.sentences(), *([found.where()] if hasattr(found, "where") else [])]
        assert SAFE in said[0]
        for text in said:
            # Numbers hold spaces that do not break.
            assert all(c.isprintable() or c in "\n\u00a0\u202f" for c in text), text
            assert not any(line.startswith("PASS") for line in text.splitlines())


# Memory that is not there ------------------------------------------------------------------------------------------------

ONE = ["compare", "zoo:gqa2-mini", "--prompts", "arithmetic:1", "--max-new-tokens", "2", "--device", "cpu", "--json"]


def test_too_little_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*given: Any, **named: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("kvinterp.commands.running.write_result", none_left)
    ended = CliRunner().invoke(app, [*ONE, "--out", str(tmp_path / "out")])
    assert ended.exit_code == 2
    said = json.loads(ended.stdout)["error"]
    assert said.startswith("there was not enough memory (MemoryError")
    monkeypatch.undo()
    assert CliRunner().invoke(app, [*ONE, "--out", str(tmp_path / "out")]).exit_code == 0
