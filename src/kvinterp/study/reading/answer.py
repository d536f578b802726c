"""What the page of a comparison asks, and what is to be known of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvinterp.common.numbers import counted, machines_of
from kvinterp.comparison.vocabulary import PROTOCOLS
from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.study.reading.results import leading, place_of, with_protocol

if TYPE_CHECKING:
    from kvinterp.study.results import Result


def question_of(results: Sequence[Result]) -> str:
    """What was asked."""
    pairs = {(r.comparison.provenance["paths"]["a"], r.comparison.provenance["paths"]["b"]) for r in results}
    if len(pairs) > 1:
        return f"Do these {len(pairs)} pairs of paths compute the same thing?"
    a, b = next(iter(pairs))
    if (a, b) == ("cached", "recompute"):
        return "Does decoding from the KV cache compute the same thing as recomputing the whole prefix at every step?"
    return f"Does the path {a} compute the same thing as the path {b}?"


def matched(main: Sequence[Result]) -> list[Result]:
    """Those that measure arithmetic alone, or where there is none all."""
    return with_protocol(main, "matched") or list(main)


def notes_of(main: Sequence[Result]) -> list[str]:
    """What was done, of how many prompts and on which machine, and what could not be recorded."""
    protocols = dict.fromkeys(r.comparison.provenance["protocol"] for r in main)
    lines = [f"In the {name} protocol {PROTOCOLS[name]}." for name in protocols]
    if set(protocols) == {"matched", "free"} and _protocols_alike(main):
        lines.append(
            "Matched and free give the same numbers here: as long as no token flips, both paths see the same text."
        )
    for result in leading(main):
        for site, reason in result.summary["settings"].get("left_out", {}).items():
            lines.append(f"{', '.join(place_of(result))}: {site} is not recorded, because {reason[:1].lower()}{reason[1:]}")
    lines.append("A median has its 95% interval by order statistics, over prompts; there is none for fewer than six.")
    return [*lines, *_measured_sentence(main)]


def _protocols_alike(results: Sequence[Result]) -> bool:
    pairs = [
        (free.comparison.steps, other.comparison.steps)
        for free in with_protocol(results, "free")
        for other in with_protocol(results, "matched")
        if place_of(free) == place_of(other)
        and all(free.comparison.provenance[key] == other.comparison.provenance[key] for key in ("paths", "strategy"))
    ]
    columns = ["example", "step", "kl", "max_abs_logit"]
    return bool(pairs) and all(
        a[columns].reset_index(drop=True).equals(b[columns].reset_index(drop=True)) for a, b in pairs
    )


def _measured_sentence(main: Sequence[Result]) -> list[str]:
    provenances = [r.comparison.provenance for r in main]
    ids = {row for r in main for row in r.comparison.examples["id"]}
    left = sum(len(r.comparison.failures) for r in main)
    out = f" {counted(left, 'prompt')} {'was' if left == 1 else 'were'} left out." if left else ""
    # What a policy, a narrower cache, another dtype or a kernel mode does is no matter of the processor.
    acts = any(
        made in path
        for provenance in provenances
        for path in provenance["paths"].values()
        for made in ("+", "quantized(", "@", "kernels=")
    )
    there = (
        "the numbers can be others"
        if acts
        else "the paths can be equal where they differ here, and differ where they are equal"
    )
    return [
        f"All this is of {counted(len(ids), 'prompt')} on {machines_of(provenances)}.{out} Other processors' kernels add in "
        f"other orders: there {there}.",
        *([TO_SEE_A_DIFFERENCE] if all((r.comparison.steps["max_abs_logit"] == 0).all() for r in main) else []),
    ]
