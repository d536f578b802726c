"""Do the parts account for the whole? Local errors must explain the free-running difference of the logits.

With a fixed order of additions the answer is exact: where no part differs by a bit, no logit may. Otherwise errors of the size
found in each part are put into the recomputation, at random signs, and the logits' response is what the parts can explain.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.blocks import BlockHooks, BlockModel, moving, referenced
from kvinterp.auditing.comparing import difference
from kvinterp.auditing.ladder import PrecisionRun, band
from kvinterp.models import Adapter

ROOM = 16.0
"""How many times larger than the simulated response a free-running difference may be: the errors are not random signs."""
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Account:
    """Whether the parts account for the whole on one rung.

    Attributes:
        found: The largest relative difference of the logits, free-running.
        explained: What errors of the parts' sizes, put into the recomputation, change the logits by (times :data:`ROOM`).
        kernels: ``"fixed order"`` or ``"native"``: which measurement is the more telling.
        layer: Where the parts do not account for it: the first layer whose free-running output differs.
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


def account(twin: Adapter, run: PrecisionRun, terms: int) -> Account:
    """Judges the free-running differences of a rung by those given equal inputs; arguments as for ``judging.RungJudge``."""
    sides = {"fixed order": run.fixed, "native": run}
    accounts = [_judge(twin, run, side, terms, name) for name, side in sides.items() if side]
    return next((a for a in accounts if not a.holds), accounts[0])


def _judge(twin: Adapter, run: PrecisionRun, side: PrecisionRun, terms: int, kernels: str) -> Account:
    worst = float(side.steps["relative"].max()) if len(side.steps) else 0.0
    every, explained = side.every_error, 0.0
    # A fixed order is exact only where a row does not depend on how many there are, which the null shows.
    exact = side is run.fixed and side.largest_error == 0 and not (every["null"] > 0).any()
    if worst and not exact:
        # A row that merely is among more rows has errors too, which a fixed order alone would take away.
        sizes = every.assign(size=every[["error", "null"]].max(axis=1)).groupby(["layer", "part"])["size"].max().to_dict()
        with referenced(BlockModel(twin), run.plan.tokens(0, twin.device)) as hooks:
            response = max(_perturbed(hooks, sizes, seed) for seed in range(SEEDS))
        explained = ROOM * response + band(side.dtype, terms)
    if worst <= explained:
        return Account(worst, explained, kernels)
    differing = side.layers[side.layers["max_abs"] > 0] if len(side.layers) else side.layers
    layer = int(differing["layer"].min()) if len(differing) else len(list(twin.blocks))
    steps = side.differing_steps
    return Account(worst, explained, kernels, layer, int(steps["position"].min()) if len(steps) else None)


def _perturbed(hooks: BlockHooks, sizes: dict[Any, float], seed: int) -> float:
    """The largest relative change of any row's logits when every part is off by its own error, at random signs."""
    generator = torch.Generator(hooks.model.device).manual_seed(seed)
    reference = hooks.reference

    def change(layer: int, made: Tensor) -> Tensor:
        # What enters the first block and what stands before the next are put in here, where they are added to the same stream.
        size = max(sizes.get((layer, "output"), 0.0), sizes.get((layer + 1, "input"), 0.0), sizes.get((-1, "output"), 0.0))
        signs = torch.randint(0, 2, made.shape, generator=generator, device=made.device) * 2 - 1
        off = size * made.double().abs().amax(-1, keepdim=True) * signs
        return (made.double() + off).to(made.dtype)

    with moving(hooks.model.blocks, change):
        again = hooks.recompute(reference.tokens.shape[1], "no")[0]
    found = max(difference(a, b) for a, b in zip(again, reference.logits, strict=True))
    return found + sizes.get((len(hooks.model.blocks), "output"), 0.0)
