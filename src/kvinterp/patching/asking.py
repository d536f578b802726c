"""A patch by hand as data, and its answer: what one asks of a :class:`kvinterp.patching.PatchBench`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models.answers import LOGIT_DIFFERENCE
from kvinterp.models.inputs import check_choice, check_known
from kvinterp.patching.ablation import ABLATIONS, Ablation
from kvinterp.patching.distances import DISTANCES
from kvinterp.patching.patch import PATCHED_CACHE, Patch, Positions, check_patch_site
from kvinterp.patching.sweeping import DIRECTIONS
from kvinterp.recording import Trace

EVERY = "every"
MEASURED = ("kl", "l2", LOGIT_DIFFERENCE)
"""What is measured of every patch: KL in nats, the L2 distance of the logits, and how far apart two tokens' logits are moved."""
DONORS = {
    "path": "the other path, on the same prompt",
    "prompt": "the same path, on another prompt of as many tokens",
    **ABLATIONS,
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """One patch of one prompt, as data.

    Attributes:
        site: A site of PATCH_SITES.
        layer: The layer, or several.
        head: Query head or KV head, as the site has them, or several; all for None.
        step: A step, or ``"every"``: every step from ``first`` on.
        positions: As of a :class:`Patch`; None for the newest, of the cache all.
        direction: A direction of DIRECTIONS: into which path.
        donor: A name of DONORS.
        seed: Seeds the draws of ``"resample"``.
    """

    site: str = "resid_post"
    layer: int | tuple[int, ...] = 0
    head: int | tuple[int, ...] | None = None
    step: int | str = EVERY
    positions: Positions | None = None
    direction: str = "into-recompute"
    donor: str = "path"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, DIRECTIONS)
        check_known("donor", self.donor, DONORS)
        check_patch_site(self.site)
        if self.step != EVERY and not (
            isinstance(self.step, int) and not isinstance(self.step, bool) and self.step >= self.first
        ):
            kind = "a decode step from 1 on" if self.first else "a step from 0 on"
            raise InputError(f"step={self.step!r} was given: expected {kind}, or 'every'.")

    @property
    def first(self) -> int:
        """The first step that differs: both paths of one prompt begin with the same forward."""
        return 1 if self.donor == "path" else 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers."""
        return self.layer if isinstance(self.layer, tuple) else (self.layer,)

    @property
    def into(self) -> str:
        """The form of the path that is patched."""
        return self.direction.removeprefix("into-")

    @property
    def ablates(self) -> bool:
        """Whether nothing is restored: rows that no run computed go in."""
        return self.donor in ABLATIONS

    def patch(self, donor: Trace | Ablation | None = None) -> Patch:
        """The same as a :class:`Patch`."""
        positions = self.positions
        if positions is None:
            positions = "all" if self.site in PATCHED_CACHE else "newest"
        steps: Any = EVERY if self.step == EVERY else (self.step,)
        return Patch(
            self.site, self.layers, (self.head,) if isinstance(self.head, int) else self.head, positions, steps, donor
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchAnswer:
    """What one patch did.

    Distances are means over the steps patched, from what gives (the donor's logits; of an ablation the unpatched ones).

    Attributes:
        asked: The patch.
        recovery: ``1 - d_after / d_before``; NaN where there is nothing to recover, as with an ablation.
        l2_recovery: The same of the L2 distance of the logits, which no single step decides.
        why: Why ``recovery`` is NaN and what to do instead; else empty.
        d_before: KL(donor || unpatched), in nats; exactly 0 of an ablation.
        d_after: KL(donor || patched); of an ablation KL(unpatched || patched), which is what it does.
        l2_before: L2 distance of the logits, unpatched.
        l2_after: The same, patched.
        pair: The two tokens of the logit difference, whose ids are :func:`pair_of`'s.
        pair_before: ``|difference of the donor - that of the unpatched|``, in logits.
        pair_after: The same, patched.
        pair_recovery: The recovery of it.
        steps: One row a step patched: step, token (fed at it), recovery, d_before, d_after, l2_recovery.
        tokens: The top tokens at ``shown_step`` of each run: run (donor, unpatched, patched), rank, token, text, probability,
            logit.
        shown_step: The step with the largest distance before; of an ablation after.
        unchanged: Whether all that the patch wrote was there already.
        seconds: How long the answer took.
    """

    asked: Asked
    recovery: float
    l2_recovery: float
    why: str
    d_before: float
    d_after: float
    l2_before: float
    l2_after: float
    pair: tuple[str, str]
    pair_before: float
    pair_after: float
    pair_recovery: float
    steps: pd.DataFrame
    tokens: pd.DataFrame
    shown_step: int
    unchanged: bool = False
    seconds: float = float("nan")

    def __repr__(self) -> str:
        """The patch and what it did, in one line."""
        did = f"KL {self.d_before:.3g} to {self.d_after:.3g} nats over {len(self.steps)} steps"
        share = f"recovery {self.recovery:.2%}, " if self.recovery == self.recovery else ""
        return f"<PatchAnswer to {self.asked}: {share}{did}>"


def pair_of(donor: Float[Tensor, "step vocab"], base: Float[Tensor, "step vocab"]) -> tuple[int, int]:
    """The two tokens of the logit difference: the donor's first where the logits are farthest apart, and the other run's.

    Where that is the same token, the donor's second.
    """
    at = int(DISTANCES["l2"](donor, base).argmax())
    first, second = donor[at].topk(2).indices.tolist()
    other = int(base[at].argmax())
    return first, second if other == first else other
