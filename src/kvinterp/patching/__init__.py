"""WHAT IS MOVED: patches as data, sweeps over them, and the split of the difference into its
parts.
"""

from typing import TYPE_CHECKING

from kvinterp.common import on_demand

if TYPE_CHECKING:
    from kvinterp.patching.ablations import Ablation
    from kvinterp.patching.around import patched
    from kvinterp.patching.bench import DONORS, PatchAnswer, PatchBench, PatchRequest
    from kvinterp.patching.clean_corrupted import ActivationPatching, activation_patching
    from kvinterp.patching.continuing import PatchedGeneration, patched_generation
    from kvinterp.patching.decomposition import Decomposition, decompose
    from kvinterp.patching.distances import DISTANCES
    from kvinterp.patching.donors import donor_trace
    from kvinterp.patching.localising import Cause, localise
    from kvinterp.patching.patch import PATCH_SITES, Patch
    from kvinterp.patching.planted import Plant
    from kvinterp.patching.steering import Steering, steer
    from kvinterp.patching.sweeping import DIRECTIONS, PRESETS, SWEEPS, highest_kl, sweep
    from kvinterp.patching.table import Sweep

__all__ = [
    "DIRECTIONS",
    "DISTANCES",
    "DONORS",
    "PATCH_SITES",
    "PRESETS",
    "SWEEPS",
    "Ablation",
    "ActivationPatching",
    "Cause",
    "Decomposition",
    "Patch",
    "PatchAnswer",
    "PatchBench",
    "PatchRequest",
    "PatchedGeneration",
    "Plant",
    "Steering",
    "Sweep",
    "activation_patching",
    "decompose",
    "donor_trace",
    "highest_kl",
    "localise",
    "patched",
    "patched_generation",
    "steer",
    "sweep",
]

__getattr__ = on_demand.names_of(__name__)
