"""What is said of a patch by hand: no sentence but what the numbers bear out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvinterp.common.numbers import counted, upper
from kvinterp.comparison.vocabulary import RECOVERED, UNCHANGED

if TYPE_CHECKING:
    from kvinterp.patching import Asked, PatchAnswer

_DISTANCES = {**RECOVERED, "l2": "L2 distance of the logits"}


def recovery_said(answer: PatchAnswer) -> tuple[str, str]:
    """What one patch by hand did: the share that it recovered, or the distance that an ablation made, and what it is of."""
    over = f"over {counted(len(answer.steps), 'step')}" + (f". The patch {UNCHANGED}" if answer.unchanged else "")
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
    head = (
        "" if not count else f", all {count} {kind}s at once" if asked.head is None else f", {kind} {said_of(asked.head)}"
    )
    spots = {
        "newest": "at the newest position",
        "all": "at all positions that attention reads" if asked.site in _IN_CACHE else "at all positions computed",
        "earlier": "at all positions but the newest",
    }
    positions = asked.patch().positions
    where = (
        spots[positions]
        if isinstance(positions, str)
        else f"at positions {positions[0]} to {'the newest' if positions[1] is None else positions[1] - 1}"
    )
    every = f"at every step from {asked.first} to {last_step}, and the distances are means over them"
    when = every if asked.step == "every" else f"at step {asked.step} alone"
    giving = {
        "path": f"the {'cached' if asked.into == 'recompute' else 'recompute'} path's",
        "prompt": "those of the other prompt, which is fed the same tokens",
        "zero": "zeros",
        "mean": "the mean over the positions of the other prompt, or without one of this prompt",
        "resample": f"rows drawn from the other prompt's positions (seed {asked.seed})",
    }[asked.donor]
    return f"{asked.site} of layer {said_of(asked.layer)}{head}, {where}, {when}: replaced in the {asked.into} path by {giving}."


def said_of(number: int | tuple[int, ...] | None) -> str:
    """A layer or a head, or several."""
    return ", ".join(map(str, number)) if isinstance(number, tuple) else str(number)


def map_said(measure: str, ablates: bool) -> str:
    """What a map of patches by hand shows."""
    if ablates:
        return f"What each ablation alone changes: {_EFFECT[measure]}, mean over the steps ablated"
    return f"What each patch alone recovers of the {_DISTANCES[measure]} (1 all of it, 0 nothing, below 0 farther apart)"


_EFFECT = {
    "kl": "KL(unpatched || patched)",
    "l2": "L2 distance of the logits",
    "logit_difference": "logit difference of two tokens",
}
_IN_CACHE = ("kv", "cache_k", "cache_v")
