"""Round one block's output once, everything else in float64, and measure how far it spreads (experiment 2 of the FP16 paper)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp.cells import loaded
from kvinterp.experiments.of_models import OfModels, encoded
from kvinterp.metrics.drift import l2_distance, relative_l2
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.threads import own_threads
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


def propagation(
    model: Any, prompts: Sequence[Sequence[int]], rounding: str = "float16", sources: Sequence[int] | None = None
) -> pd.DataFrame:
    """Experiment 2: one block's output rounded once, everything else in float64, and how far it is off in every later block.

    Args:
        model: A model of any kind; it is run in float64.
        prompts: Token ids.
        rounding: The dtype one block's output is rounded to, at every position.
        sources: The blocks, one at a time. Default: all.

    Returns:
        One row a prompt, source and layer: l2 and relative_l2 of the residual stream at the newest position (the paper's
        measure is the absolute one; a stream that grows makes the other smaller), and l2_growth and relative_growth, each
        over that at the source (NaN where the rounding changed nothing there).
    """
    adapter = wrap(model).at(torch.float64)
    dtype: Any = dtype_named(rounding)
    count = adapter.facts.layers
    rows = []
    for number, prompt in enumerate(each(prompts, "rounding one layer,", "prompt")):
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        clean = _residuals(adapter, tokens, None)
        for source in range(count) if sources is None else sources:
            noisy = _residuals(adapter, tokens, (source, lambda x: x.to(dtype).to(x.dtype)))
            for layer in range(source, count):
                row: dict[str, Any] = {"prompt": number, "source": source, "layer": layer}
                for name, measure in (("l2", l2_distance), ("relative", relative_l2)):
                    now, first = (float(measure(noisy[at][None], clean[at][None])) for at in (layer, source))
                    row |= {
                        name if name == "l2" else "relative_l2": now,
                        f"{name}_growth": now / first if first else float("nan"),
                    }
                rows.append(row)
    return pd.DataFrame(rows)


@torch.no_grad()
def _residuals(adapter: Adapter, tokens: Tensor, change: tuple[int, Callable[[Tensor], Tensor]] | None) -> list[Tensor]:
    kept: dict[int, Tensor] = {}

    def listener(layer: int) -> Callable[[Tensor], Tensor | None]:
        def hear(tensor: Tensor) -> Tensor | None:
            new = change[1](tensor) if change is not None and change[0] == layer else None
            kept[layer] = (tensor if new is None else new)[0, -1].clone()
            return new

        return hear

    places = [("resid_post", layer) for layer in range(adapter.facts.layers)]
    heard = {place: [listener(place[1])] for place in places}
    with own_threads(adapter), adapter.attached(places), adapter.listening(heard):
        adapter.forward(tokens)
    return [kept[layer] for layer in range(adapter.facts.layers)]
