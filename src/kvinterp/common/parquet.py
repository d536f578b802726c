"""Tables as Parquet files, a piece at a time: with many prompts a whole one would fill the memory."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvinterp.common.files import told

GROUP = 2**16
"""Rows of a group: a file is the same however its table was cut into pieces."""


class LongTable:
    """A table on disk, in a file without a name, which goes with this object or with the process.

    Args:
        folder: Where there is room for it.

    Attributes:
        attrs: What it was made with.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._places, self._rows = folder, list[tuple[int, int]](), 0
        self.attrs: Mapping[str, Any] = {}
        with told(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is open for as long as the table is there

    def __len__(self) -> int:
        """How many rows it has."""
        return self._rows

    def add(self, table: pd.DataFrame) -> None:
        """Adds rows as one more piece; without a row, a table only says which columns there are."""
        if table.empty and self._places:
            return
        if not self._rows:
            self._places.clear()
        with told(self._folder):
            place = self._file.seek(0, io.SEEK_END)
            self._places.append((place, self._file.write(table.to_parquet(None, index=False))))
        self._rows += len(table)

    def pieces(self, *columns: str) -> Iterator[pd.DataFrame]:
        """Its rows in the pieces that were added: all columns, or those of these that it has."""
        for place, size in self._places:
            self._file.seek(place)
            read = pq.ParquetFile(io.BytesIO(self._file.read(size)))
            piece = read.read([name for name in read.schema_arrow.names if name in columns] or None).to_pandas()
            piece.attrs = dict(self.attrs)
            yield piece

    def head(self, rows: int) -> pd.DataFrame:
        """Its first rows, for which no more pieces are read than hold them."""
        read: list[pd.DataFrame] = []
        for piece in self.pieces():
            read.append(piece)
            if sum(map(len, read)) >= rows:
                break
        return pd.concat(read, ignore_index=True).head(rows)

    def whole(self) -> pd.DataFrame:
        """All of it in memory."""
        return pd.concat(self.pieces(), ignore_index=True)


def write_table(table: pd.DataFrame | LongTable, file: IO[bytes]) -> None:
    """Writes what ``DataFrame.to_parquet`` would write, in groups of rows."""
    pieces = table.pieces() if isinstance(table, LongTable) else iter((table,))
    cut = (pa.Table.from_pandas(piece, preserve_index=False) for piece in pieces)
    waiting = next(cut)
    about = {"PANDAS_ATTRS": json.dumps(table.attrs)} if table.attrs else {}
    with pq.ParquetWriter(file, waiting.schema.with_metadata({**waiting.schema.metadata, **about})) as writer:
        for more in cut:
            waiting = pa.concat_tables([waiting, more])
            while len(waiting) > GROUP:
                writer.write_table(waiting[:GROUP].combine_chunks())
                waiting = waiting[GROUP:]
        writer.write_table(waiting.combine_chunks(), GROUP)
