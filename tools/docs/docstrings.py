"""What griffe is told of this project's docstrings: their roles are Sphinx's, and an ``Example:`` is code to be typed."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?(?:kvinterp\.)?([^`]*)`")


class Docstrings(griffe.Extension):
    """Names in roles become code, and examples a section of their own."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Rewrites the docstring of everything that has one."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value).replace("\nExample:\n", "\nExamples:\n")
