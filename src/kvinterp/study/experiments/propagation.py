"""Round one block's output once, everything else in float64, and follow the error (root-cause experiment 2 of the FP16 paper)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from kvinterp.metrics import residual_drift
from kvinterp.models import wrap
from kvinterp.study.experiments.kit import (
    FEW,
    Adapter,
    Chart,
    Charts,
    Finding,
    OfModels,
    Panel,
    Result,
    between,
    each,
    encoded,
    listed,
    median_of,
    only,
    option,
)
from kvinterp.study.experiments.of_models import newest_at


class Propagation(OfModels):
    """Does one layer's rounding compound over the layers?"""

    TABLES = ("propagation",)

    most: int = option(FEW, "How many of the prompts to run.", min=1)

    def measure(self, adapter: Adapter) -> pd.DataFrame:
        """The error on a few prompts."""
        return propagation(adapter, encoded(adapter, self.prompts, self.most))

    def headline(self, result: Result) -> list[str]:
        """What becomes of layer 0's rounding."""
        rows = self.rows(result)
        if not rows:
            return ["A model of one layer has nothing behind it: no growth was measured."]
        grown = [
            f"{between([row['estimate'] for row in rows if row['finding'] == _what(name)])} times in {name}"
            for name in MEASURES.values()
        ]
        return [f"The error of layer 0's output, rounded once, is at the last layer {listed(grown)} what it was."]

    def rows(self, result: Result) -> list[Finding]:
        """Growth from layer 0 to the last."""
        table = result.tables["propagation"]
        last = table["layer"].max()
        if not last:
            return []
        return [
            median_of(_what(MEASURES[column]), group[growth], group["prompt"], measure="times", model=model)
            for column, growth in GROWTH.items()
            for model, group in only(table, layer=last, source=0).groupby("model", sort=False)
        ]

    def charts(self, result: Result) -> Charts:
        """Absolute and relative L2 of the residual stream behind one rounded block."""
        table = result.tables["propagation"]
        middle = table.groupby(["model", "source", "layer"], sort=False)[list(MEASURES)].median().reset_index()
        names = {source: f"rounded in layer {source}" for source in sorted(middle["source"].unique())}
        by: dict[str, Any] = {"x": "layer", "color": "source", "names": names, "facet": "model"}
        rows = [
            Panel(middle, y=column, label=f"{name} of resid_post\n(median over prompts)", **by)
            for column, name in MEASURES.items()
        ]
        return {"root_cause_propagation": Chart("One rounded block, everything else in float64", rows)}


MEASURES = {"l2": "absolute L2", "relative_l2": "relative L2"}
"""The paper's measure, and the same over the length of the stream."""


GROWTH = {"l2": "l2_growth", "relative_l2": "relative_growth"}
"""The column of each measure over that at the source."""


def _what(name: str) -> str:
    return f"growth of {name} from layer 0, rounded once, to the last layer"


def propagation(model: Any, prompts: Sequence[Sequence[int]], sources: Sequence[int] | None = None) -> pd.DataFrame:
    """Root-cause experiment 2: one block's output rounded to float16 once, the rest in float64, and how far off later blocks are.

    Args:
        model: A model of any kind; it is run in float64.
        prompts: Token ids.
        sources: The blocks, one at a time. Default: all.

    Returns:
        One row a prompt, source and layer: l2 and relative_l2 of the residual stream at the newest position (the paper's
        measure is the absolute one; a stream that grows makes the other smaller), and l2_growth and relative_growth, each
        over that at the source (NaN where the rounding changed nothing there).
    """
    adapter = wrap(model).at(torch.float64)
    count = adapter.facts.layers
    places = [("resid_post", layer) for layer in range(count)]
    rows = []
    for number, prompt in enumerate(each(prompts, "rounding one layer,", "prompt")):
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        clean, _ = newest_at(adapter, tokens, places)
        for source in range(count) if sources is None else sources:
            noisy, _ = newest_at(adapter, tokens, places, {places[source]: lambda x: x.to(torch.float16).to(x.dtype)})
            drifts = [residual_drift(noisy[place][None], clean[place][None]) for place in places[source:]]
            for layer, drift in enumerate(drifts, source):
                row: dict[str, Any] = {"prompt": number, "source": source, "layer": layer}
                for name, growth in GROWTH.items():
                    now, first = float(drift[name]), float(drifts[0][name])
                    row |= {name: now, growth: now / first if first else float("nan")}
                rows.append(row)
    return pd.DataFrame(rows)
