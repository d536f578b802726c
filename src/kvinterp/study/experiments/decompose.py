"""Split the difference at every step by its source, and show each part beside its null.

The parts: the newest row, computed alone; older rows, each computed alone when it was decoded; and rows that recompute
computes again among a different number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kvinterp.common.result import Result
from kvinterp.data import load_prompts
from kvinterp.patching.findings import charts_of_decomposition, headline_of_decomposition, rows_of_decomposition
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.base import OfModel, Parts, numbered
from kvinterp.study.experiments.options import option, shared


@dataclasses.dataclass(frozen=True)
class Decompose(OfModel):
    """What makes the difference at every step, each part beside its null?"""

    TABLES: ClassVar = ("decomposition", "layers")
    DRAWN: ClassVar = ("decomposition",)
    RESULT: ClassVar = "kvinterp.patching:Decomposition"
    SHOWN: ClassVar = (headline_of_decomposition, rows_of_decomposition, charts_of_decomposition)
    UNIT: ClassVar = "prompts"

    prompts: str = shared("prompts")
    max_new_tokens: int = option(32, "The most tokens to decode per prompt.")

    def cells(self) -> list[Cell]:
        """A cell a prompt."""
        count = len(load_prompts(self.prompts))
        settings = {"model": self.model_settings(), "prompts": self.prompts, "max_new_tokens": self.max_new_tokens}
        return [Cell(f"example-{number}", f"{__name__}:decomposed", settings) for number in range(count)]

    def reduce(self, parts: Parts) -> Result:
        """The split over all of them."""
        from kvinterp.patching import Decomposition

        tables = joined(parts)
        about = next(about for _, about in parts.values())
        return Decomposition(tables["decomposition"], tables["layers"], about)


def decomposed(
    keys: Sequence[str],
    keep: Callable[..., None],
    model: Mapping[str, Any],
    prompts: str,
    max_new_tokens: int,
) -> None:
    """Decomposes some of the prompts, and keeps what each gave."""
    from kvinterp.patching import decompose

    adapter, prompt_list = loaded(model), load_prompts(prompts)
    for number, key in numbered(keys).items():
        decomposition = decompose(adapter, prompt_list, max_new_tokens=max_new_tokens, only=[number], progress="none")
        keep(key, {"decomposition": decomposition.steps, "layers": decomposition.layers}, decomposition.provenance)
