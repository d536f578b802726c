"""HOW it runs: execution paths as data, and the two loops that follow them."""

from kvinterp.paths.path import Cached, ExecutionPath, Recompute, path_named
from kvinterp.paths.runner import Runner, Watcher, run
from kvinterp.paths.sampling import STRATEGIES, Greedy, Strategy, TopK, TopP, strategy_named

__all__ = [
    "STRATEGIES",
    "Cached",
    "ExecutionPath",
    "Greedy",
    "Recompute",
    "Runner",
    "Strategy",
    "TopK",
    "TopP",
    "Watcher",
    "path_named",
    "run",
    "strategy_named",
]
