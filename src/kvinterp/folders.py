"""What is in the way in a folder that is to be written: asked before anything slow, and before anything is removed."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvinterp.cells import ADVICE, foreign_parts, has_parts, unfinished_runs, unlike
from kvinterp.errors import InputError, unknown
from kvinterp.files import Record, check_writable, is_there, refuse_foreign, strict_json, told

SUMMARY = "summary.json"
"""The file that every finished result has."""
EXISTING = {
    "error": "a finished result is never touched; an unfinished one with the same settings is taken up again",
    "overwrite": "what kvinterp wrote there before is removed once the new result is there",
    "use": "a finished result with the same settings is read instead of computed again",
}


def check_free(
    path: str | Path,
    existing: str = "error",
    names: Iterable[str] = (SUMMARY,),
    about: Mapping[str, Any] | None = None,
) -> None:
    """Raises where something is in the way: asked before anything slow, such as loading a model, begins.

    Args:
        path: The folder to be written.
        existing: What to do about what is already there, see :data:`EXISTING`.
        names: The files that will be written, the summary among them; ``figures/recovery*`` are all that begin so.
        about: What the result will be, ``verb`` among it; an unfinished one of something else is in the way.

    Raises:
        InputError: It cannot be written; it holds a finished result, an unfinished one of something else or a file of
            another result under one of the names, and ``existing`` is ``"error"``; or a file that kvinterp did not write.
    """
    if existing not in EXISTING:
        raise unknown("way to treat an existing result", existing, EXISTING)
    folder = Path(path)
    with told(folder):
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()
        record, names = Record(folder), list(names)
        marked = record.unfinished()
        settled = marked is None and not has_parts(folder)
        finished = settled and (folder / SUMMARY).exists()
        if existing == "error" and finished:
            raise InputError(f"folder {str(folder)!r} already holds a result: {ADVICE}")
        if existing != "overwrite" and about is not None:
            _check_unfinished(folder, marked, json.loads(strict_json(about)))
        if existing == "use" and finished:
            return
        check_names(folder, names)
        if existing == "error" and settled and (taken := [name for name in names if is_there(folder / name)]):
            raise InputError(f"folder {str(folder)!r} already holds {taken[0]!r} of another result: {ADVICE}")
        check_writable(folder)


def _check_unfinished(folder: Path, marked: Mapping[str, Any] | None, about: Mapping[str, Any]) -> None:
    verbs = [held.get("verb") for held in (*unfinished_runs(folder), marked or {})]
    others = [verb for verb in verbs if verb not in (None, about.get("verb"))]
    if others:
        raise InputError(f"folder {str(folder)!r} holds an unfinished result of {others[0]!r}: {ADVICE}")
    if marked is not None and marked != about:
        raise InputError(unlike(folder, "an unfinished result", marked, about))


def check_names(folder: Path, names: Iterable[str]) -> None:
    """Raises where a file that kvinterp did not write has one of these names, or is in the place of a folder.

    Args:
        folder: The folder to be written.
        names: The files that will be written, as :func:`check_free` takes them.

    Raises:
        InputError: There is such a file.
    """
    figures = folder / "figures"
    if is_there(figures):
        if figures.is_symlink() or not figures.is_dir():
            raise InputError(
                f"folder {str(folder)!r} holds 'figures', which is no folder and which kvinterp did not write: choose another "
                "folder with --out, or move it away."
            )
        check_writable(figures)
    there = [
        [path.relative_to(folder).as_posix() for path in sorted(folder.glob(name))] if "*" in name else [name]
        for name in names
    ]
    refuse_foreign(Record(folder), dict.fromkeys(itertools.chain(*there)))
    if foreign := foreign_parts(folder):
        raise InputError(foreign)
