"""Split the difference at every step by its source, and show each part beside its null.

The parts: the newest row, computed alone; older rows, each computed alone when it was decoded; and
rows that recompute computes again among a different number of rows.
"""

from __future__ import annotations

from typing import Any

from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    OfModel,
    Result,
    joined,
    option,
    shared,
)
from kvinterp.patching import Decomposition, decompose
from kvinterp.patching.side_by_side import two_paths


class Decompose(
    OfModel,
    of="kvinterp.patching.decomposition:decompose",
    without=("suffix", "only", "plant"),
    cached="a",
    recompute="b",
):
    """What makes the difference at every step, each part beside its null?"""

    RESULT = Decomposition

    prompts: str = shared("prompts")
    a: Any = option()
    b: Any = option()

    def check(self) -> None:
        """Checks the two paths too, before a model is loaded."""
        super().check()
        two_paths(self.a, self.b, "a decomposition")

    def cells(self) -> list[Cell]:
        """A cell a prompt."""
        return [
            Cell(f"example-{n}", self.decomposed, {"number": n})
            for n in range(len(self.prompt_list))
        ]

    def decomposed(self, number: int) -> CellResult:
        """The split of a prompt."""
        options = self.arguments() | {"only": [number], "progress": "none"}
        split = decompose(self.adapter(), self.prompt_list, **options)
        return split.tables, split.provenance

    def reduce(self, results: CellResults) -> Result:
        """The split over all of them."""
        tables = joined(results)
        about = next(about for _, about in results.values())
        return Decomposition(tables["decomposition"], tables["layers"], about)
