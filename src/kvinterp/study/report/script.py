"""The scripts of pages and notebooks, and their styles: plain files, joined in the order that they are named in.

No script imports another, so that one text serves a page, which allows it by its hash, and a notebook's widget.
"""

from __future__ import annotations

import functools
from importlib import resources

from markupsafe import Markup

from kvinterp.errors import unknown


def script(*names: str) -> Markup:
    """The code of several scripts as one module, fit to stand inside a page.

    Args:
        names: Files of ``static/`` without their ending, the one that others use first: ``script("draw", "page")``.

    Raises:
        InputError: There is no such script.
    """
    return _joined(names, "js")


def styles(*names: str) -> Markup:
    """The styles that go with scripts, as one style sheet; named as in :func:`script`."""
    return _joined(names, "css")


@functools.cache
def _joined(names: tuple[str, ...], ending: str) -> Markup:
    folder = resources.files("kvinterp.study.report").joinpath("static")
    have = sorted(file.name.removesuffix(f".{ending}") for file in folder.iterdir() if file.name.endswith(f".{ending}"))
    for name in names:
        if name not in have:
            raise unknown(f"{ending} file", name, have)
    # The files are ours and hold no "</"; nothing of a user's is ever joined to them.
    return Markup("\n".join(folder.joinpath(f"{name}.{ending}").read_text(encoding="utf-8") for name in names))
