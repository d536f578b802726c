"""The experts that another engine says it chose: whether ours are the same, and what its log-probs come to with its own.

Its choices are replayed in float64, so that a choice is judged beside those before it, which the engine made otherwise too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.auditing.verdict import CANNOT_TELL
from kvinterp.comparison.given import chosen_of
from kvinterp.comparison.given_experts import (
    Choices,
    choices_of,
    fitted,
    misplaced,
    of_largest,
    routed_layers,
    routing_rows,
    said,
    turned,
)
from kvinterp.models import Adapter, dtype_named
from kvinterp.patching import Patch, patched
from kvinterp.recording.given import GivenPath


@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
    """What replaying an engine's experts came to.

    Attributes:
        table: A row a choice, as :func:`kvinterp.comparison.given_experts.routing_rows` gives it.
        said: The same in a sentence.
        elsewhere: Where else they are ours, empty where they fit nowhere better.
        rows: For each sequence ``[position]``, log-probs with the experts replayed; None where it has none.
        decides: What decides our own choices: ``"logits"``, or ``"more"``.
    """

    table: pd.DataFrame
    said: str
    elsewhere: str
    rows: list[np.ndarray | None]
    decides: str

    @property
    def word(self) -> str:
        """What other choices than ours are: of rounding where each is a near-tie beside those before it."""
        changed = self.table[self.table["changed"]]
        if len(turned(self.table)) == len(changed):
            return "rounding"
        # Where a bias or groups of experts decide too, logits do not say how near another choice was.
        return "bug" if self.decides == "logits" else CANNOT_TELL


def routed(adapter: Adapter, paths: Sequence[GivenPath], dtype: str) -> Routing | None:
    """Replays the experts of some paths; None where none has any.

    Args:
        adapter: The model.
        paths: What the engine gave.
        dtype: What it computes in: what rounding may turn is told by the difference of this precision from float64.

    Raises:
        InputError: They are not as many as this model's routers choose.
    """
    layers, frames, pairs, left = routed_layers(adapter), [], [], Counter[str]()
    rows: list[np.ndarray | None] = []
    decides = "logits"
    for path in paths:
        if path.experts is None:
            rows.append(None)
            continue
        ours, _ = choices_of(adapter, path.ids, "float64")
        given, none = fitted(adapter, path, ours)
        decides = decides if of_largest(ours) else "more"
        sides = []
        for each in ("float64", dtype):
            with patched(adapter.at(dtype_named(each)), _replayed(given, layers)):
                sides.append(choices_of(adapter, path.ids, each))
        (exact, found), (rounded, _) = sides
        frames.append(routing_rows(path.id, given, Choices(exact.logits, ours.experts), rounded, layers))
        rows.append(chosen_of(found, path.ids))
        pairs.append((given, ours.experts))
        left += none
    if not frames:
        return None
    table, elsewhere = pd.concat(frames, ignore_index=True), misplaced(pairs, layers)
    return Routing(table, said(table, left, elsewhere), elsewhere, rows, decides)


def _replayed(given: np.ndarray, layers: Sequence[int]) -> list[Patch]:
    """Choices as they were given; where none is, the model's own."""

    def donor(number: int) -> Callable[[Tensor], Tensor]:
        chosen = torch.from_numpy(given[:, number])
        return lambda own: torch.where(chosen.to(own) >= 0, chosen.to(own), own)

    return [Patch("experts", (layer,), positions="all", donor=donor(number)) for number, layer in enumerate(layers)]
