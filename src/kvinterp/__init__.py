"""kvinterp: does decoding from a KV cache compute the same thing as recomputing the prefix?

Import it as ``import kvinterp as kv``. Names are imported when first used, so that importing the package is quick and
changes nothing; TransformerLens and transformers are imported when the first model is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvinterp._version import __version__

if TYPE_CHECKING:
    from kvinterp.auditing import Verdict
    from kvinterp.auditing.audit import audit
    from kvinterp.auditing.shape_dependence import KernelsTable, kernels_table
    from kvinterp.comparison import Comparison, compare
    from kvinterp.comparison.lens import logit_lens
    from kvinterp.comparison.matching import SiteMatches, match_sites
    from kvinterp.comparison.traces import compare_traces
    from kvinterp.data import Prompt, load_prompts
    from kvinterp.errors import CacheNotReadWarning, InputError, KvinterpError, NonFiniteError, UnsupportedError
    from kvinterp.models import KINDS, SITES, Adapter, load_model, wrap
    from kvinterp.patching import (
        Patch,
        PatchBench,
        Plant,
        Sweep,
        activation_patching,
        decompose,
        donor_trace,
        localise,
        mean_donor,
        patched,
        resample_donor,
        sweep,
    )
    from kvinterp.paths import Cached, ExecutionPath, Greedy, Recompute, TopK, TopP, path_named, run
    from kvinterp.policies import Policy, policy_named
    from kvinterp.recording import Generation, Recorder, Trace, generated, record
    from kvinterp.study.experiments.keeping import experiment, load
    from kvinterp.study.report.attention import attention_comparison
    from kvinterp.study.report.panel import patch_panel

_HOMES = {
    "auditing": ("Verdict", "audit"),
    "auditing.shape_dependence": ("KernelsTable", "kernels_table"),
    "comparison": ("Comparison", "compare"),
    "comparison.lens": ("logit_lens",),
    "comparison.matching": ("SiteMatches", "match_sites"),
    "comparison.traces": ("compare_traces",),
    "data": ("Prompt", "load_prompts"),
    "errors": ("CacheNotReadWarning", "InputError", "KvinterpError", "NonFiniteError", "UnsupportedError"),
    "study.experiments.keeping": ("experiment", "load"),
    "models": ("KINDS", "SITES", "Adapter", "load_model", "wrap"),
    "patching": (
        "Patch",
        "PatchBench",
        "Plant",
        "Sweep",
        "activation_patching",
        "decompose",
        "donor_trace",
        "localise",
        "mean_donor",
        "patched",
        "resample_donor",
        "sweep",
    ),
    "paths": ("Cached", "ExecutionPath", "Greedy", "Recompute", "TopK", "TopP", "path_named", "run"),
    "policies": ("Policy", "policy_named"),
    "recording": ("Generation", "Recorder", "Trace", "generated", "record"),
    "study.report.attention": ("attention_comparison",),
    "study.report.panel": ("patch_panel",),
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
    "Plant",
    "Policy",
    "Prompt",
    "Recompute",
    "Recorder",
    "SiteMatches",
    "Sweep",
    "TopK",
    "TopP",
    "Trace",
    "UnsupportedError",
    "Verdict",
    "__version__",
    "activation_patching",
    "attention_comparison",
    "audit",
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
    "localise",
    "logit_lens",
    "match_sites",
    "mean_donor",
    "patch_panel",
    "patched",
    "path_named",
    "policy_named",
    "record",
    "resample_donor",
    "run",
    "sweep",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvinterp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvinterp.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
