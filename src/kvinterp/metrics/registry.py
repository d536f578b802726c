"""Finds the metrics of every file in this folder, so that a new one is one new file with its ``METRICS``."""

from __future__ import annotations

import kvinterp.metrics as folder
from kvinterp.metrics.base import Metric
from kvinterp.spec import modules_of

__all__ = ["REGISTRY"]


def _discover() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for module in modules_of(folder):
        for metric in getattr(module, "METRICS", ()):
            if metric.name in found:
                raise RuntimeError(f"two metrics are called {metric.name!r}; the second is in {module.__name__}.")
            found[metric.name] = metric
    return found


REGISTRY = _discover()
