"""When the first token flips, where many decodes end before one does: those are censored, not flips at the last step."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.metrics.inference import Column, Test, columns
from kvinterp.metrics.statistics import quiet

_MANY = 100
"""Clusters from which on the sandwich is wide enough."""


def survival_by_step(steps: Column, flipped: Column, confidence: float = 0.95) -> pd.DataFrame:
    """Kaplan and Meier's share of decodes without a flip so far, and the hazard: the flips of a step among those at risk.

    Args:
        steps: For each decode the step of its first flip, or the number of its last step where there is none.
        flipped: Whether there was one.
        confidence: Of the intervals: log-log for the survival (scipy's ``ecdf``), Clopper and Pearson's for the hazard. Decodes
            are taken as independent: give one a prompt, or read the intervals as too narrow.

    Returns:
        One row a step that a decode ended at: step, at_risk, flips, survival, survival_low, survival_high, hazard, hazard_low,
        hazard_high. Before a first flip survival is 1 and has no interval. No row without decodes.
    """
    _, when, event = columns(None, ("flipped",), steps=steps, flipped=flipped)
    names = ["step", "at_risk", "flips"]
    names += [f"{what}{end}" for what in ("survival", "hazard") for end in ("", "_low", "_high")]
    if not len(when):
        return pd.DataFrame(columns=names)
    curve = stats.ecdf(stats.CensoredData(uncensored=when[event], right=when[~event])).sf
    # It warns where survival is 1 or 0, whose logarithm's logarithm is not finite.
    with quiet():
        ends = curve.confidence_interval(confidence, method="log-log")
    rows = []
    bounds = (curve.quantiles, curve.probabilities, ends.low.probabilities, ends.high.probabilities)
    for step, share, low, high in zip(*bounds, strict=True):
        risk, flips = int((when >= step).sum()), int(event[when == step].sum())
        found = stats.binomtest(flips, risk).proportion_ci(confidence, "exact")
        rows.append((step, risk, flips, share, low, high, flips / risk, found.low, found.high))
    return pd.DataFrame(rows, columns=names)


def cox(steps: Column, flipped: Column, x: Column, clusters: Column | None = None) -> Test:
    """Cox's regression of the time of the first flip on a number, such as the smallest margin of a decode.

    Unlike the correlation of flip steps with it, decodes that never flip count: they lasted at least so long.

    Args:
        steps: For each decode the step of its first flip, or the number of its last step.
        flipped: Whether there was one.
        x: The number; the hazard is compared between decodes one unit of it apart.
        clusters: The prompt of each decode; where one has several the error is Lin and Wei's sandwich, which of few prompts is
            too small: of fewer than 100 it is the jackknife's.

    Returns:
        effect: the hazard ratio of one unit more of ``x``; below 1 where a larger ``x`` goes with later or fewer flips.
        statistic: z of its logarithm (ties by Efron).
    """
    names, when, number, event = columns(clusters, ("flipped",), steps=steps, x=x, flipped=flipped)
    n = len(np.unique(names))
    what = ("Cox", n, "hazard ratio")
    if n < 5 or event.sum() < 3:
        return Test(*what, why=f"there are {int(event.sum())} flips of {n} clusters: fewer than 3 or 5")
    if len(np.unique(names[event.astype(bool)])) < 2:
        return Test(*what, why="all flips are of one cluster")
    scale = number.std()
    if not scale > 1e-12 * np.abs(number).max():
        return Test(*what, why="the number does not vary")
    z = (number - number.mean()) / scale
    beta, error = _slope(when, z, event, None if n == len(when) else names)
    if n < min(len(when), _MANY) and np.isfinite(beta):
        without = [_slope(*(of[names != name] for of in (when, z, event)))[0] for name in np.unique(names)]
        error = float(np.sqrt((n - 1) * np.var(without)))
    # A slope of 15 standard deviations is what is left of one that has no end: the flips are ordered by the number.
    if not (np.isfinite(beta) and np.isfinite(error) and error > 0 and abs(beta) < 15):
        return Test(*what, why="the number orders the flips whole: the hazard ratio is not finite")
    half = stats.norm.ppf(0.975) * error
    ends = np.exp(np.array([beta, beta - half, beta + half]) / scale)
    return Test(*what, beta / error, 2 * stats.norm.sf(abs(beta / error)), *ends)


def _slope(when: np.ndarray, x: np.ndarray, event: np.ndarray, names: np.ndarray | None = None) -> tuple[float, float]:
    """The slope of the hazard's logarithm and its error, NaN where there is none."""
    from statsmodels.duration.hazard_regression import PHReg

    with quiet():
        try:
            found = PHReg(when, x, event.astype(int), ties="efron").fit(groups=names)
            return float(found.params[0]), float(found.bse[0])
        except (np.linalg.LinAlgError, ValueError, FloatingPointError):
            return np.nan, np.nan
