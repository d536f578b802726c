"""The folder that an audit writes: verdict.json, the page, and the tables as Parquet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvinterp.common.files import SUMMARY, check_writable, digest_of, is_file, sealed, told
from kvinterp.common.store import Store, write_whole
from kvinterp.errors import InputError

if TYPE_CHECKING:
    from kvinterp.auditing.ladder import PrecisionRun

TABLES = ("steps", "local", "sweep", "chunks")
_ABOUT = {"verb": "audit"}
GIVEN = "given.parquet"
"""The tokens of another engine, where its log-probs were judged."""
NAMES = ("report.html", *(f"{name}.parquet" for name in TABLES), GIVEN, "verdict.json")


def check_own(folder: Path) -> None:
    """Raises where an audit cannot be written: asked before anything slow. An earlier audit of the folder is no obstacle.

    Raises:
        InputError: It is no folder or cannot be written, holds an unfinished result of another verb, or a file that
            kvinterp did not write under a name that an audit needs.
    """
    with told(folder):
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # A name that none can have is said now, not after the work.
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{str(folder)!r} is a file, and an audit writes a folder: choose another with --out.")
        store = Store(folder)
        other = (store.unfinished() or _ABOUT).get("verb")
        if other != "audit":
            raise InputError(
                f"folder {str(folder)!r} holds an unfinished result of {other!r}: choose another folder with --out, or run "
                "that command again."
            )
        if is_file(folder / SUMMARY):
            raise InputError(f"folder {str(folder)!r} holds another command's result: choose another folder with --out.")
        store.refuse_foreign(NAMES)
        check_writable(folder)


def tables_of(rungs: Sequence[PrecisionRun]) -> dict[str, pd.DataFrame]:
    """The tables of all precisions, those of one below those of another; none that is empty."""
    found = {}
    for name in TABLES:
        frames = [getattr(rung, name).assign(rung=rung.name) for rung in rungs if len(getattr(rung, name))]
        if frames:
            found[name] = pd.concat(frames, ignore_index=True)
    return found


def put(texts: Mapping[str, str], folder: Path, tables: Mapping[str, pd.DataFrame] | None = None) -> Path:
    """Writes tables and what :func:`texts_of` gave, over an earlier audit's; each file is complete or not there at all.

    Raises:
        InputError: As :func:`check_own` says.
    """
    with Store(folder) as store:
        check_own(folder)
        # Nothing of an earlier audit stays beside this one.
        store.begin(_ABOUT, store.names() & set(NAMES))
        digests: dict[str, str] = {}
        files = {f"{name}.parquet": table.to_parquet(None, index=False) for name, table in (tables or {}).items()}
        for name, text in [*files.items(), *texts.items()]:
            # The verdict is written last: where it is, everything is. It holds the digests of all.
            write_whole(folder / name, text if name != "verdict.json" else sealed(name, json.loads(text), digests))
            digests[name] = digest_of(folder / name)
        store.settle()
    return folder
