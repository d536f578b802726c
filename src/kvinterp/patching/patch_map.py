"""Many patches by hand as one map: layer by step, layer by head, or blocks of positions by layer; filled row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvinterp.errors import InputError
from kvinterp.models.hook_names import layers_with
from kvinterp.models.inputs import check_choice
from kvinterp.patching.bench import EVERY, MEASURED, Asked, PatchBench

VIEWS = {
    "layer by step": ("layer", "step"),
    "layer by head": ("layer", "head"),
    "block by layer": ("positions", "layer"),
}
"""The maps there are, by the fields of :class:`Asked` that their rows and columns set."""
MOST_BLOCKS = 12


class PatchMap:
    """What each patch of a family recovers; each cell is a patch of its own.

    Args:
        bench: What answers, turned to the prompt.
        asked: What stays as it is from cell to cell.
        view: A name of VIEWS.

    Attributes:
        rows: The values of the field that rows set.
        columns: Those of the field that columns set.
        values: By each of MEASURED the rows filled so far: recovery, or the distance that an ablation makes; None where a
            patch moves nothing, NaN where there is nothing to recover.

    Raises:
        InputError: There is no such map, or the site has no heads.
    """

    def __init__(self, bench: PatchBench, asked: Asked, view: str) -> None:
        check_choice("view", view, VIEWS)
        self.bench, self.asked, self.view = bench, asked, view
        layers = list(layers_with(bench.adapter, asked.site, range(bench.adapter.facts.layers)))
        count, _ = bench.adapter.facts.heads_of(asked.site)
        if view == "layer by head" and not count:
            raise InputError(f"a map by head needs a site with heads, and {asked.site!r} has none: use q, k, v, z or kv.")
        axes: dict[str, list[Any]] = {
            "layer": layers,
            "step": [EVERY, *range(asked.first, len(bench.fed) + 1)],
            "head": [None, *range(count)],
            "positions": ["newest", "all", *blocks_of(bench)],
        }
        self.fields = VIEWS[view]
        self.rows, self.columns = (axes[field] for field in self.fields)
        self.values: dict[str, list[list[float | None]]] = {name: [] for name in MEASURED}

    @property
    def filled(self) -> int:
        """How many rows are."""
        return len(self.values[MEASURED[0]])

    def at(self, row: int, column: int) -> Asked:
        """The patch of a cell."""
        where: dict[str, Any] = dict(zip(self.fields, (self.rows[row], self.columns[column]), strict=True))
        return dataclasses.replace(self.asked, **where)

    def fill_row(self) -> None:
        """Fills the next row.

        Raises:
            KvinterpError: As :meth:`PatchBench.measure` raises.
        """
        row, columns = self.filled, range(len(self.columns))
        if self.view == "layer by step" and self.asked.into == "recompute":
            # What the recompute path does at a step rests on that step's patch alone: one run of all steps has them all.
            every = self.bench.measure(self.at(row, 0))
            cells = [{name: every[name][column] for name in MEASURED} if every else None for column in columns]
        else:
            several = (self.bench.measure(self.at(row, column)) for column in columns)
            cells = [{name: found[name][0] for name in MEASURED} if found else None for found in several]
        for name in MEASURED:
            self.values[name].append([cell[name] if cell else None for cell in cells])


def blocks_of(bench: PatchBench) -> list[tuple[int, int]]:
    """Blocks of the prompt's positions, at most twelve of equal size, and one of what is decoded."""
    prompt, end = len(bench.prompt), len(bench.prompt) + len(bench.fed)
    size = -(-prompt // MOST_BLOCKS)
    spans = [(start, min(start + size, prompt)) for start in range(0, prompt, size)]
    return [*spans, (prompt, end)] if end > prompt else spans
