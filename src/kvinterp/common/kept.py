"""What was found, as an object: shown in a notebook, kept in a folder as the command line keeps it, and read again.

Only the face is here, so that whatever finds something can have it. What stands behind it
(:mod:`kvinterp.study.experiments.keeping`) knows folders, figures and pages, which no finder may import; the package hands it in.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Held:
    """Where a result is kept.

    Attributes:
        folder: The folder.
        settings: What its ``summary.json`` says it was made with.
        choices: And what was chosen, as the page shows it.
    """

    folder: Path
    settings: Mapping[str, Any]
    choices: Mapping[str, Any]


def signed(tables: dict[str, pd.DataFrame], about: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables, each with what it was made with: one that has lost its folder still says it, in its Parquet file too."""
    for table in tables.values():
        table.attrs = dict(about)
    return tables


def flat(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A provenance as one mapping; of a result kept before it was one, the half within is taken out."""
    within = provenance.get("provenance")
    rest = {name: value for name, value in provenance.items() if name != "provenance"}
    return {**rest, **within} if isinstance(within, Mapping) else dict(provenance)


class Kept:
    """A result that can be shown, kept and read again; a subclass says what is written of it, and how it is read."""

    VERB: ClassVar[str] = ""
    """The command whose folder it is kept in."""
    behind: ClassVar[Any]
    """A function that gives what stands behind every result; set where the package puts its rooms together."""
    held: Held | None = None
    """Where it is kept; None where it never was."""

    def overview(self) -> pd.DataFrame:
        """The table that says most in few rows: what :meth:`to_latex` writes unless another is named."""
        raise TypeError(f"{type(self).__name__} has no table.")

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its tables by the names of their files, and what ``summary.json`` holds."""
        raise TypeError(f"{type(self).__name__} is not kept.")

    def save(self, folder: str | os.PathLike[str], existing: str = "error") -> Path:
        """Writes tables and ``summary.json``, each whole or not at all, as the command does; :meth:`report` draws besides.

        Args:
            folder: The folder; made where it is missing.
            existing: What to do about a result that is there: ``"error"``, or ``"overwrite"``. What kvinterp did not write is
                neither replaced nor removed.

        Returns:
            The folder, which :func:`kvinterp.load` reads.

        Raises:
            InputError: It cannot be written, or something is in the way.
        """
        return self.behind().save(self, folder, existing)

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
        return self.behind().report(self, folder, existing)

    def figures(self) -> dict[str, Figure]:
        """Its figures by name, drawn anew; nothing is written."""
        return self.behind().figures(self)

    def sentences(self) -> list[str]:
        """What was found, a sentence a line."""
        return self.behind().sentences(self)

    def to_latex(self, table: str | None = None) -> str:
        """A table for a paper, in the style of booktabs, three digits of numbers of any size.

        Args:
            table: One of the tables of :meth:`written`; :meth:`overview` unless given.

        Raises:
            InputError: There is no table of that name.
        """
        return self.behind().latex(self, table)

    def _repr_html_(self) -> str:
        """A card for a notebook: what it is, what was found, and one picture."""
        return self.behind().card(self)
