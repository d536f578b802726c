"""What was found, as an object: shown in a notebook, kept in a folder as the command line keeps it, and read again.

There is one class of results, so that whatever finds something can have it: a comparison or a sweep only adds its own tables
and properties. What stands behind it (:mod:`kvinterp.study.experiments.keeping`) knows folders, figures and pages, which no
finder may import: it is found by its name, as what a registry holds.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.common.files import SUMMARY, read_json
from kvinterp.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def _keeping() -> Any:
    return importlib.import_module("kvinterp.study.experiments.keeping")


def signed(tables: dict[str, pd.DataFrame], about: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables, each with what it was made with: one that has lost its folder still says it, in its Parquet file too."""
    for table in tables.values():
        table.attrs = dict(about)
    return tables


class Result:
    """A result that can be shown, kept and read again; a subclass says what is written of it, and how it is read.

    Args:
        tables: The tables by the names of their files.
        summary: What ``summary.json`` holds.
        others: Other files by their names.

    Attributes:
        folder: Where it is kept; None where it never was.
        files: What was written there.
        settings: Everything that decides what the tables hold.
        choices: What was chosen, as the page shows it.
        members: The results that it is made of, where it is made of several.
        experiment: The experiment that made it or read it, if one did.
    """

    VERB: ClassVar[str] = ""
    """The command whose folder it is kept in."""
    folder: Path | None = None
    files: Sequence[Path] = ()
    settings: Any = None
    choices: Any = None
    members: Any = ()
    experiment: Any = None
    others: Any = None
    _found: dict[str, Any] = {}  # noqa: RUF012  # a class of data has it
    _own: Any = None
    _of: Mapping[str, int] | None = None
    # A subclass has a function of this name.
    summary: Any

    def __init__(
        self,
        tables: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.others = dict(others or {})
        self.tables, self.summary = dict(tables or {}), dict(summary or {})

    @property
    def tables(self) -> dict[str, Any]:
        """Its tables by the names of their files, its findings among them once they are asked for.

        Of a result that has tables of its own, such as a comparison, those it has now: they are changed there.
        """
        if self.others is not None:
            return self._found
        own, _ = self.contents()  # Which may find that what was found is of other tables.
        return {**self._found, **own}

    @tables.setter
    def tables(self, tables: Mapping[str, Any]) -> None:
        own = {} if self.others is not None else self.contents()[0]
        vars(self).update(_found={name: table for name, table in tables.items() if name not in own})

    def contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What :meth:`written` gives, worked out once for the tables that it has now; then nothing was found in them yet."""
        if self.others is not None:
            return self.written()
        if self._of != (frames := self._frames()):
            vars(self).update(_own=self.written(), _found={}, _of=frames)
        return self._own

    def _frames(self) -> dict[str, int]:
        """Which tables it has as fields: what was found in others is not said of these."""
        fields = getattr(type(self), "__dataclass_fields__", ())
        return {name: id(held) for name in fields if hasattr(held := vars(self).get(name), "columns")}

    def __repr__(self) -> str:
        """What it is of, in one line; the tables are in ``tables``."""
        tables = ", ".join(f"{name} ({len(table)} rows)" for name, table in self.tables.items())
        return f"<Result of {self.VERB or 'an experiment'}: {tables or 'no tables'}>"

    def overview(self) -> pd.DataFrame:
        """The table that says most in few rows."""
        for table in self.tables.values():
            return table  # type: ignore[no-any-return]
        raise InputError(f"{self!r} has no table to show.")

    def written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its tables by the names of their files, and what ``summary.json`` holds."""
        return dict(self.tables), dict(self.summary)

    def told(self) -> dict[str, Any]:
        """What ``--json`` prints: the folder, and what ``summary.json`` holds."""
        # The file says more: the settings, and the names of the files.
        held = next((read_json(file) for file in self.files if file.name == SUMMARY), None) or self.contents()[1]
        return {"folder": self.folder and str(self.folder), "exit_code": 0, **held}

    def save(self, folder: str | os.PathLike[str], existing: str = "error") -> Path:
        """Writes tables and ``summary.json``, each whole or not at all, as the command does; :meth:`report` draws besides.

        Args:
            folder: The folder; made where it is missing.
            existing: What to do about a result that is there: ``"error"``, or ``"overwrite"``.

        Returns:
            The folder, which :func:`kvinterp.load` reads.

        Raises:
            InputError: It cannot be written, or something is in the way.
        """
        return _keeping().save(self, folder, existing)

    def report(self, folder: str | os.PathLike[str] | None = None, existing: str = "error") -> Path:
        """Writes the page with its figures, and everything beside it that :meth:`save` writes.

        Args:
            folder: Where to; unless given where it is kept, or else a new folder among the system's temporary ones.
            existing: As for :meth:`save`; where it is kept already, page and figures are written again.

        Returns:
            The page's path.

        Raises:
            InputError: It cannot be written, or something is in the way.
        """
        return _keeping().report(self, folder, existing)

    def figures(self) -> dict[str, Figure]:
        """Its figures by name, drawn anew; nothing is written."""
        return _keeping().figures(self)

    def sentences(self) -> list[str]:
        """What was found, a sentence a line."""
        return _keeping().sentences(self)

    def _repr_html_(self) -> str:
        """A card for a notebook: what it is, what was found, and one picture."""
        return _keeping().card(self)
