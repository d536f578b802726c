"""Finds the experiment of every file in this folder, so that a new one is one new file."""

from __future__ import annotations

import importlib
import pkgutil

import kvinterp.experiments as folder
from kvinterp.experiments.base import Experiment

__all__ = ["EXPERIMENTS"]


def _discover() -> dict[str, type[Experiment]]:
    found: dict[str, type[Experiment]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name in ("base", "registry"):
            continue
        name = f"{folder.__name__}.{module.name}"
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, Experiment) and value.__module__ == name:
                found[value.__name__.lower()] = value
    return found


EXPERIMENTS = _discover()
