"""Files that are there whole or not at all, and cells of unfinished work: one Parquet file each.

A file is written beside its place and renamed into it, so that whatever kills the process leaves the whole file or none. The
cells of a run lie under ``.cells`` in the folder of its result until that is finished, in a folder named by a digest of all that
decides their numbers: made with other weights, versions, threads or kernels, a cell lies elsewhere and is not found. Two runs
may fill one folder at once: each writes whole files, and makes again what the other, finished first, has taken away.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvinterp.common.files import differences, replaced, strict_json, sweep_partials, told

log = logging.getLogger("kvinterp")

CELLS = ".cells"
"""The folder of the cells of unfinished runs, in that of their result."""
Made = tuple[dict[str, pd.DataFrame], dict[str, Any]]
"""What a cell gave: tables by name, and what else belongs to them as plain JSON values."""

_ABOUT, _SETTINGS = "about", b"settings"
"""The column of a cell's file that is no table; the key of its metadata under which it says what decided its numbers."""


class Store:
    """The cells of a run.

    Args:
        folder: The folder of its result; it need not exist.
        settings: Everything that decides the numbers, as plain JSON values: ``made_with`` holds the circumstances (versions,
            device, threads, weights), the rest was chosen.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._settings = folder, strict_json(settings).encode()
        self._place = folder / CELLS / hashlib.sha256(self._settings).hexdigest()[:16]

    def keep(self, key: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None) -> None:
        """Keeps what one cell gave.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        # Tables of one cell have other columns each, which one table of Parquet cannot hold: a table is a value.
        values = {name: table.to_parquet(None, index=False) for name, table in tables.items()}
        columns = {name: [value] for name, value in {**values, _ABOUT: json.dumps(dict(about or {}))}.items()}
        cell = pa.table(columns).replace_schema_metadata({_SETTINGS: self._settings})
        write_whole(self._place / f"{key}.parquet", lambda file: pq.write_table(cell, file, compression="NONE"))

    def read(self, key: str) -> Made | None:
        """The tables of a cell and what belongs to it; None where there is none that can be read."""
        try:
            (cell,) = _opened(self._place / f"{key}.parquet").read().to_pylist()
            about = json.loads(cell.pop(_ABOUT))
            return {name: pd.read_parquet(io.BytesIO(content)) for name, content in cell.items()}, about
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            log.warning("cell %s in %s cannot be read and is made again (%s)", key, self.folder, error)
            return None

    def say_others(self) -> None:
        """Says of cells that were made with other settings that they are not used, and what differs."""
        for place in sorted((self.folder / CELLS).glob("*")):
            cell = next(place.glob("*.parquet"), None)
            if place == self._place or cell is None:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, pa.ArrowException):
                settings = _opened(cell).schema_arrow.metadata[_SETTINGS]
                changed = differences(json.loads(settings), json.loads(self._settings)).replace("made_with.", "")
                said = "what an unfinished run left in %s is not used: it was made with other settings (%s)"
                log.warning(said, self.folder, changed)


def _opened(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(io.BytesIO(path.read_bytes()))


def clear_cells(folder: Path) -> None:
    """Removes all cells of a folder, and what killed processes left there half written."""
    shutil.rmtree(folder / CELLS, ignore_errors=True)
    sweep_partials(folder)


def write_whole(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Writes a file so that it is there whole or not at all; its folder is made.

    Args:
        path: The file.
        content: What is in it, or what writes that.

    Raises:
        InputError: It cannot be written.
    """

    def write() -> None:
        with replaced(path) as file:
            if callable(content):
                content(file)
            else:
                # Of a file's name that is no UTF-8, which a page may show, an escape is written.
                file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)

    with told(path.parent):
        try:
            write()
        except FileNotFoundError:
            # Another run into this folder, as it finished, took away what was half written.
            write()
