"""The command line, called within the process of the test; and programs that need a process of their own, in one together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand
from typer.testing import CliRunner, Result

from kvinterp.cli import app
from kvinterp.commands.choices import check_early
from kvinterp.commands.registry import command_of, experiment_read, experiments


def written(arguments: Sequence[str | Path]) -> list[str]:
    """Arguments as a user writes them: before the name of a study stands ``study``."""
    name, *rest = map(str, arguments) if arguments else ("",)
    return [*(command_of(name) if name in experiments() else (name,)), *rest] if arguments else []


def kvinterp(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, written(arguments))


def wrong(said: str, *arguments: str | Path) -> None:
    made = kvinterp(*arguments)
    assert made.exit_code == 2, (made.exit_code, made.output)
    message = made.stderr.replace("\n", " ")
    assert said in message
    errors = [line for line in made.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in made.stderr


def parsed(arguments: Sequence[str]) -> Any:
    """Arguments as the command line reads them; nothing is run."""
    command, rest = typer.main.get_command(app), list(arguments)
    while rest and (found := getattr(command, "commands", {}).get(rest[0])):
        command, rest = found, rest[1:]
    # The folder that it would write, and the model that a page may call MODEL, are not looked at.
    context = TyperCommand.make_context(command, command.name, rest)
    if command.name in experiments():
        check_early(experiment_read(command.name), context.params)
    return context


_ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys, traceback
said = {}
for name, source in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
            error = ""
        except SystemExit as left:
            error = f"it left with {left.code}" if left.code else ""
        except BaseException:
            error = traceback.format_exc()
    said[name] = [out.getvalue(), error]
print(json.dumps(said))
"""


def one_after_another(sources: dict[str, str], folder: Path, environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Runs programs in one process of their own, since importing torch is most of the time of each.

    Args:
        sources: The programs, by name.
        folder: Where they run.
        environment: The variables of the process.

    Returns:
        What each printed, and the error that it ended with, which is empty where there was none.
    """
    made = subprocess.run(
        [sys.executable, "-c", _ONE_AFTER_ANOTHER, json.dumps(sources)],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return {name: (out, error) for name, (out, error) in json.loads(made.stdout.splitlines()[-1]).items()}


def program(*arguments: str) -> str:
    """The source of a program that is the command line with these arguments."""
    return f"import sys\nfrom kvinterp.cli import main\nsys.argv = {['kvinterp', *written(arguments)]!r}\nmain()\n"
