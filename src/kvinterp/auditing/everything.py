"""Everything an audit measured, kept together with its verdict."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from kvinterp.auditing.ladder import Plan, PrecisionRun
from kvinterp.auditing.verdict import Verdict
from kvinterp.inputs import check_choice
from kvinterp.kept import Kept


@dataclasses.dataclass(repr=False)
class Audit(Kept):
    """Everything an audit measured; ``verdict`` is its conclusion, and what :func:`kvinterp.load` reads again.

    Attributes:
        verdict: The conclusion.
        rungs: What each precision showed.
        plan: What was run.
        provenance: Provenance.
    """

    VERB: ClassVar = "audit"

    verdict: Verdict
    rungs: list[PrecisionRun]
    plan: Plan
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """The verdict's first line."""
        return repr(self.verdict).replace("<Verdict", "<Audit", 1)

    def rung(self, name: str) -> PrecisionRun | None:
        """One rung by name, or None."""
        return next((r for r in self.rungs if r.name == name), None)

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """The tables of all precisions, and the fields of the JSON."""
        from kvinterp.auditing.report import tables_of

        return tables_of(self), self.verdict.written()[1]

    def save(self, folder: str | os.PathLike[str], existing: str = "overwrite") -> Path:
        """Writes verdict.json, audit.html and the tables as CSV, over an earlier audit's; returns the folder."""
        from kvinterp.auditing.report import put, texts_of

        check_choice("existing", existing, ("overwrite",))
        return put(texts_of(self), Path(folder))

    report, overview, figures = Verdict.report, Verdict.overview, Verdict.figures

    @property
    def evidence(self) -> dict[str, dict[str, Any]]:
        """The verdict's."""
        return self.verdict.evidence

    def sentences(self) -> list[str]:
        """The verdict's reading, line by line."""
        return self.verdict.sentences()
