"""``cached[smooth=0.5]``: at every step attention reads a mean of the cache and of a recomputation
of the whole prefix beside it.

A policy cannot know what recomputing gives, so this is an option of how a path runs. The recompute
path is run beside it on the same tokens; each key and value is then ``weight`` times what the cache
gives, after the policy, and ``1 - weight`` times what recomputing gives. The cache itself stays as
it was, so the mean does not run away over the steps. At 1 attention reads the cached path's keys
and values and at 0 the recompute path's, to the bit; the newest row is computed alone at both.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvinterp.models.caches import gather_rows
from kvinterp.policies import CacheRows, Policy
from kvinterp.policies.base import KV
from kvinterp.recording import PathHook


class Recomputed(PathHook):
    """Keeps the keys and values that attention last read in each layer of the path it looks
    into.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[CacheRows, Tensor, Tensor]] = {}

    def on_read(self, cache_rows: CacheRows, keys: Tensor, values: Tensor) -> None:
        """Keeps the keys and values that attention is about to read."""
        self._read[cache_rows.layer] = cache_rows, keys, values

    def rows(self, cache_rows: CacheRows) -> KV:
        """Those of the positions that another path reads."""
        store, *pair = self._read[cache_rows.layer]
        if cache_rows.positions_left is not None:
            keys, values = (
                gather_rows(tensor, cache_rows.positions_left - store.start) for tensor in pair
            )
        else:
            keys, values = (
                tensor[:, :, cache_rows.start - store.start : cache_rows.stop - store.start]
                for tensor in pair
            )
        return keys, values


@dataclasses.dataclass(frozen=True)
class Smoothed(Policy):
    """Reads a mean of what the cache gives and of what was recomputed.

    Attributes:
        weight: The cache's, from 0 to 1.
        recomputed: What was recomputed at this step.
    """

    weight: float
    recomputed: Recomputed

    def read(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """The mean, in float32 at least and rounded once."""
        cache_rows.check_known("smooth")
        if self.weight == 1:
            return keys, values
        rows = self.recomputed.rows(cache_rows)
        if self.weight == 0:
            return rows
        mixed = (self._mean(*pair) for pair in zip((keys, values), rows, strict=True))
        return next(mixed), next(mixed)

    def _mean(self, cached: Tensor, recomputed: Tensor) -> Tensor:
        wide = torch.promote_types(cached.dtype, torch.float32)
        return torch.lerp(recomputed.to(wide), cached.to(wide), self.weight).to(cached.dtype)

    def __str__(self) -> str:
        return f"smooth({self.weight:g})"
