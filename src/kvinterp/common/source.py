"""What a module of kvinterp defines, read from its source: of what it imports only what is used is
read or imported.

``kvinterp list`` and ``--help`` show the fields and docstrings of classes whose modules import
torch, which takes seconds.
"""

from __future__ import annotations

import ast
import dataclasses  # noqa: F401  # where a dataclass looks for what its annotations name
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar  # noqa: F401

ROOT = Path(__file__).parents[2]
"""The folder that holds the package."""


class Source(dict[str, Any]):
    """The names of a module, each made when it is first asked for; :func:`source` keeps one for
    each module.
    """

    def __init__(self, file: Path) -> None:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        super().__init__(__name__=__name__, __doc__=ast.get_docstring(tree))
        self.nodes = {name: node for node in _statements(tree.body) for name in _bound(node)}

    def __missing__(self, name: str) -> Any:
        node = self.nodes[name]
        if (
            isinstance(node, ast.ImportFrom)
            and str(node.module).startswith("kvinterp")
            and node.module not in sys.modules
        ):
            (called,) = (alias.name for alias in node.names if name in (alias.asname, alias.name))
            if called in (names := source(str(node.module))).nodes:
                self[name] = names[called]
                return self[name]
        if isinstance(node, ast.ClassDef):
            # Its fields stand by their types; what else its body computes from other names is not
            # asked for.
            node.body = [
                part
                for part in node.body
                if not (isinstance(part, ast.Assign) and [*_read_by(part.value)])
            ]
            # A class's body looks its names up where nothing can be made for it.
            for known in self.nodes.keys() & set(_read_by(node)) - {name}:
                self[known]
        exec(compile(ast.Module([node], []), "<source>", "exec"), self)
        return self[name]

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def classes(self) -> list[type]:
        """The public classes that the module defines."""
        return [
            self[name]
            for name, node in self.nodes.items()
            if isinstance(node, ast.ClassDef) and name[0] != "_"
        ]


@functools.cache
def source(module: str) -> Source:
    """The names of a module, which is not imported."""
    return Source(file_of(module))


def parameters(function: str) -> dict[str, tuple[inspect.Parameter, str]]:
    """The parameters of a function, each with what the first paragraph of its entry under ``Args:``
    says; its module is not imported.

    Args:
        function: Its import name, as in ``kvinterp.comparison.comparing:compare``.
    """
    module, _, name = function.partition(":")
    read = source(module)[name]
    # An entry ends where the next begins, its first paragraph at an empty line.
    entry = re.compile(r"(?m)^    (\w+): ((?:.+\n?)+?)(?=\n|    \w|\Z)")
    said = {
        name: " ".join(text.split()) for name, text in entry.findall(inspect.getdoc(read) or "")
    }
    given = inspect.signature(read).parameters
    return {name: (given[name], said.get(name, "").replace("``", "")) for name in given}


def file_of(module: str) -> Path:
    """The file of a module or package, ours or of others; it is not imported."""
    top, *below = module.split(".")
    found = None if top == "kvinterp" else importlib.util.find_spec(top)
    whole = ROOT / top if found is None or found.origin is None else Path(found.origin)
    # A package's own file is its __init__.py.
    path = (whole.parent if whole.name == "__init__.py" else whole).joinpath(*below)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, with those for type checkers alone, in which a package imports
    what it offers on demand.
    """
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from node.body
        else:
            yield node


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return [
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    ]


def _read_by(node: ast.AST) -> Iterator[str]:
    """The names that a class's statement reads at once, not those that its functions read when they
    are called.
    """
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    later = ("annotation", "returns", *["body"] * isinstance(node, ast.FunctionDef | ast.Lambda))
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in later:
                yield from _read_by(child)
