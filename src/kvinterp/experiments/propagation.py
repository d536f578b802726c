"""Round one block's output once, everything else in float64, and measure how far it spreads (experiment 2 of the FP16 paper)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch

from kvinterp.cells import loaded
from kvinterp.experiments.of_models import OfModels, encoded, newest_at
from kvinterp.metrics.drift import l2_distance, relative_l2
from kvinterp.models import wrap
from kvinterp.progress import each

__all__ = ["Propagation", "propagation"]


@dataclasses.dataclass(frozen=True)
class Propagation(OfModels):
    """Does one layer's rounding compound over the layers?"""

    TABLES: ClassVar = ("propagation",)


def measured(model: Mapping[str, Any], prompts: str) -> pd.DataFrame:
    """The table of one model."""
    adapter = loaded(model)
    return propagation(adapter, encoded(adapter, prompts)).assign(model=adapter.facts.name)


def propagation(model: Any, prompts: Sequence[Sequence[int]], sources: Sequence[int] | None = None) -> pd.DataFrame:
    """Experiment 2: one block's output rounded to float16 once, everything else in float64, and how far off later blocks are.

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
            for layer in range(source, count):
                row: dict[str, Any] = {"prompt": number, "source": source, "layer": layer}
                for name, growth, measure in (
                    ("l2", "l2_growth", l2_distance),
                    ("relative_l2", "relative_growth", relative_l2),
                ):
                    ends = (places[layer], places[source])
                    now, first = (float(measure(noisy[at][None], clean[at][None])) for at in ends)
                    row |= {name: now, growth: now / first if first else float("nan")}
                rows.append(row)
    return pd.DataFrame(rows)
