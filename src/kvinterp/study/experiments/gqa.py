"""Plant the same error in one KV head and measure how far it spreads through the query heads that share it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp.models import wrap
from kvinterp.study.experiments.kit import (
    FEW,
    Cell,
    Chart,
    Charts,
    OfModels,
    Panel,
    Result,
    Rows,
    each,
    encoded,
    finding,
    listed,
    metrics,
    option,
)
from kvinterp.study.experiments.of_models import Place, newest_at

DRIFTS = {
    "attn_out": "median relative L2 of the layer's attention output",
    "final": "median relative L2 of the last stream",
}


class Gqa(OfModels):
    """Does one KV head's error reach every query head that shares it?"""

    TABLES = ("gqa",)

    most: int = option(FEW, "How many of the prompts to run.", min=1)

    def headline(self, result: Result) -> list[str]:
        """How many query heads one KV head's error reaches."""
        by = result.tables["gqa"].groupby("query_heads_per_kv_head")["heads_touched"].median()
        reached = listed([f"{heads:g} where {count:g} share it" for count, heads in by.items()])
        return [f"An error in one KV head reaches so many query heads: {reached}."]

    def rows(self, result: Result) -> Rows:
        """How far the error spreads at each ratio."""
        return [
            finding(what, group[column].median(), n=group["prompt"].nunique(), query_heads_per_kv_head=count)
            for column, what in {"heads_touched": "median query heads that one KV head's error reaches", **DRIFTS}.items()
            for count, group in result.tables["gqa"].groupby("query_heads_per_kv_head")
        ]

    def charts(self, result: Result) -> Charts:
        """Query heads reached, and the drift of attention's output and of the last stream."""
        keys = ["tensor", "query_heads_per_kv_head"]
        by = result.tables["gqa"].groupby(keys)[["share_touched", *DRIFTS]].median().reset_index()
        options: dict[str, Any] = {
            "x": keys[1],
            "color": "tensor",
            "names": {tensor: f"error planted in {tensor}" for tensor in ("K", "V")},
            "xscale": "doubling",
            "xlabel": "query heads a KV head",
        }
        label = "share of the layer's\nquery heads reached"
        drifts = by.melt(keys, list(DRIFTS), "quantity", "drift")
        rows = [
            Panel(by, y="share_touched", scale="share", label=label, **options),
            Panel(drifts, y="drift", facet="quantity", titles=DRIFTS, label="median", **options),
        ]
        return {"root_cause_gqa": Chart("One KV head's error, against how many query heads share the head", rows)}

    def cells(self) -> list[Cell]:
        """One cell: of the models that differ in how many query heads share a KV head, and in nothing else."""
        adapters = self.adapters()
        alike = [
            model
            for model, adapter in zip(self.models, adapters, strict=True)
            if adapter.facts.width == adapters[0].facts.width and not any(adapter.facts.windows)
        ]
        return [Cell("gqa-0", self.spread, {"alike": alike}, "grouped-query attention")] if alike else []

    def spread(self, alike: Sequence[str]) -> pd.DataFrame:
        """The table of some models, on the same tokens."""
        adapters = list(map(self.adapter, alike))
        return gqa_spread(adapters, encoded(adapters[0], self.prompts, self.most))


def gqa_spread(
    models: Sequence[Any],
    prompts: Sequence[Sequence[int]],
    layer: int = 1,
    error: float = 2.0**-11,
    positions: Sequence[int] = (-1, -4, -8),
) -> pd.DataFrame:
    """The same relative error planted in one KV head's entry, and how far it spreads through the heads that share it.

    Everything is computed in float64, so that the planted error (default: one float16 unit roundoff) is the only one.

    Args:
        models: Models that differ in how many query heads share a KV head.
        prompts: Token ids, the same for every model.
        layer: Where it is planted.
        error: Its size relative to the entry.
        positions: The cache positions it is planted at, one at a time, counted from the newest.

    Returns:
        One row a model, prompt, tensor, KV head and position: query_heads_per_kv_head, heads_touched, share_touched,
        head_error (mean relative error of z in the touched heads), attn_out, resid_post (relative L2, at the planted layer),
        final (relative L2 of the last residual stream), kl (nats).
    """
    rows = []
    for model in models:
        adapter = wrap(model).at(torch.float64)
        facts = adapter.facts
        places: dict[str, Place] = {name: (name, layer) for name in ("z", "attn_out", "resid_post")}
        places["final"] = ("resid_post", facts.layers - 1)
        for number, prompt in enumerate(each(prompts, f"planting errors in {facts.name},", "prompt")):
            tokens = torch.tensor([list(prompt)], device=adapter.device)
            clean, logits = newest_at(adapter, tokens, places.values())
            for tensor, head, position in itertools.product(("k", "v"), range(facts.kv_heads), positions):
                noise = {(tensor, layer): functools.partial(_planted, head=head, position=position, error=error)}
                noisy, changed = newest_at(adapter, tokens, places.values(), noise)
                off = metrics.vector_errors(noisy["z", layer], clean["z", layer])["relative_error"]
                touched = off > 0
                drifts = {
                    name: float(metrics.residual_drift(noisy[place][None], clean[place][None])["relative_l2"])
                    for name, place in places.items()
                    if name != "z"
                }
                rows.append(
                    {
                        "model": facts.name,
                        "query_heads_per_kv_head": facts.query_heads // facts.kv_heads,
                        "prompt": number,
                        "tensor": tensor.upper(),
                        "kv_head": head,
                        "position": position,
                        "heads_touched": int(touched.sum()),
                        "share_touched": float(touched.double().mean()),
                        "head_error": float(off[touched].mean()) if touched.any() else 0.0,
                        **drifts,
                        "kl": float(metrics.kl_divergence(logits, changed)),
                    }
                )
    return pd.DataFrame(rows)


def _planted(tensor: Tensor, head: int, position: int, error: float) -> Tensor:
    planted = tensor.clone()
    planted[:, position, head] *= 1 + error
    return planted
