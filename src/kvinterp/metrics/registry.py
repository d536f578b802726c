"""Finds the metrics of every file in this folder, so that a new one is one new file with its ``METRICS``."""

from __future__ import annotations

import importlib
import pkgutil

import kvinterp.metrics as folder
from kvinterp.metrics.base import Metric

__all__ = ["REGISTRY"]


def _discover() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name == "registry":
            continue
        for metric in getattr(importlib.import_module(f"{folder.__name__}.{module.name}"), "METRICS", ()):
            if metric.name in found:
                raise RuntimeError(f"two metrics are called {metric.name!r}; the second is in {module.name}.py.")
            found[metric.name] = metric
    return found


REGISTRY = _discover()
