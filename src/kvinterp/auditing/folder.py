"""The folder that an audit writes: verdict.json, the page, and the tables as Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvinterp.common.files import SUMMARY, check_writable, is_file, read_json, write_whole
from kvinterp.errors import InputError

if TYPE_CHECKING:
    from kvinterp.auditing.ladder import PrecisionRun

TABLES = ("steps", "local", "sweep", "chunks")
GIVEN = "given.parquet"
"""The tokens of another engine, where its log-probs were judged."""
VERDICT = "verdict.json"
NAMES = ("report.html", *(f"{name}.parquet" for name in TABLES), GIVEN, VERDICT)


def check_own(folder: Path) -> None:
    """Raises where an audit cannot be written: asked before anything slow. An earlier audit of the
    folder is no obstacle.

    Raises:
        InputError: It is no folder or cannot be written, or holds another command's result or a
            file under a name that an audit needs.
    """
    if is_file(folder):
        raise InputError(
            f"{str(folder)!r} is a file, and an audit writes a folder: choose another with --out."
        )
    check_writable(folder)
    if is_file(folder / SUMMARY):
        raise InputError(
            f"folder {str(folder)!r} holds another command's result: choose another folder with --out."
        )
    if read_json(folder / VERDICT) is None and (
        taken := [name for name in NAMES if (folder / name).exists()]
    ):
        raise InputError(
            f"folder {str(folder)!r} holds {taken[0]!r}, which is of no audit: choose another folder with --out."
        )


def tables_of(rungs: Sequence[PrecisionRun]) -> dict[str, pd.DataFrame]:
    """The tables of all precisions, those of one below those of another; none that is empty."""
    tables = {}
    for name in TABLES:
        frames = [
            getattr(rung, name).assign(rung=rung.name) for rung in rungs if len(getattr(rung, name))
        ]
        if frames:
            tables[name] = pd.concat(frames, ignore_index=True)
    return tables


def put(
    texts: Mapping[str, str], folder: Path, tables: Mapping[str, pd.DataFrame] | None = None
) -> Path:
    """Writes tables and texts, over an earlier audit's; each file is complete or not there at all.

    Raises:
        InputError: As :func:`check_own` says.
    """
    check_own(folder)
    files = {
        f"{name}.parquet": table.to_parquet(None, index=False)
        for name, table in (tables or {}).items()
    }
    # The verdict is written last, and says nothing until then: where it can be read, everything is
    # there.
    write_whole(folder / VERDICT, "{}")
    for name in {*NAMES} - {*files, *texts}:
        (folder / name).unlink(missing_ok=True)
    for name, content in [
        *files.items(),
        *sorted(texts.items(), key=lambda text: text[0] == VERDICT),
    ]:
        write_whole(folder / name, content)
    return folder
