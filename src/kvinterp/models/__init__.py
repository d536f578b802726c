"""WHAT runs: models of three kinds behind one adapter, and the zoo of small trained ones.

Names are imported when they are first used, so that a model can be looked for before torch is
imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter, ModelInfo, dtype_named
    from kvinterp.models.hooks import Tap
    from kvinterp.models.load import KINDS, load_model, wrap
    from kvinterp.models.sites import SITES, expand_sites

__all__ = [
    "KINDS",
    "SITES",
    "Adapter",
    "ModelInfo",
    "Tap",
    "dtype_named",
    "expand_sites",
    "load_model",
    "wrap",
]

_HOMES = {
    "adapter": ("Adapter", "ModelInfo", "Tap", "dtype_named"),
    "load": ("KINDS", "load_model", "wrap"),
    "sites": ("SITES", "expand_sites"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvinterp.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvinterp.models.{_HOME[name]}"), name)
