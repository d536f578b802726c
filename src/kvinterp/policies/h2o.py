"""Heavy hitters: the rows that were attended to most so far, and the newest."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from kvinterp.policies.base import CacheRows
from kvinterp.policies.scored import Scored, check_share


@dataclasses.dataclass(frozen=True)
class H2O(Scored):
    """Keeps, in each KV head, the newest rows and those with the largest attention summed over all
    queries so far.

    The sum favours old rows, which more queries saw. kvpress's ObservedAttentionPress divides by
    the number of queries, and evicts rows once, after the prompt.

    Attributes:
        heavy_ratio: Rows kept for their sum, as a share of the prompt.
        recent_ratio: Newest rows kept besides, as a share of the prompt; one at least.
    """

    SOURCE: ClassVar[str] = (
        "H2O (arXiv 2306.14048): a fifth of the cache, half of it heavy hitters and half recent"
    )
    sites = ("pattern",)

    heavy_ratio: float = 0.1
    recent_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_share(self, "heavy_ratio")
        check_share(self, "recent_ratio")

    def budget(self, prompt: int) -> int:
        """How many rows stay in all: the heavy hitters and the recent ones."""
        return int(self.heavy_ratio * prompt + 1e-9) + self.newest(prompt)

    def newest(self, prompt: int) -> int:
        """How many of the newest rows stay whatever they score."""
        return max(1, int(self.recent_ratio * prompt + 1e-9))

    def accumulate(self, totals: Tensor, weights: Tensor, cache_rows: CacheRows) -> Tensor:
        """Adds the attention of every query of this forward."""
        return totals + weights.sum(2)

    def scores(self, keys: Tensor, values: Tensor, totals: Tensor) -> Tensor:
        """The sums of attention."""
        return totals
