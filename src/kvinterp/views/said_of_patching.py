"""What is said of a sweep and of a decomposition: no sentence but what the numbers bear out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvinterp.patching import ANEW, PARTS
from kvinterp.views.words import number

__all__ = ["said_of_decomposition", "said_of_sweep"]

_DISTANCES = {"kl": "KL", "l2": "L2 distance of the logits", "margin": "margin"}
_SHORT = {"kl": "KL", "l2": "L2", "margin": "margin"}


def said_of_sweep(summary: Mapping[str, Any]) -> list[str]:
    """What a sweep found, in a few lines; ``summary`` is :meth:`kvinterp.patching.Sweep.summary`."""
    best, distance = summary["best"], summary["distance"]
    lines = [
        f"{count} of {summary['examples']} prompts: recovery is undefined, for {why}"
        for why, count in summary["examples_undefined"].items()
    ]
    if best is None:
        equal = summary["examples_without_difference"] == summary["examples"]
        return [*lines, *["There is no difference to recover."] * equal]
    place = f"layer {best['layer']:g}" + (f", head {best['head']:g}" if best["head"] >= 0 else "")
    place = f"positions {best['positions']}" if summary["sweep"] == "blocks" else place
    what = f"{best['site']} ({best['sweep']}, {summary['direction']})"
    median, over = f"median recovery of the {_DISTANCES[distance]}", f"over {_prompts(best['defined'])}"
    others = [name for name in summary["distances"] if name != distance]
    beside = "".join(f", of the {_DISTANCES[name]} {_percent(best[f'median_{name}'])}" for name in others)
    if best["median"] < 0.05:
        lines.append(
            f"No place recovers it: the largest {median} by {what} is {best['median']:.1%}, at {place}{beside}, {over}."
        )
    else:
        lines.append(f"Most is recovered by {what} at {place}: {median} {best['median']:.1%}{beside}, {over}.")
    if summary["together"]:
        left = ", ".join(f"{found['share']:.1%} of the {_SHORT[name]}" for name, found in summary["together"].items())
        lines.append(f"With {best['site']} of all the layers swept patched together, the median prompt keeps {left}.")
    if summary["floor"]:
        left = ", ".join(f"{_SHORT[name]} {number(found['mean'])}" for name, found in summary["floor"].items())
        lines.append(f"Floor: with the last residual patched {left} is left, the unembedding's own.")
    return lines


def _prompts(count: int) -> str:
    return f"{count:g} prompt" + "s" * (count != 1)


def _percent(share: float) -> str:
    return "undefined" if share != share else f"{share:.1%}"


def said_of_decomposition(summary: Mapping[str, Any]) -> list[str]:
    """What a decomposition found; ``summary`` is :meth:`kvinterp.patching.Decomposition.summary`."""
    steps, differ = summary["steps"], summary["differ"]
    if steps == 0:
        return ["No step was decoded after the prefill: there is nothing to split."]
    if differ == 0:
        return [f"The paths' logits are bitwise equal at all {steps} decode steps: there is nothing to split."]
    made = [part for part in PARTS if summary[f"{part}_l2"] > 0]
    lines = [
        f"The logits differ at {differ} of {steps} decode steps, by L2 {number(summary['total_l2'])} on average over all of "
        "them (the parts' lengths need not add up):"
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
    return lines


def _beside(summary: Mapping[str, Any], part: str) -> str:
    null = summary.get(f"null_{part}_l2")
    said = number(summary[f"{part}_l2"])
    return said if null is None else f"{said} (null, the same rows among {summary['suffix']} more: {number(null)})"


def _steps(count: int) -> str:
    return f"{count} step" + "s" * (count != 1)
