"""How far apart two paths are at a step, measured on the device by every metric there is and gathered in tidy tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.comparison.cache_errors import CacheErrors
from kvinterp.comparison.table import Table
from kvinterp.models.adapter import Site
from kvinterp.models.sites import RESIDUAL_SITES

__all__ = ["Differences"]

_CACHED = {"cache_k": "K", "cache_k_pre": "K before RoPE", "cache_v": "V"}
"""What a cache site is called in the tables."""


class Differences:
    """Takes what both paths showed at a step and keeps how far apart they were.

    Args:
        layers: The layers that are watched.
        heads: Labels of the query heads that are watched.
        kv_heads: Labels of the KV heads.
        cache_errors: One of :data:`kvinterp.comparison.cache_errors.CACHE_ERRORS`.
    """

    def __init__(
        self, layers: Sequence[int], heads: Sequence[int], kv_heads: Sequence[int], cache_errors: str = "aggregated"
    ) -> None:
        self.heads, self.kv_heads = list(heads), list(kv_heads)
        self.cache = CacheErrors(layers, cache_errors)
        self.tables = {
            fills.table: Table(("step", *fills.dimensions), [metric.column for metric in metrics.OF_KIND[kind]])
            for kind, fills in metrics.KINDS.items()
            if kind != "kv"
        } | {"kv": self.cache.every, "kv_steps": self.cache.steps}

    @classmethod
    def columns(cls) -> dict[str, tuple[str, ...]]:
        """The columns of each table, by the names they have in a comparison."""
        empty = cls((), (), ())
        found = {name: (*table.dimensions, *table.values, "after_flip") for name, table in empty.tables.items()}
        return found | {"kv_positions": tuple(empty.cache.positions((), ()).columns)}

    def frames(self, examples: Sequence[int]) -> dict[str, pd.DataFrame]:
        """Everything added, by the names the tables have in a comparison.

        Args:
            examples: The example number of each row of the batch.
        """
        frames = {name: table.frame() for name, table in self.tables.items()}
        return frames | {"kv_positions": self.cache.positions(examples, self.kv_heads)}

    def add(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        logits: tuple[Tensor, Tensor],
        seen: tuple[Mapping[Site, Tensor], Mapping[Site, Tensor]],
        kinds: Sequence[int | None],
    ) -> None:
        """Adds one step of one batch.

        Args:
            step: The decode step.
            examples: The example number of each row.
            end: Positions in the context at this step; keys are aligned by it.
            logits: ``[batch, vocab]`` of both paths.
            seen: For each path what it showed at the newest position, sites to tensors with a batch dimension.
            kinds: For each row 1 after its flip, 0 before it, None where its text has ended.
        """
        at = {"step": [step], "example": examples}
        self._measure("logits", at, *logits)
        layers_of: dict[str, list[int]] = {}
        for site, layer in seen[0]:
            if (site, layer) in seen[1]:
                layers_of.setdefault(site, []).append(layer)
        for site in filter(layers_of.get, RESIDUAL_SITES):
            layers = layers_of[site]
            streams = (torch.stack([path[site, layer] for layer in layers]) for path in seen)
            self._measure("residual", {**at, "site": [site], "layer": layers}, *streams)
        if "pattern" in layers_of:
            layers = layers_of["pattern"]
            rows = [[path["pattern", layer] for layer in layers] for path in seen]
            widest = max(row.shape[-1] for path in rows for row in path)
            self._measure(
                "pattern", {**at, "layer": layers, "head": self.heads}, *(_stacked(path, widest) for path in rows)
            )
        for site in filter(layers_of.get, _CACHED):
            self._measure_cache(step, examples, end, site, layers_of[site], seen, kinds)

    def _measure(self, kind: metrics.Kind, at: Mapping[str, Sequence[object]], a: Tensor, b: Tensor) -> None:
        self.tables[metrics.KINDS[kind].table].add(at, metrics.measured(kind, a, b))

    def _measure_cache(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        site: str,
        layers: Sequence[int],
        seen: tuple[Mapping[Site, Tensor], Mapping[Site, Tensor]],
        kinds: Sequence[int | None],
    ) -> None:
        # A sliding window may hold fewer positions on one path: the newest ones, so both are cut to the shorter. Layers may
        # differ in the number and the width of their heads too (Gemma 4).
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        for layer in layers:
            _, heads, length, width = seen[0][site, layer].shape
            by_shape.setdefault((min(length, seen[1][site, layer].shape[2]), heads, width), []).append(layer)
        for (length, heads, _), group in by_shape.items():
            pair = (torch.stack([s[site, x][:, :, s[site, x].shape[2] - length :] for x in group]) for s in seen)
            errors = metrics.measured("kv", *pair)
            self.cache.add(step, _CACHED[site], group, examples, self.kv_heads[:heads], end - length, errors, kinds)


def _stacked(rows: Sequence[Tensor], widest: int) -> Tensor:
    # The newest key is the last on both paths; what a window does not hold got probability 0.
    return torch.stack([torch.nn.functional.pad(row, (widest - row.shape[-1], 0)) for row in rows])
