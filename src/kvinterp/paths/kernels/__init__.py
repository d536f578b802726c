"""Which arithmetic a path computes with: the machine's own kernels, or ones whose order of
additions is known.

A kernel mode is part of an :class:`ExecutionPath`, and like it only a description. A
:class:`Runner` enters it around every forward. It works by torch's own interception of calls
(``TorchFunctionMode`` and ``TorchDispatchMode``), so it reaches a HookedTransformer, a bridge and a
transformers model alike, and leaves nothing behind.

=====================================  ==========================================================================
``native``                             the machine's kernels
``split_k(parts,accumulate)``          a product of one row is added up in parts, as GPU libraries do: the order
                                       then depends on the number of rows, which is what a cache
                                       changes
``batch_invariant``                    one fixed order for every product, norm and softmax, whatever the shape
``layer_cast``                         16-bit weights, everything computed in float32 (Yuan et al. 2025, LayerCast)
=====================================  ==========================================================================

Which library does which stands in ``docs/kernels.md``.
"""

from typing import TYPE_CHECKING

from kvinterp.common import on_demand
from kvinterp.paths.kernels.base import KernelMode, Kernels
from kvinterp.paths.kernels.native import Native
from kvinterp.paths.kernels.registry import KERNELS, kernels_named

if TYPE_CHECKING:
    from kvinterp.paths.kernels.batch_invariant import BatchInvariant
    from kvinterp.paths.kernels.layer_cast import LayerCast
    from kvinterp.paths.kernels.split_k import OPERATIONS, SplitK

__all__ = [
    "KERNELS",
    "OPERATIONS",
    "BatchInvariant",
    "KernelMode",
    "Kernels",
    "LayerCast",
    "Native",
    "SplitK",
    "kernels_named",
]

__getattr__ = on_demand.names_of(__name__)
