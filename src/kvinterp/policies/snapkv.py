"""SnapKV: the rows of the prompt that its last queries attend to."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvinterp.common.checks import check_whole
from kvinterp.errors import unexpected
from kvinterp.policies.base import CacheRows
from kvinterp.policies.scored import Budgeted


@dataclasses.dataclass(frozen=True)
class Snapkv(Budgeted):
    """Keeps the prompt's last rows and the earlier rows that their queries attend to most (pooled
    along the text); chosen once.

    Every row of the answer stays. The window is never cut, so a prompt that is no longer stays
    whole. The attention of a KV head's query heads is averaged, as in kvpress; the original repeats
    K and V, and chooses rows for each query head.

    Attributes:
        window_size: The last queries of the prompt, whose attention decides.
        kernel_size: Rows that a score is averaged over; 1 for no pooling.
    """

    SOURCE: ClassVar[str] = "SnapKV (arXiv 2404.14469), average pooling; kvpress SnapKVPress"
    sites = ("pattern",)
    goes_on = False

    window_size: int = 64
    kernel_size: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("policy 'snapkv': window_size", self.window_size)
        if check_whole("policy 'snapkv': kernel_size", self.kernel_size) % 2 == 0:
            raise unexpected(
                "policy 'snapkv': kernel_size", self.kernel_size, "an odd number of rows"
            )

    def budget(self, prompt: int) -> int:
        """The budget, of which the window is a part."""
        return max(super().budget(prompt), self.window_size)

    def newest(self, prompt: int) -> int:
        """How many of the newest rows stay whatever they score."""
        return self.window_size

    def accumulate(self, totals: Tensor, weights: Tensor, cache_rows: CacheRows) -> Tensor:
        """Adds the attention of those of this forward's queries that lie in the window."""
        queries = weights.shape[2]
        first = (
            (cache_rows.prompt or cache_rows.stop) - self.window_size - (cache_rows.stop - queries)
        )
        return totals + weights[:, :, max(first, 0) :].sum(2)

    def scores(self, keys: Tensor, values: Tensor, totals: Tensor) -> Tensor:
        """The pooled sums of the rows before the window; rows of the window stay whatever their
        scores are.
        """
        before = totals[..., : -self.window_size]
        pooled = avg_pool1d(before, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return pad(pooled, (0, self.window_size))
