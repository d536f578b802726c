"""The command line, called within the process of the test."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from kvinterp.cli import app


def kvinterp(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def wrong(said: str, *arguments: str | Path) -> None:
    made = kvinterp(*arguments)
    assert made.exit_code == 2, (made.exit_code, made.output)
    message = made.stderr.replace("\n", " ")
    assert said in message
    errors = [line for line in made.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in made.stderr
