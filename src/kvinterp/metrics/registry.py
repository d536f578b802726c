"""Finds the metrics of every file in this folder, so that a new one is one new file with its
``METRICS``.

A metric that is found here has its column in the tables of a comparison, its row in
``kvinterp list metrics`` and its tests.
"""

from __future__ import annotations

import importlib

from torch import Tensor

import kvinterp.metrics as folder
from kvinterp.common.shapes import Flag, Measure
from kvinterp.common.spec import modules_of
from kvinterp.metrics.base import KINDS, Kind, Metric


def _discover() -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for file in modules_of(folder, "(METRICS) = ").get("METRICS", ()):
        module = importlib.import_module(file)
        for metric in module.METRICS:
            if metric.name in metrics:
                raise RuntimeError(
                    f"two metrics are called {metric.name!r}; the second is in {module.__name__}."
                )
            metrics[metric.name] = metric
    return metrics


REGISTRY = _discover()
OF_KIND: dict[Kind, tuple[Metric, ...]] = {
    kind: tuple(m for m in REGISTRY.values() if m.kind == kind) for kind in KINDS
}
"""The metrics of each kind, in the order of their columns."""


def measured(kind: Kind, a: Tensor, b: Tensor) -> dict[str, Measure | Flag]:
    """Computes every metric of two tensors of a kind, by column; work that metrics share is done
    once.

    Args:
        kind: The kind of the tensors.
        a: One path's, ``[*batch, last]``.
        b: The other path's.
    """
    values: dict[str, Measure | Flag] = {}
    for metric in OF_KIND[kind]:
        if metric.column not in values:
            values |= (
                {metric.column: metric.function(a, b)}
                if metric.together is None
                else metric.together(a, b)
            )
    return values


# Single metrics as functions, for users with tensors of their own.
js_divergence = REGISTRY["js"].function
max_abs_difference, rms_difference = (
    REGISTRY["max_abs_logit"].function,
    REGISTRY["rms_logit"].function,
)
top1_agreement, top_probability_difference = (
    REGISTRY["top1_agree"].function,
    REGISTRY["top_probability_difference"].function,
)
cosine_distance, relative_error = (
    REGISTRY["cosine_distance"].function,
    REGISTRY["relative_error"].function,
)
