"""WHAT IS MEASURED: pure functions on tensors, computed in float64 on the tensors' device.

Each takes two paths' tensors ``[*batch, last]`` and gives one number ``[*batch]``; nothing is brought to the host but
in :mod:`kvinterp.metrics.statistics` and the tests beside it (inference, dependence, survival, prediction, power), which take
numbers that are there already. The device must have float64, which Apple's MPS has not. Bitwise equal inputs
give exactly the metric's zero. Non-finite inputs are the caller's to find: they give non-finite numbers, never a
plausible one.
"""

from kvinterp.metrics.attention import pattern_entropy, pattern_kl
from kvinterp.metrics.base import KINDS, Kind, Metric
from kvinterp.metrics.dependence import correlation, gee, restricted_correlation, slope, terciles
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
from kvinterp.metrics.flips import EXACT, counted, first_order, foretold, verdict_of
from kvinterp.metrics.inference import (
    Column,
    Test,
    corrected,
    mann_whitney,
    mcnemar,
    mean_of,
    rate_of,
    share_of,
    sign_flips,
    welch,
    wilcoxon,
)
from kvinterp.metrics.kv import relative_error, ulp_error, units_in_last_place
from kvinterp.metrics.power import detectable_difference, detectable_mean, mcnemar_power, mean_power
from kvinterp.metrics.prediction import auc, brier, calibration, roc
from kvinterp.metrics.recovery import recovery, recovery_percent, why_undefined
from kvinterp.metrics.registry import OF_KIND, REGISTRY, measured
from kvinterp.metrics.statistics import (
    FEWEST,
    FEWEST_RESAMPLED,
    Interval,
    Typical,
    clustered_interval,
    kl_statistics,
    typical,
)
from kvinterp.metrics.survival import cox, survival_by_step

__all__ = [
    "EXACT",
    "FEWEST",
    "FEWEST_RESAMPLED",
    "KINDS",
    "OF_KIND",
    "REGISTRY",
    "Column",
    "Interval",
    "Kind",
    "Metric",
    "Test",
    "Typical",
    "auc",
    "brier",
    "calibration",
    "clustered_interval",
    "compare_logits",
    "corrected",
    "correlation",
    "cosine_distance",
    "counted",
    "cox",
    "detectable_difference",
    "detectable_mean",
    "first_order",
    "foretold",
    "gee",
    "js_divergence",
    "kl_divergence",
    "kl_statistics",
    "logit_margin",
    "mann_whitney",
    "max_abs_difference",
    "mcnemar",
    "mcnemar_power",
    "mean_of",
    "mean_power",
    "measured",
    "pattern_entropy",
    "pattern_kl",
    "rate_of",
    "recovery",
    "recovery_percent",
    "relative_error",
    "residual_drift",
    "restricted_correlation",
    "rms_difference",
    "roc",
    "share_of",
    "sign_flips",
    "slope",
    "survival_by_step",
    "terciles",
    "top1_agreement",
    "top_probability_difference",
    "typical",
    "ulp_error",
    "units_in_last_place",
    "verdict_of",
    "welch",
    "why_undefined",
    "wilcoxon",
]
