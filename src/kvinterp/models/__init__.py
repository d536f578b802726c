"""WHAT runs: models of three kinds behind one adapter, and the zoo of small trained ones.

Names are imported when they are first used, so that a model can be looked for before torch is
imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvinterp.common import on_demand

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter, ModelInfo, dtype_named
    from kvinterp.models.load import KINDS, load_model, wrap
    from kvinterp.models.sites import SITES, expand_sites
    from kvinterp.models.taps import Tap

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

__getattr__ = on_demand.names_of(__name__)
