"""Measure when the first token flips, held against how far the paths are apart and how sure the model was.

The FP16 paper's fourth experiment (arXiv 2604.15409, section 5.3), on the decodes of ``behaviour``. The paper finds early flips
where the mean KL is high; but that mean counts the text after the flip. Beside it stand the KL before the flip and of the matched
protocol, where both paths are fed the same; regressions in which decodes that never flip count for as long as they lasted; and
how well the margin of the two highest logits tells beforehand which step flips.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import pandas as pd

from kvinterp.behaviour.boundary import boundary_tables
from kvinterp.cells import Made, joined
from kvinterp.experiments.base import option
from kvinterp.experiments.behaviour import Behaviour
from kvinterp.experiments.options import withheld

__all__ = ["Boundary"]


@dataclasses.dataclass(frozen=True)
class Boundary(Behaviour):
    """Do tokens flip early where the paths are far apart, or where the model is not sure?"""

    DRAWN: ClassVar = ("boundary",)
    FIGURES: ClassVar = "kvinterp.report.boundary:boundary_figures"
    READING: ClassVar = "kvinterp.reading.boundary:said_of_boundary"
    TABLES: ClassVar = ("boundary", "boundary_flips", "terciles", "hazard", "prediction", "roc", "calibration")

    # The decodes are those of behaviour, under the same keys; its controls are not asked for.
    controls: int = withheld(0)
    above: int = option(8, "The paper's second restriction: flips later than this step alone.", min=0)

    def tables(self, made: Mapping[str, Made]) -> dict[str, pd.DataFrame]:
        """What the decodes say of their flips."""
        decodes = joined({key: each for key, each in made.items() if "decodes" in each[0]})
        return boundary_tables(decodes["decodes"], decodes["steps"], self.above)
