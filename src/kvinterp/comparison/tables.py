"""Tidy tables, gathered on the device step by step and brought to the host once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.models.adapter import RESIDUAL_SITES, Site

__all__ = ["Differences", "Table"]


class Table:
    """Blocks of numbers with named dimensions, to become one tidy frame.

    Args:
        dimensions: Column names of the dimensions, outermost first.
        values: Column names of the numbers.
    """

    def __init__(self, dimensions: Sequence[str], values: Sequence[str]) -> None:
        self.dimensions, self.values = tuple(dimensions), tuple(values)
        self._coordinates: list[tuple[np.ndarray, ...]] = []
        self._blocks: dict[str, list[Tensor]] = {name: [] for name in self.values}

    def add(self, coordinates: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
        """Adds one block.

        Args:
            coordinates: For each dimension, in any order, its labels in this block.
            values: For each value a tensor with one size a dimension.
        """
        self._coordinates.append(tuple(np.asarray(coordinates[name]) for name in self.dimensions))
        for name in self.values:
            self._blocks[name].append(values[name].reshape(-1))

    def frame(self) -> pd.DataFrame:
        """Everything added, a row a number."""
        columns: dict[str, np.ndarray] = {}
        for index, name in enumerate(self.dimensions):
            spread = [np.meshgrid(*block, indexing="ij")[index].reshape(-1) for block in self._coordinates]
            columns[name] = np.concatenate(spread) if spread else np.zeros(0, dtype=np.int64)
        for name, blocks in self._blocks.items():
            columns[name] = torch.cat(blocks).cpu().numpy() if blocks else np.zeros(0)
        return pd.DataFrame(columns)


class Differences:
    """Takes what both paths showed at a step and keeps how far apart they were.

    Args:
        layers: The layers that are watched.
        heads: Labels of the query heads that are watched.
        kv_heads: Labels of the KV heads.
    """

    def __init__(self, layers: Sequence[int], heads: Sequence[int], kv_heads: Sequence[int]) -> None:
        self.layer_labels, self.heads, self.kv_heads = list(layers), list(heads), list(kv_heads)
        logit_values = ("kl", "js", "max_abs_logit", "rms_logit", "top1_agree", "margin_a", "margin_b")
        self.steps = Table(("step", "example"), (*logit_values, "top_probability_difference"))
        drift = ("l2", "relative_l2", "cosine", "cosine_distance")
        self.layers = Table(("step", "site", "layer", "example"), drift)
        self.patterns = Table(("step", "layer", "example", "head"), ("kl",))
        self.kv = Table(
            ("step", "tensor", "layer", "example", "kv_head", "position"), ("relative_error", "ulp_mean", "ulp_max")
        )

    @classmethod
    def columns(cls) -> dict[str, tuple[str, ...]]:
        """The columns of each table, by the names they have in a comparison."""
        empty = cls((), (), ())
        named = {"steps": empty.steps, "layers": empty.layers, "heads": empty.patterns, "kv": empty.kv}
        return {name: (*table.dimensions, *table.values, "after_flip") for name, table in named.items()}

    def add(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        logits: tuple[Tensor, Tensor],
        seen: tuple[Mapping[Site, Tensor], Mapping[Site, Tensor]],
    ) -> None:
        """Adds one step of one batch.

        Args:
            step: The decode step.
            examples: The example number of each row.
            end: Positions in the context at this step; keys are aligned by it.
            logits: ``[batch, vocab]`` of both paths.
            seen: For each path what it showed at the newest position, sites to tensors with a batch dimension.
        """
        self.steps.add({"step": [step], "example": examples}, metrics.compare_logits(*logits))
        a, b = seen
        both = [place for place in a if place in b]
        for site in RESIDUAL_SITES:
            layers = [layer for s, layer in both if s == site]
            if layers:
                drift = metrics.residual_drift(_stack(a, site, layers), _stack(b, site, layers))
                self.layers.add({"step": [step], "site": [site], "layer": layers, "example": examples}, drift)
        layers = [layer for site, layer in both if site == "pattern"]
        if layers:
            widest = max(seen_by["pattern", layer].shape[-1] for seen_by in seen for layer in layers)
            kl = metrics.pattern_kl(*(_stack_patterns(seen_by, layers, widest) for seen_by in seen))
            self.patterns.add({"step": [step], "layer": layers, "example": examples, "head": self.heads}, {"kl": kl})
        for site, name in (("cache_k", "K"), ("cache_k_pre", "K before RoPE"), ("cache_v", "V")):
            self._add_cache(step, examples, end, site, name, [layer for s, layer in both if s == site], a, b)

    def _add_cache(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        site: str,
        name: str,
        layers: Sequence[int],
        a: Mapping[Site, Tensor],
        b: Mapping[Site, Tensor],
    ) -> None:
        # A sliding window may hold fewer positions on one path: the newest ones, so both are cut to the shorter. Layers may
        # differ in the number and the width of their heads too (Gemma 4).
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        for layer in layers:
            length = min(a[site, layer].shape[2], b[site, layer].shape[2])
            by_shape.setdefault((length, a[site, layer].shape[1], a[site, layer].shape[3]), []).append(layer)
        for (length, heads, _), group in by_shape.items():
            first, second = (torch.stack([s[site, x][:, :, s[site, x].shape[2] - length :] for x in group]) for s in (a, b))
            ulp = metrics.ulp_error(first, second)
            errors = {"relative_error": metrics.relative_error(first, second)}
            errors |= {"ulp_mean": ulp["mean"], "ulp_max": ulp["max"]}
            coordinates = {
                "step": [step],
                "tensor": [name],
                "layer": group,
                "example": examples,
                "kv_head": self.kv_heads[:heads],
                "position": np.arange(end - length, end),
            }
            self.kv.add(coordinates, errors)


def _stack(seen: Mapping[Site, Tensor], site: str, layers: Sequence[int]) -> Tensor:
    return torch.stack([seen[site, layer] for layer in layers])


def _stack_patterns(seen: Mapping[Site, Tensor], layers: Sequence[int], widest: int) -> Tensor:
    # The newest key is the last on both paths; what a window does not hold got probability 0.
    rows = [seen["pattern", layer] for layer in layers]
    return torch.stack([torch.nn.functional.pad(row, (widest - row.shape[-1], 0)) for row in rows])
