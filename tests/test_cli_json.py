"""`--json`: one object on standard output, whatever happens, and everything else on standard error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer

from command_line import kvinterp
from kvinterp.cli import app
from kvinterp.commands.registry import experiments

MODEL = "zoo:gqa2-mini"
QUICK = ("--prompts", "arithmetic:1", "--max-new-tokens", "2", "--device", "cpu")


def said(made: Any) -> dict[str, Any]:
    """The object, which is all that is on standard output, and JSON for every reader: without NaN and Infinity."""
    found = json.loads(made.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert isinstance(found, dict)
    return found


def test_it_is_the_summary_with_folder_and_exit_code(tmp_path: Path) -> None:
    made = kvinterp("compare", MODEL, "--out", tmp_path / "out", "--record", "resid_post", *QUICK, "--json")
    assert made.exit_code == 0, made.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert said(made) == {**summary, "verb": "compare", "folder": str(tmp_path / "out"), "exit_code": 0}
    assert "steps.parquet" in summary["files"]
    assert "cached against recompute" in made.stderr
    assert str(tmp_path / "out" / "report.html") in made.stderr


def test_list_gives_rows_by_column() -> None:
    found = said(kvinterp("list", "models", "--json"))
    assert MODEL in [row["name"] for row in found["models"]]


def test_numbers_that_json_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvinterp.common.result import Result

    summary = {"mean": math.nan, "worst": math.inf, "each": [math.nan, 1.0]}
    monkeypatch.setattr("kvinterp.auditing.commands.kernels.Kernels.run", lambda *_, **__: Result(summary=summary))
    monkeypatch.setattr("kvinterp.auditing.commands.kernels.Kernels.print_result", lambda *_: None)
    found = said(kvinterp("kernels", MODEL, "--json", "--out", tmp_path / "out"))
    assert (found["mean"], found["worst"], found["each"]) == (None, "inf", [None, 1.0])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("compare", "zoo:nothing", "--out", "OUT"), "unknown zoo model 'nothing'"),
        (("compare", MODEL, "--out", "OUT", "--prompts", "\x1b[2J.jsonl"), r"prompt file '\x1b[2J.jsonl' does not exist"),
        (("compare", MODEL, "--out", "OUT", "--no-such"), "unknown option '--no-such'"),
        (("kernels", "--seed", "x"), "Invalid value for '--seed'"),
        (("comapre",), "No such command 'comapre'"),
    ],
)
def test_an_error_is_an_object_too(tmp_path: Path, arguments: tuple[str, ...], error: str) -> None:
    made = kvinterp(*(str(tmp_path / "out") if each == "OUT" else each for each in arguments), "--json")
    found = said(made)
    assert (made.exit_code, found["exit_code"]) == (2, 2)
    assert error.lower() in found["error"].lower()
    assert "\x1b" not in made.stdout
    assert made.stderr.strip(), "a person reads it on standard error"
    assert not (tmp_path / "out").exists()


def test_an_interruption_is_an_object_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvinterp.commands.cells.Local.__call__", interrupted)
    made = kvinterp("compare", MODEL, "--out", tmp_path / "out", "--record", "", *QUICK, "--json")
    found = said(made)
    assert (made.exit_code, found["exit_code"]) == (130, 130)
    assert found["error"].startswith("interrupted: ")


def test_every_command_has_it() -> None:
    root: Any = typer.main.get_command(app)
    named = {**root.commands["study"].commands, **root.commands}
    for name in (*experiments(), "list", "show"):
        command = named[name]
        flags = [flag for each in command.get_params(typer.Context(command)) for flag in each.opts]
        assert flags.count("--json") == 1, name
