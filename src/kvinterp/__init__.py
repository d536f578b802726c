"""kvinterp: does decoding from a KV cache compute the same thing as recomputing the prefix?

Import it as ``import kvinterp as kv``. Names are imported when first used, so that importing the
package is quick and changes nothing; TransformerLens and transformers are imported when the first
model is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvinterp._version import __version__

if TYPE_CHECKING:
    from kvinterp.auditing.audit import audit
    from kvinterp.auditing.shape_dependence import KernelsTable, kernels_table
    from kvinterp.auditing.verdict import Verdict
    from kvinterp.commands.keeping import experiment, load
    from kvinterp.comparison import Comparison, compare
    from kvinterp.comparison.sparse_autoencoder import SparseAutoencoder, load_sae
    from kvinterp.comparison.which_run import WhichRun, which_run
    from kvinterp.data import Prompt, load_prompts
    from kvinterp.engines.matching import SiteMatches, match_sites
    from kvinterp.engines.traces import compare_traces
    from kvinterp.engines.turns import TurnsCheck, check_turns
    from kvinterp.errors import (
        CacheNotReadWarning,
        InputError,
        KvinterpError,
        NonFiniteError,
        UnsupportedError,
    )
    from kvinterp.models import KINDS, SITES, Adapter, load_model, wrap
    from kvinterp.patching import (
        Patch,
        PatchBench,
        PatchedGeneration,
        Plant,
        Steering,
        Sweep,
        activation_patching,
        decompose,
        donor_trace,
        localise,
        patched,
        patched_generation,
        steer,
        sweep,
    )
    from kvinterp.paths import Cached, ExecutionPath, Greedy, Recompute, TopK, TopP, path_named, run
    from kvinterp.policies import Policy, policy_named
    from kvinterp.recording import Generation, Recorder, Trace, generated, record
    from kvinterp.report.attention import attention_comparison
    from kvinterp.report.panel import patch_panel

_HOMES = {
    "comparison": ("Comparison", "compare"),
    "comparison.sparse_autoencoder": ("SparseAutoencoder", "load_sae"),
    "comparison.which_run": ("WhichRun", "which_run"),
    "data": ("Prompt", "load_prompts"),
    "errors": (
        "CacheNotReadWarning",
        "InputError",
        "KvinterpError",
        "NonFiniteError",
        "UnsupportedError",
    ),
    "commands.keeping": ("experiment", "load"),
    "models": ("KINDS", "SITES", "Adapter", "load_model", "wrap"),
    "patching": (
        "Patch",
        "PatchBench",
        "PatchedGeneration",
        "Plant",
        "Steering",
        "Sweep",
        "activation_patching",
        "decompose",
        "donor_trace",
        "localise",
        "patched",
        "patched_generation",
        "steer",
        "sweep",
    ),
    "paths": (
        "Cached",
        "ExecutionPath",
        "Greedy",
        "Recompute",
        "TopK",
        "TopP",
        "path_named",
        "run",
    ),
    "policies": ("Policy", "policy_named"),
    "recording": ("Generation", "Recorder", "Trace", "generated", "record"),
    "report.attention": ("attention_comparison",),
    "report.panel": ("patch_panel",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "KINDS",
    "SITES",
    "Adapter",
    "CacheNotReadWarning",
    "Cached",
    "Comparison",
    "ExecutionPath",
    "Generation",
    "Greedy",
    "InputError",
    "KernelsTable",
    "KvinterpError",
    "NonFiniteError",
    "Patch",
    "PatchBench",
    "PatchedGeneration",
    "Plant",
    "Policy",
    "Prompt",
    "Recompute",
    "Recorder",
    "SiteMatches",
    "SparseAutoencoder",
    "Steering",
    "Sweep",
    "TopK",
    "TopP",
    "Trace",
    "TurnsCheck",
    "UnsupportedError",
    "Verdict",
    "WhichRun",
    "__version__",
    "activation_patching",
    "attention_comparison",
    "audit",
    "check_turns",
    "compare",
    "compare_traces",
    "decompose",
    "donor_trace",
    "experiment",
    "generated",
    "kernels_table",
    "load",
    "load_model",
    "load_prompts",
    "load_sae",
    "localise",
    "match_sites",
    "patch_panel",
    "patched",
    "patched_generation",
    "path_named",
    "policy_named",
    "record",
    "run",
    "steer",
    "sweep",
    "which_run",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"kvinterp.{_HOME[name]}"), name)
    from kvinterp.common.wings import handed

    # What wings add: those that are installed.
    if name[0] != "_" and name in (points := handed("names")):
        return points[name].load()
    raise AttributeError(f"module 'kvinterp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
