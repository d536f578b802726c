"""The class of results: shown in a notebook, saved in a folder as on the command line, and loaded
again.

All results have this class, and a comparison or a sweep adds its own tables and properties.
Folders, figures and pages are the work of the experiment that keeps such results. The rooms below
it may not import it, so it is found here by its name, as a registry imports plugins.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kvinterp.common.files import SUMMARY, read_json
from kvinterp.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


Row: TypeAlias = dict[str, Any]
"""A row of a table: its values by the names of their columns."""
Contents: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""The tables to write, by the names of their files, and the content of ``summary.json``."""


def signed(tables: dict[str, pd.DataFrame], about: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Adds the provenance to each table, so that a table without its folder still has it, in its
    Parquet file too.
    """
    for table in tables.values():
        table.attrs = dict(about)
    return tables


class Result:
    """A result that can be shown, saved and loaded; a subclass defines which tables are written and
    how they are read.

    Args:
        tables: The tables by the names of their files.
        summary: The content of ``summary.json``.
        others: Other files by their names.

    Attributes:
        folder: The folder where it is saved; None where it is not saved.
        files: The files that were written there.
        settings: Everything that determines the content of the tables.
        choices: The user's choices, as the page shows them.
        experiment: The experiment that made it or read it, if one did.
    """

    VERB: ClassVar[str] = ""
    """The command that writes such a result."""
    folder: Path | None = None
    files: Sequence[Path] = ()
    settings: Any = None
    choices: Any = None
    experiment: Any = None
    others: Any = ()
    _own: Any = None
    _of: Any = None
    # A subclass has a function of this name.
    summary: Any

    def __init__(
        self,
        tables: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.others, self._tables, self.summary = (
            dict(others or {}),
            dict(tables or {}),
            dict(summary or {}),
        )

    @classmethod
    def read(cls, tables: Mapping[str, Any], summary: Mapping[str, Any]) -> Any:
        """Makes a result of its tables and of the content of its ``summary.json``."""
        return cls(tables, summary)

    @property
    def tables(self) -> dict[str, Any]:
        """The tables by the names of their files, with the findings once they have been computed.

        A result with tables as fields, such as a comparison, gives the tables that its fields have
        now.
        """
        return self.contents()[0]

    @tables.setter
    def tables(self, tables: Mapping[str, Any]) -> None:
        own, summary = self.contents()
        vars(self).update(_own=({**tables, **own}, summary))

    def contents(self) -> Contents:
        """The result of :meth:`written`, computed once for the present tables; other tables than
        before have no findings yet.
        """
        frames = [id(table) for table in vars(self).values() if hasattr(table, "columns")]
        if self._of != frames:
            vars(self).update(_own=self.written(), _of=frames)
        return self._own

    def __repr__(self) -> str:
        """Its command and its tables, in one line."""
        tables = ", ".join(f"{name} ({len(table)} rows)" for name, table in self.tables.items())
        return f"<Result of {self.VERB or 'an experiment'}: {tables or 'no tables'}>"

    def overview(self) -> pd.DataFrame:
        """The table that shows most in few rows."""
        for table in self.tables.values():
            return table  # type: ignore[no-any-return]
        raise InputError(f"{self!r} has no table to show.")

    def written(self) -> Contents:
        """The tables to write, by the names of their files, and the content of ``summary.json``."""
        return self._tables, self.summary

    def json_output(self) -> dict[str, Any]:
        """The output of ``--json``: the folder, and the content of ``summary.json``."""
        # The file also has the settings and the names of the files.
        summary = (
            next((read_json(file) for file in self.files if file.name == SUMMARY), None)
            or self.contents()[1]
        )
        return {"folder": self.folder and str(self.folder), "exit_code": 0, **summary}

    def provenances(self) -> dict[str, Mapping[str, Any]]:
        """What each of its models was run with, by its name; by an empty one where there is one
        model.
        """
        about = self.contents()[1].get("provenance") or {}
        return (
            about
            if about and all(isinstance(one, Mapping) for one in about.values())
            else {"": about}
        )

    # What was found: a class of results says it of itself; an experiment whose result is tables
    #     alone says it for them.

    def headline(self) -> list[str]:
        """What was found in one or two sentences, and warnings."""
        return []

    def rows(self) -> Any:
        """What was found, a row each (:func:`kvinterp.findings.finding`); None where sentences
        alone say it.
        """
        return None

    def charts(self) -> dict[str, Any]:
        """Its figures by name, as data (:class:`kvinterp.findings.Chart`)."""
        return {}

    def keeper(self) -> Any:
        """The experiment that made it, or that keeps such results."""
        return importlib.import_module("kvinterp.commands.keeping").keeper_of(self)

    def save(self, folder: str | os.PathLike[str], existing: str = "error") -> Path:
        """Writes tables and ``summary.json``, each whole or not at all, as the command does;
        :meth:`report` also writes the page.

        Args:
            folder: The folder; created where it is missing.
            existing: What to do about a result in the folder: ``"error"``, or ``"overwrite"``.

        Returns:
            The folder, which :func:`kvinterp.load` reads.

        Raises:
            InputError: It cannot be written, or something is in the way.
        """
        return self.keeper().save(self, folder, existing)

    def report(self, folder: str | os.PathLike[str] | None = None, existing: str = "error") -> Path:
        """Writes the page with its figures, and everything that :meth:`save` writes.

        Args:
            folder: The folder (default: where it is saved, or else a new folder among the system's
                temporary ones).
            existing: As for :meth:`save`; where it is saved already, page and figures are written
                again.

        Returns:
            The page's path.

        Raises:
            InputError: It cannot be written, or something is in the way.
        """
        return self.keeper().report(self, folder, existing)

    def figures(self) -> dict[str, Figure]:
        """Draws its figures and returns them by name; nothing is written."""
        return self.keeper().figures(self)

    def sentences(self) -> list[str]:
        """The findings, one sentence each."""
        return list(filter(None, self.keeper().sentences(self)))

    def _repr_html_(self) -> str:
        """A card for a notebook: the command, the findings, and one picture."""
        return self.keeper().card(self)
