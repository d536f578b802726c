"""Results of nothing but tables, for the tests of what is done with folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.commands.cells import Cell, CellsMade
from kvinterp.commands.compare import Compare
from kvinterp.commands.results import check_free, is_finished, prompts_digest, prompts_of, write_result
from kvinterp.commands.running import read_result as read_result_of
from kvinterp.common.store import CELLS, CellResult, CellStore
from kvinterp.comparison import PARTS, Comparison
from kvinterp.data import Prompt


def write_tables(
    path: Path,
    tables: Mapping[str, pd.DataFrame],
    summary: Mapping[str, Any],
    existing: str = "error",
    draw: Callable[[Path], Iterable[Path]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[Path]:
    """What a verb does once its cells are done."""
    settings = dict(about or {})
    if check_free(path, settings.get("verb"), existing):
        is_finished(path, settings)
    files = [*(f"{name}.parquet" for name in tables), "report.html", "figures/recovery*"]
    return write_result(path, settings, files, tables, summary, {}, draw)


def changed(path: Path, **more: Any) -> None:
    """Changes what a JSON file says."""
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


class Compared:
    """What a comparison does with its folder, without a model."""

    def __init__(self, path: Path, settings: Mapping[str, Any], asked: list[Prompt], existing: str = "error") -> None:
        chosen = {"verb": "compare", **settings, "prompts": prompts_digest(asked)}
        self.finished = check_free(path, "compare", existing) and is_finished(path, chosen)
        self.folder, self.settings, self.store, self.asked = path, chosen, CellStore(path, chosen), asked

    def add(self, part: Comparison) -> None:
        """Keeps one batch, a part an example."""
        for number in sorted({int(n) for frame in (part.examples, part.failures) for n in frame["example"]}):
            tables = {name: getattr(part, name) for name in PARTS}
            one = {name: table[table["example"] == number] for name, table in tables.items()}
            self.store.keep(f"example-{number}", one, part.provenance)

    def made(self) -> dict[str, CellResult]:
        """What is there."""
        keys = [f"example-{number}" for number in range(len(self.asked))]
        return {key: part for key in keys if (part := self.store.read(key)) is not None}

    def done(self) -> frozenset[int]:
        """The numbers of the examples that are there."""
        return frozenset(int(key.rpartition("-")[2]) for key in self.made())

    def close(self, ending: str = "finished") -> Comparison | None:
        """Writes the tables, as finished or as interrupted."""
        made = self.made()
        if not made:
            return None
        found = joined(cells_made(made, self.store), self.asked)
        tables, summary = found.written()
        texts = prompts_of(found)
        files = [*(f"{name}.parquet" for name in tables), *texts]
        return found if write_result(self.folder, self.settings, files, tables, summary, texts, ending=ending) else None


def cells_made(keys: Iterable[str], store: CellStore) -> CellsMade:
    """The cells of some keys, none of which can be made again."""
    return CellsMade({key: (Cell(key, print), store) for key in keys})


def joined(made: Mapping[str, CellResult], asked: list[Prompt]) -> Any:
    """The comparison that its cells come to."""
    found: Any = Compare().reduce(made)
    found.prompts = asked
    return found


def read_result(folder: Path) -> Any:
    """The comparison in a folder."""
    return read_result_of(Compare(), folder)


def cells_of(path: Path) -> list[str]:
    """The keys of the cells of unfinished runs in a folder."""
    return sorted(cell.stem for cell in (path / CELLS).rglob("*.parquet"))


def change_cell(path: Path, key: str, change: Callable[[bytes], bytes]) -> None:
    """Changes a cell's file, as a fault of the disk would."""
    (cell,) = (path / CELLS).rglob(f"{key}.parquet")
    cell.write_bytes(change(cell.read_bytes()))
