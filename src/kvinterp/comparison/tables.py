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
from kvinterp.models.sites import RESIDUAL_SITES, ROWS

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
            seen: For each path what it showed at the newest position, sites to tensors with a batch dimension; where rows of
                the cache were let go of also the positions of those that are left, as site ``ROWS``.
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
        found = {
            layer: [_by_position(path[site, layer], path.get((ROWS, layer)), end) for path in seen] for layer in layers
        }
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        for layer, ((a, _), (b, _)) in found.items():
            by_shape.setdefault((min(a.shape[2], b.shape[2]), a.shape[1], a.shape[3]), []).append(layer)
        for (length, heads, _), group in by_shape.items():
            pair, held = [], []
            for path in zip(*(found[layer] for layer in group), strict=True):
                pair.append(torch.stack([tensor[:, :, tensor.shape[2] - length :] for tensor, _ in path]))
                masks = [mask[:, :, mask.shape[2] - length :] for _, mask in path if mask is not None]
                # A policy has a say over all layers or none.
                held.append(torch.stack(masks) if masks else None)
            errors = metrics.measured("kv", *pair)
            self.cache.add(step, _CACHED[site], group, examples, self.kv_heads[:heads], end - length, errors, kinds, held)


def _by_position(tensor: Tensor, rows: Tensor | None, end: int) -> tuple[Tensor, Tensor | None]:
    """Keys or values with a row for each of ``end`` positions where rows were let go of, and which of them are held."""
    if rows is None:
        return tensor, None
    whole = tensor.new_zeros(*tensor.shape[:2], end, tensor.shape[3])
    held = torch.zeros(whole.shape[:3], dtype=torch.bool, device=tensor.device)
    return whole.scatter(2, rows[..., None].expand_as(tensor), tensor), held.scatter(2, rows, True)


def _stacked(rows: Sequence[Tensor], widest: int) -> Tensor:
    # The newest key is the last on both paths; what a window does not hold got probability 0.
    return torch.stack([torch.nn.functional.pad(row, (widest - row.shape[-1], 0)) for row in rows])
