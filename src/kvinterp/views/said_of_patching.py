"""What is said of a sweep and of a decomposition: no sentence but what the numbers bear out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvinterp.comparison.where import prompts_said
from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.patching import ANEW, PARTS
from kvinterp.views.words import machines_of, number

__all__ = ["said_of_decomposition", "said_of_sweep"]

_DISTANCES = {"kl": "KL", "l2": "L2 distance of the logits", "margin": "margin"}
_SHORT = {"kl": "KL", "l2": "L2", "margin": "margin"}


def said_of_sweep(summary: Mapping[str, Any]) -> list[str]:
    """What a sweep found, in a few lines; ``summary`` is :meth:`kvinterp.patching.Sweep.summary`."""
    best, distance = summary["best"], summary["distance"]
    lines = [
        f"{count} of {prompts_said(summary['examples'])}: recovery is undefined, for {why}"
        for why, count in summary["examples_undefined"].items()
    ]
    if best is None:
        equal = summary["examples_without_difference"] == summary["examples"]
        return [*lines, *["There is no difference to recover."] * equal, _measured_on(summary)]
    place = f"layer {best['layer']:g}" + (f", head {best['head']:g}" if best["head"] >= 0 else "")
    place = f"positions {best['positions']}" if summary["sweep"] == "blocks" else place
    what = f"{best['site']} ({best['sweep']}, {summary['direction']})"
    others = [name for name in summary["distances"] if name != distance]
    beside = "".join(f", of the {_DISTANCES[name]} {_percent(best[f'median_{name}'])}" for name in others)
    found = f"the largest median recovery of the {_DISTANCES[distance]}, by {what}, is {best['median']:.1%}, at {place}"
    found += f"{beside}, over {prompts_said(best['defined'])}"
    if best["defined"] == 1:
        found += ", so without an interval"
    elif np.isfinite(best["interval_low"]):
        found += f" (mean {best['mean']:.1%}, 95% interval {best['interval_low']:.1%} to {best['interval_high']:.1%})"
    lines.append(
        f"No place recovers a twentieth: {found}." if best["median"] < 0.05 else f"{found[:1].upper()}{found[1:]}."
    )
    if summary["together"]:
        left = ", ".join(f"{found['share']:.1%} of the {_SHORT[name]}" for name, found in summary["together"].items())
        lines.append(f"With {best['site']} of all the layers swept patched together, the median prompt keeps {left}.")
    if summary["floor"]:
        left = ", ".join(f"{_SHORT[name]} {number(found['mean'])}" for name, found in summary["floor"].items())
        # Only where every step is patched does nothing but the unembedding follow the last residual stream.
        own = ", what the final norm and the unembedding make" if summary["protocol"] == "matched" else ""
        lines.append(f"Floor: with the last residual patched {left} is left{own}.")
    return [*lines, _measured_on(summary)]


def _measured_on(summary: Mapping[str, Any]) -> str:
    return f"Measured on {machines_of([summary['provenance']])}."


def _percent(share: float) -> str:
    return "undefined" if share != share else f"{share:.1%}"


def said_of_decomposition(summary: Mapping[str, Any]) -> list[str]:
    """What a decomposition found; ``summary`` is :meth:`kvinterp.patching.Decomposition.summary`."""
    steps, differ, of = summary["steps"], summary["differ"], prompts_said(summary["examples"])
    if steps == 0:
        return ["No step was decoded after the prefill: there is nothing to split."]
    if differ == 0:
        return [
            f"The paths' logits are bitwise equal at all {steps} decode steps of {of}: there is nothing to split.",
            TO_SEE_A_DIFFERENCE,
            _measured_on(summary),
        ]
    made = [part for part in PARTS if summary[f"{part}_l2"] > 0]
    lines = [
        f"The logits differ at {differ} of {steps} decode steps of {of}, by L2 {number(summary['total_l2'])} on average over "
        "all of them (the parts' lengths need not add up):"
    ]
    for part in made:
        led = summary["most"].get(part, 0)
        lines.append(f"  {part}: {PARTS[part]}: {_beside(summary, part)}; most of the difference at {_steps(led)}.")
        lines += [
            f"    {name}: {text}: {_beside(summary, name)}."
            for name, text in (ANEW.items() if part == "anew" else ())
            if summary[f"{name}_l2"] > 0
        ]
    if summary["anew_l2"] > 0:
        lines.append("The part anew is the recompute path's difference from itself: no cache makes it.")
    if summary["cache_l2"] > 0:
        lines.append(f"A cache as such contributes the rows computed alone, fresh and alone: {_beside(summary, 'cache')}.")
    if summary["without_cache"]:
        lines.append(
            f"At {summary['without_cache']} of the {differ} steps that differ a cache as such contributes nothing."
        )
    if summary["within_null"]:
        lines.append(
            f"At {summary['within_null']} of the {differ} it contributes no more than its null: a difference of that size "
            "needs no cache."
        )
    kl = ", ".join(f"{number(summary[part])} {part}" for part in made)
    lines.append(
        f"Mean KL in nats: {number(summary['total'])} in all, {kl} (KL is no sum of its parts: two can undo each other)."
    )
    return [*lines, _measured_on(summary)]


def _beside(summary: Mapping[str, Any], part: str) -> str:
    null = summary.get(f"null_{part}_l2")
    said = number(summary[f"{part}_l2"])
    return said if null is None else f"{said} (null, the same rows among {summary['suffix']} more: {number(null)})"


def _steps(count: int) -> str:
    return f"{count} step" + "s" * (count != 1)
