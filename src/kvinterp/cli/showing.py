"""``kvinterp show``: the page of a folder, whichever command wrote it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from kvinterp.common.files import SUMMARY, is_file, is_folder
from kvinterp.errors import InputError

_PAGE = "report.html"


def page_of(folder: Path) -> Path:
    """The page in a folder.

    Raises:
        InputError: There is none.
    """
    from kvinterp.study.results import read_summary

    if not is_folder(folder):
        raise InputError(f"folder {str(folder)!r} is not there: give one that kvinterp wrote.")
    if is_file(folder / _PAGE):
        return folder / _PAGE
    if is_file(folder / SUMMARY):
        read_summary(folder)
        raise InputError(
            f"folder {str(folder)!r} holds a result without a page: kvinterp show --rewrite makes one from its tables."
        )
    from kvinterp.common.store import check_finished

    check_finished(folder)
    raise InputError(f"folder {str(folder)!r} holds no page ({_PAGE}): give one that kvinterp wrote.")


def opened(page: Path) -> bool:
    """Opens a page in the browser, and says whether one could be started."""
    try:
        return webbrowser.open(page.resolve().as_uri())
    except (webbrowser.Error, OSError):
        return False


def rewritten(folder: Path) -> list[str]:
    """Writes the page of a folder and its figures again, from its tables; no model is loaded.

    Returns:
        What is said first on it. An audit's page, which shows more than its tables hold, is left as it is.

    Raises:
        InputError: The folder holds no result, one that is damaged, or cannot be written.
    """
    from kvinterp.study.experiments.keeping import load
    from kvinterp.study.results import read_summary

    if not is_folder(folder):
        raise InputError(f"folder {str(folder)!r} is not there: give one that kvinterp wrote.")
    result = load(folder)
    result.report()
    cut = is_file(folder / SUMMARY) and read_summary(folder).get("interrupted")
    return [*["This run was interrupted: only what was finished by then is in it."] * bool(cut), *result.sentences()]
