"""Whether the parts account for the whole: the free-running difference of a precision's logits, held
against what errors of its blocks' sizes can explain.

With a fixed order of additions the answer is exact: where no part differs by a bit, no logit may.
Otherwise errors of the size found in each part are put into the recomputation, at random signs, and
the logits' response is what the parts can explain.
"""

from __future__ import annotations

import dataclasses

from kvinterp.auditing.blocks import BlockModel
from kvinterp.auditing.ladder import EMBEDDING, PrecisionRun, band
from kvinterp.auditing.values import difference
from kvinterp.models import Adapter

MARGIN = 16.0
"""How many times larger than the simulated response a free-running difference may be: the errors
are not random signs.
"""
SEEDS = 3
"""How many draws of those signs are put in; the largest response counts."""


@dataclasses.dataclass(frozen=True)
class Account:
    """Whether the parts account for the whole on one precision.

    Attributes:
        found: The largest relative difference of the logits, free-running.
        explained: What errors of the parts' sizes, put into the recomputation, change the logits by
            (times :data:`MARGIN`).
        kernels: ``"fixed order"`` or ``"native"``: which measurement is the more telling.
        layer: Where the parts do not account for it: the first layer whose free-running output
            differs.
        position: And the first position.
    """

    found: float
    explained: float
    kernels: str
    layer: int | None = None
    position: int | None = None

    @property
    def holds(self) -> bool:
        """Whether they do."""
        return self.found <= self.explained


def account(adapter: Adapter, run: PrecisionRun, terms: int) -> Account:
    """Judges the free-running differences of a precision by those given equal inputs.

    Args:
        adapter: The model in the precision's dtype.
        run: What it showed.
        terms: The longest sum in the model.
    """
    accounts = [_account(adapter, run, side, terms) for side in (run.fixed, run) if side]
    return next((a for a in accounts if not a.holds), accounts[0])


def _account(adapter: Adapter, run: PrecisionRun, side: PrecisionRun, terms: int) -> Account:
    kernels = "fixed order" if side is run.fixed else "native"
    worst = float(side.steps["relative"].max()) if len(side.steps) else 0.0
    every, explained = side.every_error, 0.0
    # A fixed order is exact only where a row does not depend on how many there are, which the null
    # shows.
    exact = side is run.fixed and side.largest_error == 0 and not (every["null"] > 0).any()
    if run.fixed is not None and side is run and worst <= band(side.dtype, terms):
        explained = worst  # No more than one rounding: then the fixed order's account is the one that is given.
    elif worst and not exact:
        # A row that merely is among more rows has errors too, which a fixed order alone would take
        # away.
        sizes = (
            every.assign(size=every[["error", "null"]].max(axis=1))
            .groupby(["layer", "part"])["size"]
            .max()
            .to_dict()
        )
        model, tokens = BlockModel(adapter), run.plan.tokens(0, adapter.device)
        reference, head = model.recompute(tokens)[0], (len(model.blocks), "output")

        def size(layer: int) -> float:
            # What enters the first block and what stands before the next are put in here, where
            # they are added to the stream.
            return max(
                sizes.get(part, 0.0)
                for part in ((layer, "output"), (layer + 1, "input"), (-1, "output"))
            )

        moved = (model.moved(tokens, size, seed)[0] for seed in range(SEEDS))
        response = max(
            difference(a, b) for again in moved for a, b in zip(again, reference, strict=True)
        )
        explained = MARGIN * (response + sizes.get(head, 0.0)) + band(side.dtype, terms)
    if worst <= explained:
        return Account(worst, explained, kernels)
    differing = [
        row.layer for row in side.layers.itertuples() if row.max_abs > 0 and row.layer != EMBEDDING
    ]
    layer = int(min(differing, default=len(list(adapter.blocks))))
    steps = side.differing_steps
    return Account(
        worst, explained, kernels, layer, int(steps["position"].min()) if len(steps) else None
    )
