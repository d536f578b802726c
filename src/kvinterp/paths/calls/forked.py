"""``forked(64)``: a prefix that another request put into the cache, and went on from, is reused."""

from __future__ import annotations

import dataclasses

import torch

from kvinterp.common.checks import check_whole
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.paths.calls.base import Call, Feeder, Loop

OTHERS = 3
"""Tokens of the other request behind the prefix."""


@dataclasses.dataclass(frozen=True)
class Forked(Call):
    """The prompt on a prefix that another request left in the cache; the rest of that request was cropped.

    Attributes:
        prefix: How many tokens of the prompt are its.
    """

    prefix: int = 4

    def __post_init__(self) -> None:
        check_whole("prefix", self.prefix)

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """The other request's tokens may be more than what is left of the prompt."""
        return 1, max(length, self.prefix + OTHERS), steps

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Refuses a prompt that is no longer than the prefix."""
        if length <= self.prefix:
            shorter = f", or forked({length - 1})" if length > 1 else ""
            raise InputError(
                f"call={self} reuses {self.prefix} tokens of a prompt, and one has {length}: give a longer prompt{shorter}."
            )

    def feed(self, feeder: Feeder) -> Loop:
        """Fills, goes on otherwise, takes that back, goes on."""
        prefix, rest = feeder.prompt[:, : self.prefix], feeder.prompt[:, self.prefix :]
        feeder.start(feeder.prompt, feeder.steps)
        feeder.store.will_crop()
        feeder.pieces(prefix)
        others = (prefix[:, :1] + torch.arange(1, OTHERS + 1, device=prefix.device)) % feeder.adapter.facts.vocabulary
        feeder.view.silent = True
        try:
            for other in others.split(1, 1):
                feeder.forward(other)
        finally:
            feeder.view.silent = False
        feeder.crop(self.prefix)
        feeder.count(
            "cached positions reused", min(feeder.store.length(layer) for layer in range(feeder.adapter.facts.layers))
        )
        logits = feeder.forward(rest)
        while True:
            token = yield logits[:, -1]
            logits = feeder.forward(token[:, None])

    def missing(self, witness: dict[str, int]) -> str:
        """Positions that were reused."""
        return "" if witness.get("cached positions reused", 0) >= self.prefix else "no cached position was reused"
