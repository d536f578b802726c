"""What is said of a sweep and of a decomposition: no sentence but what the numbers bear out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.reading.numbers import counted, machines_of, number, percent, upper
from kvinterp.reading.vocabulary import ANEW, PARTS, RECOVERED

if TYPE_CHECKING:
    from kvinterp.patching import Asked, PatchAnswer

_DISTANCES = {**RECOVERED, "l2": "L2 distance of the logits"}
_SHORT = {**RECOVERED, "l2": "L2"}


# A sweep ---------------------------------------------------------------------------------------------------------------


def said_of_sweep(summary: Mapping[str, Any]) -> list[str]:
    """What a sweep found, in a few lines; ``summary`` is :meth:`kvinterp.patching.Sweep.summary`."""
    best, distance = summary["best"], summary["distance"]
    lines = [
        f"{count} of {counted(summary['examples'], 'prompt')}: recovery is undefined, for {why}"
        for why, count in summary["examples_undefined"].items()
    ]
    if best is None:
        equal = summary["examples_without_difference"] == summary["examples"]
        return [*lines, *["There is no difference to recover."] * equal, _measured_on(summary)]
    place = f"layer {best['layer']:g}" + (f", head {best['head']:g}" if best["head"] >= 0 else "")
    place = f"positions {best['positions']}" if best["sweep"] == "blocks" else place
    what = f"{best['site']} ({best['sweep']}, {summary['direction']})"
    others = [name for name in summary["distances"] if name != distance]
    beside = "".join(f", of the {_DISTANCES[name]} {_defined(best[f'median_{name}'])}" for name in others)
    found = f"the largest median recovery of the {_DISTANCES[distance]}, by {what}, is {best['median']:.1%}, at {place}"
    found += f"{beside}, over {counted(best['defined'], 'prompt')}"
    if np.isfinite(best["interval_low"]):
        found += f" (95% interval {best['interval_low']:.1%} to {best['interval_high']:.1%}, mean {best['mean']:.1%})"
    else:
        found += ", too few for an interval"
    lines.append(f"No place recovers a twentieth: {found}." if best["median"] < 0.05 else f"{upper(found)}.")
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


def _defined(share: float) -> str:
    return "undefined" if pd.isna(share) else f"{share:.1%}"


PATCHED = {
    "single": "One layer at a time",
    "cumulative": "Layers from 0 on",
    "cumulative-from": "Layers to the last",
    "heads": "One head at a time",
    "kv-heads": "One KV head at a time",
    "blocks": "One block of positions at a time",
}
"""What a sweep patches at once."""


def recovery_title(frame: pd.DataFrame, kind: str, distance: str) -> str:
    """The title of a sweep's figure: which place recovers most.

    Args:
        frame: The rows of ``Sweep.recovery`` of one kind of sweep.
        kind: That kind.
        distance: What recovery is of.
    """
    said = PATCHED[kind]
    known = frame[frame["defined"]]
    if known.empty:
        equal = f"the {RECOVERED[distance]} is 0 in every example, so nothing can be recovered"
        return f"{said}: {equal}. {TO_SEE_A_DIFFERENCE}"
    medians = known.groupby(["layer", "head", "positions"])["recovery"].median().reset_index()
    best = medians["recovery"].max()
    named = (
        "block {positions}" if kind == "blocks" else "layer {layer}, head {head}" if "heads" in kind else "layer {layer}"
    )
    first, *others = (named.format(**row) for row in medians[medians["recovery"] == best].to_dict("records"))
    alike = f" (as do {len(others)} others)" if others else ""
    text = f"{said}: {first} recovers most{alike}, median {percent(best)}"
    if best < 0.01:
        text = f"{said}: none recovers 1 % at the median"
    count, equal_ones = known["example"].nunique(), frame["example"].nunique() - known["example"].nunique()
    text += f" of {counted(count, 'example')}"
    return text + (f" ({equal_ones} without a difference left out)" if equal_ones else "")


def step_title(table: pd.DataFrame, kind: str, distance: str) -> str:
    """The title of recovery by step; ``table`` holds the medians, layer by step."""
    known = table.dropna(axis=1, how="all")
    if not known.shape[1]:
        return f"{PATCHED[kind]}, by step: the {RECOVERED[distance]} is 0 at every step. {TO_SEE_A_DIFFERENCE}"
    half = (known >= 0.5).sum(axis=1)
    most = [str(layer) for layer in half.index[half == half.max()]]
    if not half.max():
        return f"{PATCHED[kind]}: no layer recovers half at any of {known.shape[1]} steps"
    verb = "recovers" if len(most) == 1 else "recover"
    return f"{PATCHED[kind]}: layer {' and '.join(most)} {verb} half or more at {half.max()} of {known.shape[1]} steps"


def recovery_said(answer: PatchAnswer) -> tuple[str, str]:
    """What one patch by hand did: the share that it recovered, or the distance that an ablation made, and what it is of."""
    over = f"over {counted(len(answer.steps), 'step')}"
    if answer.asked.ablates:
        kl, l2 = _exactly(answer.d_after, "nats"), _exactly(answer.l2_after)
        lead = f"KL(unpatched || patched) {kl}, L2 distance of the logits {l2}"
        return lead, f"mean {over}. An ablation restores nothing, so there is no recovery: this is what it changes."
    shares = {"KL": answer.recovery, "L2 distance of the logits": answer.l2_recovery}
    share = ", ".join(f"{value:.2%} of the {name}" for name, value in shares.items() if value == value)
    before, after = _exactly(answer.d_before, "nats"), _exactly(answer.d_after, "nats")
    rest = f"{over}. KL to the donor: {before} before, {after} after the patch."
    if not share:
        return "Recovery undefined", f"{rest} {upper(answer.why)}"
    return f"Recovery {share}" + (f"; undefined: {answer.why.rstrip('.')}" if answer.why else ""), rest


def _exactly(value: float, unit: str = "") -> str:
    return "exactly 0" if value == 0 else f"{value:.3g} {unit}".strip()


def asked_said(asked: Asked, heads: tuple[int, str], last_step: int) -> str:
    """What a patch by hand moves, and from where, in words; "all" is said with how many ``heads`` the site has of which kind."""
    count, kind = heads
    head = "" if not count else f", all {count} {kind}s at once" if asked.head is None else f", {kind} {asked.head}"
    spots = {
        "newest": "at the newest position",
        "all": "at all positions that attention reads" if asked.site in _IN_CACHE else "at all positions computed",
        "earlier": "at all positions but the newest",
    }
    positions = asked.patch().positions
    where = spots[positions] if isinstance(positions, str) else f"at positions {positions[0]} to {positions[1] - 1}"
    every = f"at every step from {asked.first} to {last_step}, and the distances are means over them"
    when = every if asked.step == "every" else f"at step {asked.step} alone"
    giving = {
        "path": f"the {'cached' if asked.into == 'recompute' else 'recompute'} path's",
        "prompt": "those of the other prompt, which is fed the same tokens",
        "zero": "zeros",
        "mean": "the mean over the positions of the other prompt, or without one of this prompt",
        "resample": f"rows drawn from the other prompt's positions (seed {asked.seed})",
    }[asked.donor]
    return f"{asked.site} of layer {asked.layer}{head}, {where}, {when}: replaced in the {asked.into} path by {giving}."


def map_said(measure: str, ablates: bool) -> str:
    """What a map of patches by hand shows."""
    if ablates:
        return f"What each ablation alone changes: {_EFFECT[measure]}, mean over the steps ablated"
    return f"What each patch alone recovers of the {_DISTANCES[measure]} (1 all of it, 0 nothing, below 0 farther apart)"


_EFFECT = {"kl": "KL(unpatched || patched)", "l2": "L2 distance of the logits"}
_IN_CACHE = ("kv", "cache_k", "cache_v")


# A decomposition -------------------------------------------------------------------------------------------------------


def said_of_decomposition(summary: Mapping[str, Any]) -> list[str]:
    """What a decomposition found; ``summary`` is :meth:`kvinterp.patching.Decomposition.summary`."""
    steps, differ, of = summary["steps"], summary["differ"], counted(summary["examples"], "prompt")
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
        lines.append(
            f"  {part}: {PARTS[part]}: {_beside(summary, part)}; most of the difference at {counted(led, 'step')}."
        )
        lines += [
            f"    {name}: {text}: {_beside(summary, name)}."
            for name, text in (ANEW.items() if part == "anew" else ())
            if summary[f"{name}_l2"] > 0
        ]
    if summary["anew_l2"] > 0:
        lines.append("The part anew is the recompute path's difference from itself: no cache makes it.")
    if summary["cache_l2"] > 0:
        parts = " and ".join(part for part in ("fresh", "alone") if summary[f"{part}_l2"] > 0)
        lines.append(f"A cache as such contributes the rows computed alone, {parts}: {_beside(summary, 'cache')}.")
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


def split_title(steps: pd.DataFrame) -> str:
    """The title of the parts by step: how often each is more than all others together."""
    later = steps[steps["step"] > 0]
    if later.empty or not (later["total_l2"] > 0).any():
        return f"The logits are bitwise equal at every step: there is nothing to split. {TO_SEE_A_DIFFERENCE}"
    differing = later[later["total_l2"] > 0]
    counts = differing["most"].value_counts()
    led = [f"{part} at {counts[part]}" for part in counts.index if part in PARTS]
    said = f"More than all other parts together, of {len(differing)} steps that differ: {', '.join(led)}"
    spread = int(counts.get("spread", 0))
    if not led:
        return f"No part is more than all others together at any of {len(differing)} steps that differ"
    return said + f"; none at {spread}" * bool(spread)


def layer_title(quartiles: Mapping[str, pd.DataFrame]) -> str:
    """The title of the parts by layer; ``quartiles`` by part."""
    found = []
    for part in PARTS:
        median = quartiles[part][0.5]
        first = median.index[median > 0]
        if len(first):
            found.append(f"{part} is first above 0 at layer {first[0]}")
    if not found:
        return "At the median step every part is 0 in every layer"
    return f"At the median step {', '.join(found)}" + "; the other parts are 0" * (len(found) < len(PARTS))
