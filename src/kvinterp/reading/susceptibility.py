"""What noise in K and V does to the tokens, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import counted, ends_said, machine_of, number, share

__all__ = ["said_of_susceptibility"]


def said_of_susceptibility(summary: Mapping[str, Any]) -> list[str]:
    """A line a finding; ``summary`` is that of :class:`kvinterp.experiments.susceptibility.Susceptibility`."""
    whole, *classes = summary["thresholds"]
    size = "standard deviation" if summary["noise"] == "normal" else "half width"
    of = f"{summary['positions']} steps of {counted(summary['prompts'], 'prompt')}, {summary['seeds']} draws of the noise each"
    at = f"Half of the tokens flip at multiplicative noise of a {size} of {_threshold(whole)} in K and V"
    if whole["why"]:
        at = f"Where half of the tokens flip is {whole['why']} tried, of multiplicative noise"
    lines = [f"{at} ({of})."]
    lines += [
        f"  margin {number(one['margin_low'])} to {number(one['margin_high'])} logits: {_threshold(one)}, "
        f"{one['flips']} flips of {one['steps']}."
        for one in classes
    ]
    lines += [_certified(summary), _calibrated(summary["brier"]), _rounding(summary["rounding"], whole)]
    return [*lines, f"Measured on {machine_of(summary['provenance'])}."]


def _threshold(one: Mapping[str, Any]) -> str:
    if one["why"]:
        return f"{one['why']} tried"
    return number(one["threshold"]) + ends_said(one["low"], one["high"], ", 95% interval {}")


def _certified(summary: Mapping[str, Any]) -> str:
    rows = summary["certificates"]
    steps, certified, wrong = (sum(row[name] for row in rows) for name in ("steps", "certified", "flips_certified"))
    said = (
        f"Certificate: at {certified} of {steps} steps, those of cached against recompute among them, the margin exceeds twice "
        "the largest change of a logit, and "
    )
    return said + ("none of them flips." if not wrong else f"{wrong} of them flip, which cannot be: report it.")


def _calibrated(brier: Mapping[str, float]) -> str:
    said = (
        "Predicted from the margin and the logit noise of other draws, as if the runner-up alone could overtake, the chance of a "
        f"flip has a Brier score of {number(brier['brier'])}, where the overall rate has {number(brier['of_the_rate'])}"
    )
    # NaN where it was measured, null where it is read again.
    if pd.isna(brier["skill"]):
        return f"{said}: no step flips, or all do, so that there is nothing to predict."
    interval = ends_said(brier["low"], brier["high"], " (95% interval {})")
    return f"{said}: skill {number(brier['skill'])}{interval}; 1 would be perfect, 0 is no better than the rate."


def _rounding(rounding: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    said = (
        f"Cached against recompute, the model's own rounding: logits differ at {rounding['differ']} of {rounding['steps']} "
        f"steps, {counted(rounding['flips'], 'token')} ({share(rounding['flips'], rounding['steps'])}) flip"
    )
    if rounding["rms_logit"] == 0:
        return f"{said}; there is nothing to set beside the threshold here."
    said += f", and the logits' error is {number(rounding['rms_logit'])} "
    said += "(root mean square over the logits, mean over steps)"
    if whole["why"]:
        return f"{said}."
    factor = whole["rms_logit"] / rounding["rms_logit"]
    return f"{said}: {number(factor)} times smaller than the {number(whole['rms_logit'])} at the threshold of all steps."
