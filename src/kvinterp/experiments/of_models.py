"""What the root-cause experiments share: models in float16, prompts, a table and a figure each.

They are those of the FP16 paper (arXiv 2604.15409, section 5.2), which argues that FP16 sums taken in another order are the
cause of the divergence. Its five experiments are here, on any model, each with the control that tells the possible readings
apart, and a sixth about grouped-query attention. What comes out of one prompt or one seed is a row of its own, so that every
mean has its interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from kvinterp.cells import Cell, Made, imported, joined, loaded
from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.experiments.base import SHARED, Experiment, Outcome, argument, option, shared
from kvinterp.inputs import encode
from kvinterp.models import Adapter
from kvinterp.provenance import provenance

__all__ = ["FEW", "OfModels", "encoded"]

FEW = 4
"""Of how many prompts the experiments are that take one forward after another of the same tokens."""


@dataclasses.dataclass(frozen=True)
class OfModels(Experiment):
    """An experiment on some models; READING and FIGURES are given its tables by name and the provenance of each model."""

    READING: ClassVar = "kvinterp.reading.root_cause:said_of_root_cause"
    DRAWN: ClassVar = ("root_cause",)
    FIGURES: ClassVar = "kvinterp.report:root_cause_figures"

    models: tuple[str, ...] = argument(("zoo:mistral-mini",), "zoo:NAME, checkpoint folders or hub ids.")
    prompts: str = option("arithmetic:20", SHARED["prompts"][1])
    kind: str = shared("kind")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    def named(self, name: str | None = None) -> dict[str, Any]:
        """A model with its weights in float16."""
        return {**super().named(name), "dtype": "float16"}

    def adapters(self) -> list[Adapter]:
        """The models, loaded.

        Raises:
            InputError: There are none.
        """
        self.check()
        return [loaded(self.named(model)) for model in self.models]

    def check(self) -> None:
        """Looks at what was given, as far as no model is needed for it."""
        if not self.models:
            raise InputError("the list of models is empty: give at least one.")
        load_prompts(self.prompts)

    def cells(self) -> list[Cell]:
        """A cell a model: the function ``measured`` of the experiment's file."""
        return [
            Cell(
                f"{self.verb()}-{number}",
                f"{type(self).__module__}:measured",
                {"model": self.named(model), "prompts": self.prompts, **self.more()},
                f"{self.TABLES[0]} of {adapter.facts.name}",
            )
            for number, (model, adapter) in enumerate(zip(self.models, self.adapters(), strict=True))
        ]

    def more(self) -> dict[str, Any]:
        """What else a cell is called with."""
        return {}

    def tables(self, made: Mapping[str, Made]) -> dict[str, pd.DataFrame]:
        """Its tables, those of all models one below the other."""
        return {self.TABLES[0]: joined(made)["table"]} if made else {}

    def reduce(self, made: Mapping[str, Made], settings: Mapping[str, Any], folder: Path | None) -> Outcome:
        """The tables, and what they say."""
        tables = self.tables(made)
        about = {adapter.facts.name: provenance(adapter, **self.noted()) for adapter in self.adapters()}
        return Outcome(tables, tables, {"reading": imported(self.READING)(tables, about), "provenance": about})

    def noted(self) -> dict[str, Any]:
        """What the provenance says beside the model."""
        return {}

    def sentences(self, outcome: Outcome) -> list[str]:
        """What they say."""
        return list(outcome.summary["reading"])


def encoded(adapter: Adapter, prompts: str) -> list[list[int]]:
    """The token ids of the first few prompts."""
    return [encode(adapter, prompt, 1) for prompt in load_prompts(prompts)[:FEW]]
