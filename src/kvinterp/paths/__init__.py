"""HOW it runs: execution paths as data, and the two loops that follow them."""

from kvinterp.paths.kernels import (
    KERNELS,
    BatchInvariant,
    Kernels,
    LayerCast,
    Native,
    SplitK,
    kernels_named,
)
from kvinterp.paths.loops import Runner
from kvinterp.paths.path import Cached, ExecutionPath, Recompute, path_named, path_read
from kvinterp.paths.runner import run
from kvinterp.paths.sampling import STRATEGIES, Greedy, Strategy, TopK, TopP, strategy_named

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
