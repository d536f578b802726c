"""Names that a package offers and imports when one is first used, so that whoever uses one file of it
loads that file alone.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from typing import Any

from kvinterp.common.source import source


def names_of(package: str) -> Callable[[str], Any]:
    """Makes the ``__getattr__`` of a package: a name comes from where the package imports it for type
    checkers.

    Args:
        package: The import name of the package. None of the names may be that of a module of it,
            which would hide the name.
    """

    def get(name: str) -> Any:
        node = source(package).nodes.get(name)
        if not isinstance(node, ast.ImportFrom):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(str(node.module)), name)

    return get
