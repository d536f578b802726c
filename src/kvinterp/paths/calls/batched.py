"""``batched(8)``: the prompt among others of other lengths, some of which leave and join while it is decoded."""

from __future__ import annotations

import dataclasses

import torch

from kvinterp.common.checks import check_whole
from kvinterp.paths.calls.base import NOTHING, Call, Feeder, Loop, Masking

EVERY = 2
"""Steps from one leaving to the next joining."""


@dataclasses.dataclass(frozen=True)
class Batched(Call):
    """The prompt among others in a batch.

    They are its own tokens, turned and shorter: padded on the left, where a model takes a mask; else as long. A neighbour leaves,
    and another joins with a cache of its own, every second step in turn where the cache can do that.

    Attributes:
        rows: Rows of the batch, the prompt's among them.
    """

    rows: int = 8

    def __post_init__(self) -> None:
        check_whole("rows", self.rows, 2, 1_000, ", the prompt's among them")

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """As many rows."""
        return self.rows, length, steps

    def feed(self, feeder: Feeder) -> Loop:
        """Feeds all rows together; of the others other tokens."""
        view, prompt = feeder.view, feeder.prompt
        length, masks = prompt.shape[1], feeder.adapter.takes_mask
        view.row = self.rows // 2
        pads = [(abs(row - view.row) % length) * masks for row in range(self.rows)]
        tokens = torch.cat([prompt.roll(row - view.row, 1) for row in range(self.rows)])
        mask = torch.stack([torch.arange(length) >= pad for pad in pads]).to(tokens)
        feeder.start(tokens, feeder.steps, Masking.counting(mask) if any(pads) else NOTHING)
        logits, rows = feeder.pieces(tokens), self.rows
        feeder.witness |= {"rows": self.rows, "pads masked": sum(pads)}
        for step in range(feeder.steps + 1):
            token = yield logits[view.row : view.row + 1, -1]
            if step % (2 * EVERY) == EVERY - 1 and rows > 2 and feeder.store.can_select:
                # One before the prompt's, whose own place changes then.
                keep = torch.tensor([row for row in range(rows) if row != (view.row - 1) % rows])
                feeder.select(keep.to(tokens.device))
                rows, view.row = rows - 1, int((keep == view.row).nonzero())
                feeder.count("neighbours that left")
            elif step % (2 * EVERY) == 2 * EVERY - 1 and feeder.store.can_select:
                self._join(feeder)
                rows += 1
            new = (token + torch.arange(rows, device=token.device) - view.row) % feeder.adapter.facts.vocabulary
            logits = feeder.forward(new[:, None])

    def _join(self, feeder: Feeder) -> None:
        """Another request joins: its own prefill of as many tokens as there are positions, put under the others."""
        total = feeder.length
        tokens = feeder.prompt.repeat(1, total // feeder.prompt.shape[1] + 1)[:, :total].roll(1, 1)
        store = feeder.aside(tokens, 1)
        feeder.view.silent = True
        try:
            feeder.adapter.forward(tokens, store)
        finally:
            feeder.view.silent = False
        feeder.store.join(store)
        mask = feeder.masking.of(0, total).mask
        if mask is not None:
            feeder.masking = Masking.counting(torch.cat([mask, mask.new_ones(1, total)]))
        feeder.count("neighbours that joined")

    def missing(self, witness: dict[str, int]) -> str:
        """Rows beside the prompt's."""
        return "" if witness.get("rows", 0) > 1 else "no neighbour was in the batch"
