"""Experiment 2 and the grouped-query one: a single error planted in float64, and how far it spreads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.metrics.drift import l2_distance, relative_l2
from kvinterp.metrics.kv import relative_error
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.threads import own_threads

__all__ = ["gqa_spread", "propagation"]


def propagation(
    model: Any, prompts: Sequence[Sequence[int]], rounding: str = "float16", sources: Sequence[int] | None = None
) -> pd.DataFrame:
    """Experiment 2: one block's output rounded once, everything else in float64, and how far it is off in every later block.

    Args:
        model: A model of any kind; it is run in float64.
        prompts: Token ids.
        rounding: The dtype one block's output is rounded to, at every position.
        sources: The blocks, one at a time; all unless said.

    Returns:
        One row a prompt, source and layer: l2 and relative_l2 of the residual stream at the newest position (the paper's
        measure is the absolute one; a stream that grows makes the other smaller), and l2_growth and relative_growth, each
        over that at the source (NaN where the rounding changed nothing there).
    """
    adapter = wrap(model).at(torch.float64)
    dtype: Any = dtype_named(rounding)
    count = adapter.facts.layers
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        clean = _residuals(adapter, tokens, None)
        for source in range(count) if sources is None else sources:
            noisy = _residuals(adapter, tokens, (source, lambda x: x.to(dtype).to(x.dtype)))
            for layer in range(source, count):
                row: dict[str, Any] = {"prompt": number, "source": source, "layer": layer}
                for name, measure in (("l2", l2_distance), ("relative", relative_l2)):
                    now, first = (float(measure(noisy[at][None], clean[at][None])) for at in (layer, source))
                    row |= {
                        name if name == "l2" else "relative_l2": now,
                        f"{name}_growth": now / first if first else float("nan"),
                    }
                rows.append(row)
    return pd.DataFrame(rows)


@torch.no_grad()
def _residuals(adapter: Adapter, tokens: Tensor, change: tuple[int, Callable[[Tensor], Tensor]] | None) -> list[Tensor]:
    kept: dict[int, Tensor] = {}

    def listener(layer: int) -> Callable[[Tensor], Tensor | None]:
        def hear(tensor: Tensor) -> Tensor | None:
            new = change[1](tensor) if change is not None and change[0] == layer else None
            kept[layer] = (tensor if new is None else new)[0, -1].clone()
            return new

        return hear

    places = [("resid_post", layer) for layer in range(adapter.facts.layers)]
    heard = {place: [listener(place[1])] for place in places}
    with own_threads(adapter), adapter.attached(places), adapter.listening(heard):
        adapter.forward(tokens)
    return [kept[layer] for layer in range(adapter.facts.layers)]


def gqa_spread(
    models: Sequence[Any],
    prompts: Sequence[Sequence[int]],
    layer: int = 1,
    error: float = 2.0**-11,
    positions: Sequence[int] = (-1, -4, -8),
) -> pd.DataFrame:
    """The same relative error planted in one KV head's entry, and how far it spreads through the heads that share it.

    Everything is computed in float64, so that the planted error (one float16 unit roundoff unless said) is the only one.

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
        for number, prompt in enumerate(prompts):
            tokens = torch.tensor([list(prompt)], device=adapter.device)
            clean = _attention_of(adapter, tokens, layer, None)
            for tensor, head, position in itertools.product(("k", "v"), range(facts.kv_heads), positions):
                noisy = _attention_of(adapter, tokens, layer, (tensor, head, position, error))
                off = relative_error(noisy["z"], clean["z"])
                touched = off > 0
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
                        "head_error": float(off[touched].mean()) if bool(touched.any()) else 0.0,
                        "attn_out": _relative(noisy["attn_out"], clean["attn_out"]),
                        "resid_post": _relative(noisy["resid_post"], clean["resid_post"]),
                        "final": _relative(noisy["final"], clean["final"]),
                        "kl": float(metrics.compare_logits(clean["logits"][None], noisy["logits"][None])["kl"]),
                    }
                )
    return pd.DataFrame(rows)


def _relative(a: Tensor, b: Tensor) -> float:
    return float(relative_l2(a[None], b[None]))


@torch.no_grad()
def _attention_of(
    adapter: Adapter, tokens: Tensor, layer: int, plant: tuple[str, int, int, float] | None
) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    last = adapter.facts.layers - 1

    def keep(name: str) -> Callable[[Tensor], None]:
        return lambda tensor: seen.__setitem__(name, tensor[0, -1].clone())

    listeners: dict[Any, Any] = {(site, layer): [keep(site)] for site in ("z", "attn_out", "resid_post")}
    listeners.setdefault(("resid_post", last), []).append(keep("final"))
    if plant is not None:
        site, head, position, error = plant

        def change(tensor: Tensor) -> Tensor:
            planted = tensor.clone()
            planted[:, position, head] *= 1 + error
            return planted

        listeners[site, layer] = [change]
    with own_threads(adapter), adapter.attached(list(listeners)), adapter.listening(listeners):
        seen["logits"] = adapter.forward(tokens)[0, -1]
    return seen
