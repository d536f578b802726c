"""WHAT IS MEASURED: pure functions on tensors, computed in float64 on the tensors' device.

Each takes two paths' tensors ``[*batch, last]`` and gives one number ``[*batch]``; nothing is brought to the host but
in :mod:`kvinterp.metrics.statistics`. The device must have float64, which Apple's MPS has not. Bitwise equal inputs
give exactly the metric's zero. Non-finite inputs are the caller's to find: they give non-finite numbers, never a
plausible one.
"""

from kvinterp.metrics.attention import pattern_entropy, pattern_kl
from kvinterp.metrics.base import KINDS, Kind, Metric
from kvinterp.metrics.divergence import (
    compare_logits,
    js_divergence,
    kl_divergence,
    logit_margin,
    max_abs_difference,
    rms_difference,
    top1_agreement,
    top_probability_difference,
)
from kvinterp.metrics.drift import cosine_distance, residual_drift
from kvinterp.metrics.kv import relative_error, ulp_error, units_in_last_place
from kvinterp.metrics.recovery import recovery, recovery_percent, why_undefined
from kvinterp.metrics.registry import OF_KIND, REGISTRY, measured
from kvinterp.metrics.statistics import Interval, bootstrap_interval, clustered_interval, kl_statistics

__all__ = [
    "KINDS",
    "OF_KIND",
    "REGISTRY",
    "Interval",
    "Kind",
    "Metric",
    "bootstrap_interval",
    "clustered_interval",
    "compare_logits",
    "cosine_distance",
    "js_divergence",
    "kl_divergence",
    "kl_statistics",
    "logit_margin",
    "max_abs_difference",
    "measured",
    "pattern_entropy",
    "pattern_kl",
    "recovery",
    "recovery_percent",
    "relative_error",
    "residual_drift",
    "rms_difference",
    "top1_agreement",
    "top_probability_difference",
    "ulp_error",
    "units_in_last_place",
    "why_undefined",
]
