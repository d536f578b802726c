"""Run the FP16 paper's five root-cause experiments and the grouped-query one: a table and a figure each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.experiments.accumulation import Accumulation
from kvinterp.experiments.base import option
from kvinterp.experiments.flips import Flips
from kvinterp.experiments.gqa import Gqa
from kvinterp.experiments.kv_write import KvWrite
from kvinterp.experiments.ladder import Ladder
from kvinterp.experiments.of_models import OfModels
from kvinterp.experiments.propagation import Propagation

if TYPE_CHECKING:
    import pandas as pd

    from kvinterp.cells import Cell, Made

__all__ = ["RootCause"]


@dataclasses.dataclass(frozen=True)
class RootCause(OfModels):
    """Are FP16 sums taken in another order the cause of the divergence?"""

    TABLES: ClassVar = ("accumulation", "propagation", "kv_write", "ladder", "flips", "correlations", "gqa")

    flip_kernels: str = option("split_k(8,float16)", "Kernels under which flips are looked for.")
    flip_strategy: str = option("top_p(1.0,2.0)", "And the strategy, beside greedy.")
    flip_steps: int = option(48, "Most steps of each there.", min=1)
    flip_seeds: int = option(3, "How many seeds of the sampling.", min=1)
    ladder_prompts: int = option(6, "How many of the prompts go up the ladder.", min=1)
    ladder_steps: int = option(16, "Most steps of each there.", min=1)

    def parts(self) -> tuple[OfModels, ...]:
        """The experiments that it runs."""
        shared: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(OfModels)}
        flips = Flips(
            **shared,
            kernels=self.flip_kernels,
            strategy=self.flip_strategy,
            steps=self.flip_steps,
            seeds=self.flip_seeds,
        )
        ladder = Ladder(**shared, most=self.ladder_prompts, steps=self.ladder_steps)
        return Accumulation(**shared), Propagation(**shared), KvWrite(**shared), ladder, flips, Gqa(**shared)

    def check(self) -> None:
        """What each of them asks."""
        for part in self.parts():
            part.check()

    def cells(self) -> list[Cell]:
        """The cells of all of them, one model after another."""
        self.check()
        first, *each, last = [part.cells() for part in self.parts()]
        of_models = sorted(itertools.chain(*each), key=lambda cell: self.models.index(cell.settings["model"]["name"]))
        return [
            dataclasses.replace(cell, told=cell.told and f"root cause: {cell.told}") for cell in first + of_models + last
        ]

    def tables(self, made: Mapping[str, Made]) -> dict[str, pd.DataFrame]:
        """The tables of all of them."""
        found: dict[str, pd.DataFrame] = {}
        for part in self.parts():
            found |= part.tables({key: each for key, each in made.items() if key.startswith(f"{part.verb()}-")})
        return found

    def noted(self) -> dict[str, Any]:
        """Under which kernels and strategy flips were looked for."""
        return {"flip_kernels": self.flip_kernels, "flip_strategy": self.flip_strategy}
