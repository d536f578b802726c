"""WHAT runs: models of three kinds behind one adapter, and the zoo of small trained ones."""

from kvinterp.models.adapter import Adapter, ModelInfo, Tap, dtype_named
from kvinterp.models.load import KINDS, load_model, wrap
from kvinterp.models.sites import SITES, expand_sites

__all__ = ["KINDS", "SITES", "Adapter", "ModelInfo", "Tap", "dtype_named", "expand_sites", "load_model", "wrap"]
