"""``beams(3)``: the rows of the cache change places before every step, as in beam search."""

from __future__ import annotations

import dataclasses

import torch

from kvinterp.common.checks import check_whole
from kvinterp.errors import UnsupportedError
from kvinterp.paths.calls.base import Call, Feeder, Loop


@dataclasses.dataclass(frozen=True)
class Beams(Call):
    """Several continuations of one prompt in a batch, whose rows ``reorder_cache`` rotates before each step.

    Attributes:
        beams: How many.
    """

    beams: int = 3

    def __post_init__(self) -> None:
        check_whole("beams", self.beams, 2, 1_000)

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """A row a beam."""
        return self.beams, length, steps

    def feed(self, feeder: Feeder) -> Loop:
        """Feeds the path's token in its row, others in the others, and moves all of them."""
        view, tokens = feeder.view, feeder.prompt.expand(self.beams, -1)
        feeder.start(tokens, feeder.steps)
        if not feeder.store.can_select:
            raise UnsupportedError(
                f"call={self} moves rows, and a {feeder.store.name} has none to move: leave the call out."
            )
        logits = feeder.pieces(tokens)
        order = torch.arange(self.beams, device=tokens.device).roll(1)
        while True:
            token = yield logits[view.row : view.row + 1, -1]
            feeder.select(order)
            view.row = (view.row + 1) % self.beams
            feeder.count("rows moved", self.beams)
            new = (token + torch.arange(self.beams, device=token.device) - view.row) % feeder.adapter.facts.vocabulary
            logits = feeder.forward(new[:, None])

    def missing(self, witness: dict[str, int]) -> str:
        """Rows that were moved."""
        return "" if witness.get("rows moved") else "no row was moved"
