"""What ``compare`` comes to where one of its paths was walked elsewhere: a table of log-probs, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.study.experiments.base import Experiment, Outcome
from kvinterp.study.experiments.options import model, option, shared

if TYPE_CHECKING:
    from kvinterp.study.cells import Cell, Made


@dataclasses.dataclass(frozen=True)
class CompareGiven(Experiment):
    """How far are another engine's log-probs from those of one of our paths, token by token?"""

    TABLES: ClassVar = ("given",)
    STEPS: ClassVar = ()

    model: str = model()
    a: str = option("cached", "Our path.")
    given: str = option("", "The file, as given(FILE).")
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    @classmethod
    def verb(cls) -> str:
        """That of the command."""
        return "compare"

    def cells(self) -> list[Cell]:
        """One cell."""
        from kvinterp.study.cells import Cell

        return [Cell("given", f"{__name__}:compared", {"model": self.named(), "a": self.a, "given": self.given})]

    def reduce(self, made: Mapping[str, Made], settings: Mapping[str, Any], folder: Path | None) -> Outcome:
        """The table, and what it says."""
        tables, about = made["given"]
        table, said = tables["given"], about["provenance"]
        gap = table["difference"].abs()
        at = table.loc[gap.idxmax()]
        reading = [
            f"{self.given} against {self.a} on {said['model']} ({self.kind}, {self.dtype}, the same tokens): log-probs differ by "
            f"{gap.mean():.3g} nats on average, {gap.max():.3g} at most, at position {at['position']} of {at['sequence']} "
            f"(n = {len(gap):,} tokens of {table['sequence'].nunique():,} sequences).",
            "Whether that is rounding: kvinterp audit MODEL --against FILE.",
        ]
        return Outcome(table, {"given": table}, {"provenance": said, "reading": reading})


def compared(model: Mapping[str, Any], a: str, given: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table of a file."""
    from kvinterp.comparison import compare
    from kvinterp.models.provenance import provenance
    from kvinterp.study.cells import loaded

    adapter = loaded(model)
    return {"given": compare(adapter, a=a, b=given)}, {"provenance": provenance(adapter)}
