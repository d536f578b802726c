"""Finds the experiment of every file in this folder, so that a new one is one new file: a command, and a line of the list."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvinterp.common.spec import is_class
from kvinterp.study.experiments.base import Experiment

_OTHERS = (
    "base",
    "choices",
    "circumstances",
    "functions",
    "keeping",
    "kit",
    "of_models",
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
OF_FILES = ("compare-traces",)
"""Those whose arguments are files, and no models."""


def command_of(name: str) -> tuple[str, ...]:
    """What stands behind ``kvinterp`` on the command line: ``study behaviour``, but ``compare``."""
    return (name,) if name in VERBS else ("study", name)


def question_of(name: str) -> str:
    """What the command is for, as its file's docstring says; the file is not imported."""
    source = Path(__file__).with_name(f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def options_of(name: str) -> dict[str, str]:
    """The options that a command's file and the classes it rests on give it, each with the type of its values.

    They are read from the source: to import the file takes seconds, and an option that is misspelt should be said at once.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in _fields(name.replace("-", "_"), name.title().replace("-", "")):
        field, made = ast.unparse(node.target), ast.unparse(node.value.func)
        flags = [word.value for word in node.value.keywords if word.arg == "flag"]
        flag = ast.literal_eval(flags[0]) if flags else f"--{field.replace('_', '-')}"
        found[field] = (flag, ast.unparse(node.annotation))
        if made in ("withheld", "argument", "model"):
            del found[field]
    return dict(found.values())


def _fields(file: str, kind: str) -> Iterator[Any]:
    """The fields of a class of this folder, as its source has them: those of the classes it derives from first."""
    body = ast.parse(Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8")).body
    own: Any = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == kind), None)
    homes = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    if own is None:  # It is passed on from another file.
        yield from _fields(str(homes[kind]).rpartition(".")[2], kind)
        return
    for parent in map(ast.unparse, own.bases):
        if parent != "Experiment":
            yield from _fields(str(homes[parent]).rpartition(".")[2], parent)
    yield from (node for node in own.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call))


def experiment_named(name: str) -> type[Experiment]:
    """The experiment of a command."""
    module = importlib.import_module(f"kvinterp.study.experiments.{name.replace('-', '_')}")
    (experiment,) = (
        value
        for value in vars(module).values()
        if is_class(value) and issubclass(value, Experiment) and value.__module__ == module.__name__
    )
    return experiment
