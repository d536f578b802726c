"""What ``compare`` comes to where one of its paths was walked elsewhere: a table of log-probs, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.common.result import Result
from kvinterp.study.experiments.base import OfModel, Parts
from kvinterp.study.experiments.options import option

if TYPE_CHECKING:
    from kvinterp.study.cells import Cell


@dataclasses.dataclass(frozen=True)
class CompareGiven(OfModel):
    """How far are another engine's log-probs from those of one of our paths, token by token?"""

    TABLES: ClassVar = ("given", "routing")
    STEPS: ClassVar = ()

    a: str = option("cached", "The path that kvinterp runs.")
    given: str = option("", "The file with the other engine's log-probs, written given(FILE).")

    @classmethod
    def verb(cls) -> str:
        """That of the command."""
        return "compare"

    def cells(self) -> list[Cell]:
        """One cell."""
        from kvinterp.study.cells import Cell

        return [Cell("given", f"{__name__}:compared", {"model": self.named(), "a": self.a, "given": self.given})]

    def reduce(self, made: Parts) -> Result:
        """The table, and what it says."""
        tables, about = made["given"]
        table, said = tables["given"], about["provenance"]
        gap = table["difference"].abs()
        at = table.loc[gap.idxmax()]
        reading = [
            f"{self.given} against {self.a} on {said['model']} ({self.kind}, {self.dtype}, the same tokens): log-probs differ by "
            f"{gap.mean():.3g} nats on average, {gap.max():.3g} at most, at position {at['position']} of {at['sequence']} "
            f"(n = {len(gap):,} tokens of {table['sequence'].nunique():,} sequences).",
            *[f"Routing: {about['routing']}"] * bool(about["routing"]),
            "Whether that is rounding: kvinterp audit MODEL --against FILE.",
        ]
        return Result(tables, {"provenance": said, "reading": reading})

    def lead(self, found: Result) -> list[Any]:
        """The tokens, shaded by their difference."""
        from kvinterp.study.report.given import shaded

        return shaded(found.tables["given"])


def compared(model: Mapping[str, Any], a: str, given: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of a file."""
    from kvinterp.comparison.given import given_tables
    from kvinterp.models.provenance import provenance
    from kvinterp.paths import given_of
    from kvinterp.study.cells import loaded

    adapter = loaded(model)
    tables, routing = given_tables(adapter, given_of(given) or "", path=a)
    tables = {name: table for name, table in tables.items() if len(table) or name == "given"}
    tables["given"] = tables["given"].assign(text=adapter.pieces(tables["given"]["token"].tolist()))
    return tables, {"provenance": provenance(adapter), "routing": routing}
