"""WHAT IS MEASURED: pure functions on tensors, computed in float64 on the tensors' device.

Each maps two paths' tensors ``[*batch, last]`` to one number ``[*batch]``. Only
:mod:`kvinterp.metrics.statistics` and the tests beside it (inference, dependence, survival) work on
the host, with numbers that are there already. The device must have float64, which Apple's MPS does
not have. Bitwise equal inputs give exactly the metric's zero. Non-finite inputs give non-finite
numbers, which the caller must look for.
"""

from typing import TYPE_CHECKING

from kvinterp.common import on_demand

# Its file has the function's name, and would hide it.
from kvinterp.metrics.recovery import recovery, why_undefined

if TYPE_CHECKING:
    from kvinterp.metrics.attention import pattern_kl
    from kvinterp.metrics.base import KINDS, Kind
    from kvinterp.metrics.dependence import correlation, slope, terciles
    from kvinterp.metrics.divergence import (
        compare_logits,
        kl_divergence,
        logit_margin,
    )
    from kvinterp.metrics.drift import residual_drift
    from kvinterp.metrics.flips import EXACT, counted, first_order, foretold, verdict_of
    from kvinterp.metrics.inference import (
        Test,
        corrected,
        mcnemar,
        mean_of,
        rate_of,
        share_of,
        sign_flips,
        welch,
    )
    from kvinterp.metrics.kv import units_in_last_place, vector_errors
    from kvinterp.metrics.registry import (
        OF_KIND,
        REGISTRY,
        cosine_distance,
        js_divergence,
        max_abs_difference,
        measured,
        relative_error,
        rms_difference,
        top1_agreement,
        top_probability_difference,
    )
    from kvinterp.metrics.statistics import (
        FEWEST,
        Interval,
        Typical,
        clustered_interval,
        kl_statistics,
        typical,
    )
    from kvinterp.metrics.survival import survival_by_step

__getattr__ = on_demand.names_of(__name__)
