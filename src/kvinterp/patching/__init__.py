"""WHAT IS MOVED: patches as data, sweeps over them, and the split of the difference into state and fresh."""

from kvinterp.patching.decomposition import Decomposition, decompose
from kvinterp.patching.patch import PATCH_SITES, Patch, PatchWatcher, patched
from kvinterp.patching.planted import PLACES, Cause, Plant, localise
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.sweep import DIRECTIONS, DISTANCES, PRESETS, SWEEPS, Sweep, sweep

__all__ = [
    "DIRECTIONS",
    "DISTANCES",
    "PATCH_SITES",
    "PLACES",
    "PRESETS",
    "SWEEPS",
    "Cause",
    "Decomposition",
    "Patch",
    "PatchWatcher",
    "Plant",
    "PureRecompute",
    "Sweep",
    "decompose",
    "localise",
    "patched",
    "sweep",
]
