"""``kvinterp show``: the page of a folder, whichever command wrote it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from kvinterp.errors import InputError
from kvinterp.files import is_file
from kvinterp.folders import SUMMARY

__all__ = ["opened", "page_of"]

_PAGES = ("report.html", "audit.html")


def page_of(folder: Path) -> Path:
    """The page in a folder.

    Raises:
        InputError: There is none.
    """
    if not folder.is_dir():
        raise InputError(f"folder {str(folder)!r} is not there: give one that kvinterp wrote.")
    for name in _PAGES:
        if is_file(folder / name):
            return folder / name
    if is_file(folder / SUMMARY):
        raise InputError(f"folder {str(folder)!r} holds a result without a page: --rewrite makes one from its tables.")
    raise InputError(f"folder {str(folder)!r} holds no page ({' or '.join(_PAGES)}): give one that kvinterp wrote.")


def opened(page: Path) -> bool:
    """Opens a page in the browser, and says whether one could be started."""
    try:
        return webbrowser.open(page.resolve().as_uri())
    except (webbrowser.Error, OSError):
        return False
