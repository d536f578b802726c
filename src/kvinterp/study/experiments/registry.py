"""Finds the experiment of every file in this folder, so that a new one is one new file: a command, and a line of the list."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvinterp.common.spec import plugins_read

if TYPE_CHECKING:
    from kvinterp.study.experiments.base import Experiment

_OTHERS = (
    "base",
    "choices",
    "circumstances",
    "functions",
    "keeping",
    "kit",
    "options",
    "registry",
    "running",
)


def experiments() -> tuple[str, ...]:
    """The names of their commands; no file is imported for them."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(module.name.replace("_", "-") for module in modules if module.name not in _OTHERS)


VERBS = ("compare", "compare-traces", "patch", "decompose", "attention", "audit", "kernels")
"""Those that are commands of their own; the others are studies."""


def command_of(name: str) -> tuple[str, ...]:
    """What stands behind ``kvinterp`` on the command line: ``study behaviour``, but ``compare``."""
    return (name,) if name in VERBS else ("study", name)


def question_of(name: str) -> str:
    """What the command is for, as its file's docstring says; the file is not imported."""
    file = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    return inspect.cleandoc(file.read_text(encoding="utf-8").split('"""')[1])


def experiment_read(name: str) -> Any:
    """The experiment of a command with its fields, read from its file: to import what it rests on takes seconds."""
    (kind,) = plugins_read("kvinterp.study.experiments.base:Experiment", _module(name)).values()
    return kind


def experiment_named(name: str) -> type[Experiment]:
    """The experiment of a command."""
    return getattr(importlib.import_module(_module(name)), experiment_read(name).__name__)


def _module(name: str) -> str:
    return f"kvinterp.study.experiments.{name.replace('-', '_')}"
