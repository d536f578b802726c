"""TOVA: the rows that the newest query attends to most."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from kvinterp.policies.base import CacheRows
from kvinterp.policies.scored import Budgeted


@dataclasses.dataclass(frozen=True)
class Tova(Budgeted):
    """Keeps at every step the rows that the newest query attends to most, averaged over all heads;
    all heads keep the same rows.

    The newest row itself always stays, as in kvpress; the paper evicts it too if its own
    probability is the least. kvpress evicts rows once, after the prompt.
    """

    SOURCE: ClassVar[str] = (
        "TOVA (arXiv 2401.06104), the variant with one choice of rows for a layer; kvpress TOVAPress"
    )
    sites = ("pattern",)

    def newest(self, prompt: int) -> int:
        """The row of the query itself."""
        return 1

    def accumulate(self, totals: Tensor, weights: Tensor, cache_rows: CacheRows) -> Tensor:
        """Replaces the totals by the attention of the newest query."""
        return weights[:, :, -1].mean(1, keepdim=True).expand_as(totals)

    def scores(self, keys: Tensor, values: Tensor, totals: Tensor) -> Tensor:
        """The attention of the newest query."""
        return totals
