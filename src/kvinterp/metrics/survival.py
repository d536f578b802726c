"""The time of the first flip. Decodes that end before a flip are censored observations, not flips at the last step."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.metrics.inference import Column, Test, columns
from kvinterp.metrics.statistics import quiet

_MANY = 100
"""From this many clusters on the sandwich error is large enough."""


def survival_by_step(steps: Column, flipped: Column, confidence: float = 0.95) -> pd.DataFrame:
    """Kaplan and Meier's share of decodes without a flip so far, and the hazard: the flips of a step among those at risk.

    Args:
        steps: For each decode the step of its first flip, or its last step if it has no flip.
        flipped: Whether each decode has a flip.
        confidence: Of the intervals: log-log for the survival (scipy's ``ecdf``), Clopper and Pearson's for the hazard. They
            treat decodes as independent: give one a prompt, or read the intervals as too narrow.

    Returns:
        One row a step at which a decode ended: step, at_risk, flips, survival, survival_low, survival_high, hazard, hazard_low,
        hazard_high. Before a first flip survival is 1 and has no interval. No row without decodes.
    """
    _, when, event = columns(None, ("flipped",), steps=steps, flipped=flipped)
    names = ["step", "at_risk", "flips"]
    names += [f"{curve_name}{end}" for curve_name in ("survival", "hazard") for end in ("", "_low", "_high")]
    if not len(when):
        return pd.DataFrame(columns=names)
    curve = stats.ecdf(stats.CensoredData(uncensored=when[event], right=when[~event])).sf
    # scipy warns where survival is 1 or 0, whose logarithm's logarithm is not finite.
    with quiet():
        ends = curve.confidence_interval(confidence, method="log-log")
    rows = []
    bounds = (curve.quantiles, curve.probabilities, ends.low.probabilities, ends.high.probabilities)
    for step, share, low, high in zip(*bounds, strict=True):
        risk, flips = int((when >= step).sum()), int(event[when == step].sum())
        ends_of_hazard = stats.binomtest(flips, risk).proportion_ci(confidence, "exact")
        rows.append((step, risk, flips, share, low, high, flips / risk, ends_of_hazard.low, ends_of_hazard.high))
    return pd.DataFrame(rows, columns=names)


def cox(steps: Column, flipped: Column, x: Column, clusters: Column | None = None) -> Test:
    """Fits Cox's regression of the time of the first flip on a number, such as the smallest margin of a decode.

    Unlike a correlation with flip steps, it counts decodes that never flip: they lasted at least that long.

    Args:
        steps: For each decode the step of its first flip, or the number of its last step.
        flipped: Whether each decode has a flip.
        x: The number; the hazard is compared between decodes one unit of it apart.
        clusters: The prompt of each decode; if one has several, the error is Lin and Wei's sandwich, or for fewer than 100
            prompts, where that is too small, the jackknife's.

    Returns:
        effect: the hazard ratio of one unit more of ``x``; below 1 where a larger ``x`` goes with later or fewer flips.
        statistic: z of its logarithm (ties by Efron).
    """
    names, when, number, event = columns(clusters, ("flipped",), steps=steps, x=x, flipped=flipped)
    n = len(np.unique(names))
    head = ("Cox", n, "hazard ratio")
    if n < 5 or event.sum() < 3:
        return Test(*head, why=f"there are {int(event.sum())} flips of {n} clusters: fewer than 3 or 5")
    if len(np.unique(names[event.astype(bool)])) < 2:
        return Test(*head, why="all flips are of one cluster")
    scale = number.std()
    if not scale > 1e-12 * np.abs(number).max():
        return Test(*head, why="the number does not vary")
    z = (number - number.mean()) / scale
    beta, error = _slope(when, z, event, None if n == len(when) else names)
    if n < min(len(when), _MANY) and np.isfinite(beta):
        without = [_slope(*(column[names != name] for column in (when, z, event)))[0] for name in np.unique(names)]
        error = float(np.sqrt((n - 1) * np.var(without)))
    # A slope of 15 standard deviations means that the fit diverged: the number orders the flips perfectly.
    if not (np.isfinite(beta) and np.isfinite(error) and error > 0 and abs(beta) < 15):
        return Test(*head, why="the number orders the flips whole: the hazard ratio is not finite")
    half = stats.norm.ppf(0.975) * error
    ends = np.exp(np.array([beta, beta - half, beta + half]) / scale)
    return Test(*head, beta / error, 2 * stats.norm.sf(abs(beta / error)), *ends)


def _slope(when: np.ndarray, x: np.ndarray, event: np.ndarray, names: np.ndarray | None = None) -> tuple[float, float]:
    """The slope of the hazard's logarithm and its error; NaN if the fit fails."""
    from statsmodels.duration.hazard_regression import PHReg

    with quiet():
        try:
            fit = PHReg(when, x, event.astype(int), ties="efron").fit(groups=names)
            return float(fit.params[0]), float(fit.bse[0])
        except (np.linalg.LinAlgError, ValueError, FloatingPointError):
            return np.nan, np.nan
