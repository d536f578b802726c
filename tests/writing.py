"""Results of nothing but tables, for the tests of what is done with folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.common.files import digest_of, sealed
from kvinterp.common.store import Made, Store
from kvinterp.comparison import PARTS, Comparison
from kvinterp.data import Prompt
from kvinterp.study.cells import CellsMade
from kvinterp.study.experiments.compare import Compare
from kvinterp.study.results import ResultFolder, prompts_digest, prompts_of

NAMES = Compare("zoo:mistral-mini").names()


def write_tables(
    path: Path,
    tables: Mapping[str, pd.DataFrame],
    summary: Mapping[str, Any],
    existing: str = "error",
    draw: Callable[[Path], Iterable[Path]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[Path]:
    """What a verb does once its cells are done."""
    with ResultFolder(path, about or {}, [f"{name}.parquet" for name in tables], existing) as folder:
        folder.take_up()
        return folder.finish(tables, summary, draw=draw)


def resealed(path: Path, **changed: Any) -> None:
    """Changes what a sealed file says, and seals it again with the files beside it as they are: a result from anybody."""
    content = json.loads(path.read_text()) | changed
    digests = {name: digest_of(path.parent / name) for name in content["sha256"] if name != path.name}
    path.write_text(sealed(path.name, content, changed.get("sha256", digests)))


class Compared:
    """What a comparison does with its folder, without a model."""

    def __init__(self, path: Path, settings: Mapping[str, Any], asked: list[Prompt], existing: str = "error") -> None:
        chosen = {"verb": "compare", **settings, "prompts": prompts_digest(asked)}
        self.folder, self.asked = ResultFolder(path, chosen, NAMES, existing), asked
        self.finished = self.folder.take_up()

    def add(self, part: Comparison) -> None:
        """Keeps one batch, a part an example."""
        for number in sorted({int(n) for frame in (part.examples, part.failures) for n in frame["example"]}):
            tables = {name: getattr(part, name) for name in PARTS}
            one = {name: table[table["example"] == number] for name, table in tables.items()}
            self.folder.keep(f"example-{number}", one, part.provenance)

    def made(self) -> dict[str, Made]:
        """What is there."""
        keys = [f"example-{number}" for number in range(len(self.asked))]
        return {key: part for key in keys if (part := self.folder.read(key)) is not None}

    def done(self) -> frozenset[int]:
        """The numbers of the examples that are there."""
        return frozenset(int(key.rpartition("-")[2]) for key in self.made())

    def close(self, ending: str = "finished") -> Comparison | None:
        """Writes the tables, as finished or as interrupted."""
        made = self.made()
        if not made:
            self.folder.release()
            return None
        found = joined(CellsMade(dict.fromkeys(made, self.folder)), self.asked)
        files = self.folder.finish(*summed(found, self.folder), prompts_of(found), ending=ending)
        self.folder.release()
        return found if files else None


def joined(made: Mapping[str, Made], asked: list[Prompt]) -> Any:
    """The comparison that its cells come to."""
    found: Any = Compare().reduce(made)
    found.prompts = asked
    return found


def summed(found: Any, folder: ResultFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is written of a comparison."""
    tables, summary = found.written()
    return tables, {**summary, "settings": folder.settings}


def read_result(folder: Path) -> Any:
    """The comparison in a folder."""
    return Compare().read(folder)


def cells_of(path: Path) -> list[str]:
    """The keys of the cells of unfinished runs that the store of a folder holds."""
    return [key for (key,) in Store(path).rows("select key from cell order by key")]


def change_cell(path: Path, key: str, changed: Callable[[bytes], bytes]) -> None:
    """Changes what the store of a folder holds of a cell, as a fault of the disk would."""
    with Store(path).changed() as store:
        ((content,),) = store.execute("select content from cell where key=?", (key,)).fetchall()
        store.execute("update cell set content=? where key=?", (changed(content), key))
