"""How an experiment is run, and what it found: a result that can be kept, shown and read again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvinterp.common.kept import Kept
from kvinterp.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from kvinterp.common.progress import Tell
    from kvinterp.study.cells import Engine


@dataclasses.dataclass(repr=False)
class Outcome(Kept):
    """What an experiment found.

    Attributes:
        result: What its reduction made of the cells: a ``Comparison`` with its prompts, a ``Sweep``, ...
        tables: The tables by the names of their files: data frames, or on disk (:class:`kvinterp.common.parquet.LongTable`).
        summary: What ``summary.json`` holds.
        texts: Other files by their names.
        folder: Where it was written; None where it was not.
        files: What was written.
        exit_code: That of the command.
        verb: The command.
        settings: Everything that decides what the tables hold.
        choices: What was chosen, as the page shows it.
    """

    result: Any
    tables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    files: Sequence[Path] = ()
    exit_code: int = 0
    verb: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """What it is of, in one line; the tables are in ``tables``."""
        tables = ", ".join(f"{name} ({len(table)} rows)" for name, table in self.tables.items())
        return f"<Outcome of {self.verb or 'an experiment'}: {tables or 'no tables'}>"

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its tables and its summary."""
        return dict(self.tables), dict(self.summary)

    def overview(self) -> pd.DataFrame:
        """The first of its tables."""
        for table in self.tables.values():
            return table
        raise InputError(f"{self!r} has no table to show.")

    def told(self) -> dict[str, Any]:
        """What ``--json`` prints: folder, exit code, and what ``summary.json`` holds."""
        from kvinterp.common.files import SUMMARY, read_json

        # The file says more: the digests of the tables, which were written after this was made.
        held = next((read_json(file) for file in self.files if file.name == SUMMARY), None) or self.summary
        return {"folder": self.folder and str(self.folder), "exit_code": self.exit_code, **held}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as a summary holds them: what is not there is None."""
    return table.astype(object).where(table.notna(), None).to_dict("records")  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class How:
    """How an experiment is run: what :meth:`Experiment.run` was given."""

    out: str | Path | None
    existing: str
    progress: str
    figures: str
    tell: Tell | None
    engine: Engine
