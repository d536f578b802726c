"""Two models side by side, such as one checkpoint in two libraries: rounding, or the layer from
which on they differ otherwise.

The null is both models' own rounding, measured on the same tokens: how far each is from its own
copy in float64. Two that compute the same function are at most as far apart as both errors together
(the triangle inequality), at every site. What is further apart is no rounding, and the first layer
where it is further is where it begins.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvinterp.common.numbers import number
from kvinterp.models.attaching import HookPoint
from kvinterp.models.sites import LAYOUTS, VECTOR_SITES
from kvinterp.paths import path_named, run
from kvinterp.recording import Trace

FORWARD = (
    *(
        "embed",
        "resid_pre",
        "q",
        "k",
        "v",
        "cache_k_pre",
        "cache_k",
        "cache_v",
        "attn_scores",
        "pattern",
        "z",
        "result",
    ),
    *("attn_out", "resid_mid", "router", "post", "mlp_out", "resid_post"),
)
"""Sites in the order in which a layer computes them; q, k and v stand beside each other."""
MOST = 2**31
"""The most parameters of a model of which a copy in float64 is made here."""


def beside_float64(a: Trace, b: Trace, count: int) -> dict[str, Any]:
    """Says whether two models differ by more than their own rounding.

    Args:
        a: A trace that this process made of one model, with logits.
        b: The same of another model, fed the same tokens.
        count: The steps that both have.

    Returns:
        ``word`` ("equal", "rounding", "no rounding" or "not known"), ``said`` and, by site and
        layer and for the logits, ``distances``: how far apart both are and both errors together,
        the median step; ``jump``, the first of them in the order of layers where they are further
        apart than that, if there is one.
    """
    models = [trace.model() for trace in (a, b)]
    names = " and ".join(str(trace.provenance.get("kind", "")) for trace in (a, b))
    if any(
        model is None or sum(p.numel() for p in model.model.parameters()) > MOST for model in models
    ):
        why = (
            "run both in this process to have it measured"
            if None in models
            else "too large for a copy in float64 here"
        )
        return {
            "word": "not known",
            "said": f"what rounding does to {names} is not known: {why}.",
            "distances": [],
        }
    sites = [
        hook_point
        for hook_point in a.records
        if hook_point in b.records and hook_point[0] in VECTOR_SITES and hook_point[0] in FORWARD
    ]
    exact = [
        _exact(model, trace, sites, count) for model, trace in zip(models, (a, b), strict=True)
    ]
    rows = [
        _distance(hook_point, *(_rows(trace, hook_point, count) for trace in (a, b, *exact)))
        for hook_point in [*sites, ("logits", -1)]
    ]
    rows = [row for row in rows if row]
    return {"word": _word(rows), "said": _said(rows, names), "distances": rows, "jump": _jump(rows)}


def _exact(model: Any, trace: Trace, sites: list[HookPoint], count: int) -> Trace:
    """The same path and tokens in float64."""
    path = dataclasses.replace(path_named(trace.path), dtype="float64", cache_dtype=None)
    return run(
        model, list(trace.prompt), path, continuation=list(trace.fed[: count - 1]), max_new_tokens=count, stop="length",
        logits="keep", record=sorted({site for site, _ in sites}) or None, layers=sorted({at for _, at in sites}) or None,
    )  # type: ignore[no-any-return]  # fmt: skip


def _rows(trace: Trace, hook_point: HookPoint, count: int) -> Tensor | None:
    """``[step, width]`` of a site at the newest position, its heads side by side; the log-probs for
    the logits.
    """
    if hook_point[0] == "logits":
        return None if trace.logits is None else trace.logits[:count].double().log_softmax(-1)
    # A record has no axis of the batch, and none of positions where the newest alone was kept.
    layout, records = LAYOUTS[hook_point[0]], trace.records[hook_point][:count]
    newest = [
        row.select(layout.row_axis - 1, -1) if row.dim() == layout.dimensions - 1 else row
        for row in records
    ]
    return torch.stack([row.flatten() for row in newest]).double() if newest else None


def _distance(
    hook_point: HookPoint,
    a: Tensor | None,
    b: Tensor | None,
    exact_a: Tensor | None,
    exact_b: Tensor | None,
) -> dict[str, Any]:
    if (
        a is None
        or b is None
        or exact_a is None
        or exact_b is None
        or not a.shape == b.shape == exact_a.shape
    ):
        return {}
    apart, own, other = (
        torch.linalg.vector_norm(x - y, dim=-1) for x, y in ((a, b), (a, exact_a), (b, exact_b))
    )
    size = torch.linalg.vector_norm(b, dim=-1)
    medians = [float(np.median(values.numpy())) for values in (apart, own + other, size)]
    return {
        "site": hook_point[0],
        "layer": hook_point[1],
        "apart": medians[0],
        "rounding": medians[1],
        "size": medians[2],
    }


def _word(rows: list[dict[str, Any]]) -> str:
    if all(row["apart"] == 0 for row in rows):
        return "equal"
    return "rounding" if all(row["apart"] <= row["rounding"] for row in rows) else "no rounding"


def _by_layer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of the computation; the logits are last."""
    return sorted(
        rows,
        key=lambda row: (
            (np.inf,) if row["site"] == "logits" else (row["layer"], FORWARD.index(row["site"]))
        ),
    )


def _jump(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first place, in the order of the computation, that is beyond rounding."""
    return next((row for row in _by_layer(rows) if row["apart"] > row["rounding"]), None)


def _said(rows: list[dict[str, Any]], names: str) -> str:
    """The word, and where it is told."""

    def name(row: dict[str, Any]) -> str:
        return (
            "the log-probs" if row["site"] == "logits" else f"{row['site']} of layer {row['layer']}"
        )

    if _word(rows) == "equal":
        return f"{names}: nothing that was recorded differs."
    first = _jump(rows)
    if first is None:
        most = max(rows, key=lambda row: row["apart"] / max(row["rounding"], np.finfo(float).tiny))
        return (
            f"{names} differ by rounding: nowhere are they further apart than both are from their own float64 together; "
            f"nearest to it is {name(most)}, {number(most['apart'])} of {number(most['rounding'])}."
        )
    ordered = _by_layer(rows)
    before = ordered[: ordered.index(first)]
    within = f"; up to {name(before[-1])} they differ by rounding" if before else ""
    times = number(first["apart"] / first["rounding"]) if first["rounding"] else "infinitely many"
    return (
        f"{names} differ by more than rounding from {name(first)} on: {number(first['apart'])}, {times} times as far as both are "
        f"from their own float64 together ({number(first['rounding'])}){within}."
    )
