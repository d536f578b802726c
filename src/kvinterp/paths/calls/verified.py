"""``verified(4)``: drafted tokens are fed beside the newest, checked, kept or taken back, as in speculative decoding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.paths.calls.base import Call, Feeder, Loop


@dataclasses.dataclass(frozen=True)
class Verified(Call):
    """Each decoding forward carries drafted tokens after the newest one; right drafts stay, the others are cropped.

    The drafts are what followed the newest token where it stood before in the text; else its neighbours in the vocabulary.

    Attributes:
        drafts: How many.
    """

    drafts: int = 3

    def __post_init__(self) -> None:
        check_whole("drafts", self.drafts)

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """The drafts take positions behind the last token."""
        return 1, length, steps + self.drafts

    def feed(self, feeder: Feeder) -> Loop:
        """Feeds a token with its drafts, keeps those that are right, takes the others back, goes on."""
        text, context = feeder.prompt, feeder.adapter.facts.context
        feeder.start(text, feeder.steps + self.drafts)
        feeder.store.will_crop()
        token = yield feeder.pieces(text)[:, -1]
        while True:
            text = torch.cat([text, token[:, None]], 1)
            drafts = self._drafted(text, feeder.adapter.facts.vocabulary)[:, : max(context - text.shape[1], 0)]
            logits = feeder.forward(torch.cat([token[:, None], drafts], 1), shown=1)
            *right, token = yield from feeder.checked(logits, drafts)
            text = torch.cat([text, *(each[:, None] for each in right)], 1)
            feeder.crop(text.shape[1])

    def _drafted(self, text: Tensor, vocabulary: int) -> Tensor:
        newest = int(text[0, -1])
        before = (text[0, :-1] == newest).nonzero().flatten()
        found = text[:, int(before[-1]) + 1 :][:, : self.drafts] if len(before) else text[:, :0]
        more = torch.arange(1, self.drafts - found.shape[1] + 1, device=text.device)[None]
        return torch.cat([found, (newest + more) % vocabulary], 1)

    def missing(self, witness: dict[str, int]) -> str:
        """Drafts that were taken back."""
        return "" if witness.get("drafts rejected") else "no draft was taken back"
