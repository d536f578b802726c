"""Finds the commands: a file each, in this folder or where a wing hands them in, so that a new one
is one new file.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from kvinterp.common.source import file_of
from kvinterp.common.spec import plugins_read
from kvinterp.common.wings import handed
from kvinterp.common.words import unwrapped

if TYPE_CHECKING:
    from kvinterp.commands.base import Experiment

_HERE = "kvinterp.commands"
_OTHERS = (
    "base",
    "cells",
    "choices",
    "circumstances",
    "functions",
    "keeping",
    "kit",
    "options",
    "registry",
    "results",
    "running",
)
"""The files of this folder that are no commands."""


@functools.cache
def _modules() -> dict[str, tuple[str, str]]:
    """The module of each command, and the group that hands it in, by its name; none is imported."""
    homes = [
        ("commands", _HERE),
        *(
            (group, point.value)
            for group in ("commands", "studies")
            for point in handed(group).values()
        ),
    ]
    found = {}
    for group, home in homes:
        file = file_of(home)
        package = file.name == "__init__.py"
        files = (
            [each.name for each in pkgutil.iter_modules([str(file.parent)])] if package else [""]
        )
        for name in files if home != _HERE else sorted({*files} - {*_OTHERS}):
            module = f"{home}.{name}".rstrip(".")
            found[module.rpartition(".")[2].replace("_", "-")] = module, group
    return dict(sorted(found.items()))


def experiments() -> tuple[str, ...]:
    """The names of their commands; no file is imported for them."""
    return tuple(_modules())


def command_of(name: str) -> tuple[str, ...]:
    """What stands behind ``kvinterp`` on the command line: ``study behaviour``, but ``compare``."""
    return (name,) if _modules()[name][1] == "commands" else ("study", name)


def question_of(name: str) -> str:
    """What the command is for, as its file's docstring says; the file is not imported."""
    return unwrapped(file_of(_modules()[name][0]).read_text(encoding="utf-8").split('"""')[1])


def experiment_read(name: str) -> Any:
    """The experiment of a command with its fields, read from its file: to import what it rests on
    takes seconds.
    """
    (kind,) = plugins_read("kvinterp.commands.base:Experiment", _modules()[name][0]).values()
    return kind


def experiment_named(name: str) -> type[Experiment]:
    """The experiment of a command."""
    return getattr(importlib.import_module(_modules()[name][0]), experiment_read(name).__name__)
