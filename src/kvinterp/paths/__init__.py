"""HOW it runs: execution paths as data, and the two loops that follow them."""

from typing import TYPE_CHECKING

from kvinterp.common import on_demand
from kvinterp.paths.kernels import KERNELS, Kernels, Native, kernels_named
from kvinterp.paths.loops import Runner
from kvinterp.paths.path import Cached, ExecutionPath, Recompute, path_named, path_read
from kvinterp.paths.runner import run
from kvinterp.paths.sampling import STRATEGIES, Greedy, Strategy, TopK, TopP, strategy_named

if TYPE_CHECKING:
    from kvinterp.paths.kernels.batch_invariant import BatchInvariant
    from kvinterp.paths.kernels.layer_cast import LayerCast
    from kvinterp.paths.kernels.split_k import SplitK

__all__ = [
    "KERNELS",
    "STRATEGIES",
    "BatchInvariant",
    "Cached",
    "ExecutionPath",
    "Greedy",
    "Kernels",
    "LayerCast",
    "Native",
    "Recompute",
    "Runner",
    "SplitK",
    "Strategy",
    "TopK",
    "TopP",
    "kernels_named",
    "path_named",
    "path_read",
    "run",
    "strategy_named",
]

__getattr__ = on_demand.names_of(__name__)
