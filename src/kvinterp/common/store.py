"""The cells of unfinished work, one Parquet file each, and files that appear whole or not at all.

A file is written beside its place and renamed, so that a killed process leaves the whole file or
none. The cells of a run are under ``.cells`` in the folder of its result until the result is
finished. Their folder is named by a digest of all that
determines their numbers: a run with other weights, versions, threads or kernels has another folder
and does not find them. Two runs may write into one folder at the same time: each writes whole
files, and computes again the cells that the other has removed at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvinterp.common.files import PARTIAL, differences, strict_json, write_whole
from kvinterp.errors import InputError

log = logging.getLogger("kvinterp")

CELLS = ".cells"
"""The folder of the cells of unfinished runs, in the folder of their result."""
CellResult = tuple[dict[str, pd.DataFrame], dict[str, Any]]
"""The content of a cell: tables by name, and further plain JSON values."""

_ABOUT, _SETTINGS = "about", b"settings"
"""The column of a cell's file that is no table; the key of its metadata for the settings that
determine its numbers.
"""


class CellStore:
    """The cells of a run.

    Args:
        folder: The folder of its result; it need not exist.
        settings: Everything that determines the numbers, as plain JSON values: the circumstances
            (versions, device, threads, weights) in ``made_with``, and the user's choices.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._settings = folder, strict_json(settings).encode()
        self._cells = folder / CELLS / hashlib.sha256(self._settings).hexdigest()[:16]

    def keep(
        self, key: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None
    ) -> None:
        """Writes the content of one cell.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        # The tables of a cell differ in their columns, so each is one value of the cell's only row.
        values = {name: table.to_parquet(None, index=False) for name, table in tables.items()}
        columns = {
            name: [value]
            for name, value in {**values, _ABOUT: json.dumps(dict(about or {}))}.items()
        }
        cell = pa.table(columns).replace_schema_metadata({_SETTINGS: self._settings})
        write_whole(
            self._cells / f"{key}.parquet",
            lambda file: pq.write_table(cell, file, compression="NONE"),
        )

    def read(self, key: str) -> CellResult | None:
        """Reads the content of a cell; None where there is none that can be read."""
        try:
            (cell,) = _opened(self._cells / f"{key}.parquet").read().to_pylist()
            about = json.loads(cell.pop(_ABOUT))
            return {
                name: pd.read_parquet(io.BytesIO(content)) for name, content in cell.items()
            }, about
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            log.warning(
                "cell %s in %s cannot be read and is made again (%s)", key, self.folder, error
            )
            return None

    def say_others(self) -> None:
        """Logs that cells of other settings are not used, and which settings differ."""
        for other in sorted((self.folder / CELLS).glob("*")):
            cell = next(other.glob("*.parquet"), None)
            if other == self._cells or cell is None:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, pa.ArrowException):
                settings = _opened(cell).schema_arrow.metadata[_SETTINGS]
                changed = differences(json.loads(settings), json.loads(self._settings)).replace(
                    "made_with.", ""
                )
                sentence = "what an unfinished run left in %s is not used: it was made with other settings (%s)"
                log.warning(sentence, self.folder, changed)


def _opened(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(io.BytesIO(path.read_bytes()))


def check_finished(folder: Path) -> None:
    """Raises InputError for a folder that holds the cells of an unfinished run."""
    if any((folder / CELLS).rglob("*.parquet")):
        raise InputError(
            f"folder {str(folder)!r} holds an unfinished run: give the same command again, which goes on."
        )


def clear_cells(folder: Path) -> None:
    """Removes all cells of a folder, and files that killed processes left half written."""
    shutil.rmtree(folder / CELLS, ignore_errors=True)
    for partial in [*folder.glob(f".*{PARTIAL}"), *folder.glob(f"figures/.*{PARTIAL}")]:
        with contextlib.suppress(OSError):
            partial.unlink()
