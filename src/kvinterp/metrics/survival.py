"""The time of the first flip. Decodes that end before a flip are censored observations, not flips
at the last step.
"""

from __future__ import annotations

import pandas as pd
import scipy

from kvinterp.metrics.statistics import CONFIDENCE, Column, columns, quiet


def survival_by_step(steps: Column, flipped: Column) -> pd.DataFrame:
    """Kaplan and Meier's share of decodes without a flip so far, and the hazard: the flips of a
    step among those at risk.

    Args:
        steps: For each decode the step of its first flip, or its last step if it has no flip.
        flipped: Whether each decode has a flip.

    Returns:
        One row a step at which a decode ended: step, at_risk, flips, survival, survival_low,
        survival_high, hazard, hazard_low, hazard_high. The survival's intervals are log-log
        (scipy's ``ecdf``), the hazard's Clopper and Pearson's. They treat
        decodes as independent: give one a prompt, or read the intervals as too narrow. Before a
        first flip survival is 1 and has no interval. No row without decodes.
    """
    _, when, event = columns(None, ("flipped",), steps=steps, flipped=flipped)
    names = ["step", "at_risk", "flips"]
    names += [f"{curve}{end}" for curve in ("survival", "hazard") for end in ("", "_low", "_high")]
    if not len(when):
        return pd.DataFrame(columns=names)
    curve = scipy.stats.ecdf(
        scipy.stats.CensoredData(uncensored=when[event], right=when[~event])
    ).sf
    # scipy warns where survival is 1 or 0, whose logarithm's logarithm is not finite.
    with quiet():
        ends = curve.confidence_interval(CONFIDENCE, method="log-log")
    rows = []
    bounds = (curve.quantiles, curve.probabilities, ends.low.probabilities, ends.high.probabilities)
    for step, share, low, high in zip(*bounds, strict=True):
        risk, flips = int((when >= step).sum()), int(event[when == step].sum())
        ends_of_hazard = scipy.stats.binomtest(flips, risk).proportion_ci(CONFIDENCE, "exact")
        rows.append(
            (
                step,
                risk,
                flips,
                share,
                low,
                high,
                flips / risk,
                ends_of_hazard.low,
                ends_of_hazard.high,
            )
        )
    return pd.DataFrame(rows, columns=names)
