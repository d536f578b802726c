"""How far apart two paths are at a step, measured on the device and gathered in tidy tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.comparison.cache_errors import CacheErrors
from kvinterp.comparison.table import Table
from kvinterp.models.adapter import RESIDUAL_SITES, Site

__all__ = ["Differences"]


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
        self.layer_labels, self.heads, self.kv_heads = list(layers), list(heads), list(kv_heads)
        logit_values = ("kl", "js", "max_abs_logit", "rms_logit", "top1_agree", "margin_a", "margin_b")
        self.steps = Table(("step", "example"), (*logit_values, "top_probability_difference"))
        drift = ("l2", "relative_l2", "cosine", "cosine_distance")
        self.layers = Table(("step", "site", "layer", "example"), drift)
        self.patterns = Table(("step", "layer", "example", "head"), ("kl",))
        self.cache = CacheErrors(layers, cache_errors)

    @classmethod
    def columns(cls) -> dict[str, tuple[str, ...]]:
        """The columns of each table, by the names they have in a comparison."""
        empty = cls((), (), ())
        named = {"steps": empty.steps, "layers": empty.layers, "heads": empty.patterns, "kv": empty.cache.every}
        named["kv_steps"] = empty.cache.steps
        found = {name: (*table.dimensions, *table.values, "after_flip") for name, table in named.items()}
        return found | {"kv_positions": tuple(empty.cache.positions((), ()).columns)}

    def frames(self, examples: Sequence[int]) -> dict[str, pd.DataFrame]:
        """Everything added, by the names the tables have in a comparison.

        Args:
            examples: The example number of each row of the batch.
        """
        made = {"steps": self.steps, "layers": self.layers, "heads": self.patterns, "kv": self.cache.every}
        frames = {name: table.frame() for name, table in (made | {"kv_steps": self.cache.steps}).items()}
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
            self._add_cache(step, examples, end, site, name, [layer for s, layer in both if s == site], a, b, kinds)

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
        kinds: Sequence[int | None],
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
            self.cache.add(step, name, group, examples, self.kv_heads[:heads], end - length, errors, kinds)


def _stack(seen: Mapping[Site, Tensor], site: str, layers: Sequence[int]) -> Tensor:
    return torch.stack([seen[site, layer] for layer in layers])


def _stack_patterns(seen: Mapping[Site, Tensor], layers: Sequence[int], widest: int) -> Tensor:
    # The newest key is the last on both paths; what a window does not hold got probability 0.
    rows = [seen["pattern", layer] for layer in layers]
    return torch.stack([torch.nn.functional.pad(row, (widest - row.shape[-1], 0)) for row in rows])
