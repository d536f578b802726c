"""``padded(left,5)``: pads beside the prompt, masked, and positions that do not count them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_choice, check_whole
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.calls.base import Call, Feeder, Loop, Masking, check_masks


@dataclasses.dataclass(frozen=True)
class Padded(Call):
    """The prompt with pad tokens, as in a batch of unequal prompts; the pads are masked and get no position.

    Attributes:
        side: ``"left"``, as ``generate()`` pads; ``"right"``, between the prompt and what is decoded.
        pads: How many.
    """

    forms: ClassVar = ("cached", "recompute")
    policies: ClassVar = True

    side: str = "left"
    pads: int = 5

    def __post_init__(self) -> None:
        check_choice("side", self.side, ("left", "right"))
        check_whole("pads", self.pads)

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """The pads take positions."""
        return 1, length + self.pads, steps

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Refuses a model that takes no mask, and more pads than a prompt beside this one could be longer."""
        check_masks(adapter, str(self))
        check_whole("pads", self.pads, most=adapter.facts.context, hint=f", the positions of {adapter.facts.name}")
        window = min((each for each in adapter.facts.windows if each is not None), default=None)
        if self.side == "right" and window is not None and window < length + self.pads + steps:
            raise UnsupportedError(
                f"call={self} puts pads between tokens, and {adapter.facts.name} has a window of {window} rows, in which they "
                f"would count over {length + self.pads + steps}: give padded(left,{self.pads}), or fewer tokens."
            )

    def feed(self, feeder: Feeder) -> Loop:
        """Feeds pads and prompt together, then a token a step."""
        prompt = feeder.prompt
        while True:
            tokens, own = self._padded(prompt, feeder.adapter.facts.vocabulary)
            feeder.start(tokens, feeder.steps, Masking.counting(own[None].to(tokens)))
            logits = feeder.pieces(tokens, own)[:, int(own.nonzero()[-1])]
            feeder.witness |= {"pads masked": self.pads}
            while feeder.form == "cached":
                token = yield logits
                logits = feeder.forward(token[:, None])[:, -1]
                feeder.witness["last position given"] = feeder.length - self.pads - 1
            token = yield logits
            prompt = torch.cat([prompt, token[:, None]], 1)

    def _padded(self, prompt: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        # Another token than the first: a pad that is read in its place would be the same there.
        pads, ones = (prompt[:, :1] + 1) % vocabulary, torch.ones(prompt.shape[1], dtype=torch.bool)
        pads = pads.expand(1, self.pads)
        none = torch.zeros(self.pads, dtype=torch.bool)
        if self.side == "left":
            return torch.cat([pads, prompt], 1), torch.cat([none, ones])
        return torch.cat([prompt, pads], 1), torch.cat([ones, none])
