"""Names that a package offers and imports when one is first used, so that whoever uses one file of it
loads that file alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def names_of(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Makes the ``__getattr__`` of a package.

    Args:
        package: The import name of the package.
        homes: For each of its modules the names that the package offers from it. None may be that of
            a module of the package, which would hide it.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return get
