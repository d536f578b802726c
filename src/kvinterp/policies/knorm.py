"""Knorm: the rows with the shortest keys, which tend to be attended to most."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from kvinterp.policies.scored import Budgeted


@dataclasses.dataclass(frozen=True)
class Knorm(Budgeted):
    """Keeps, in each KV head, the prompt rows with the shortest keys; chosen once, and every row of
    the answer stays.

    RoPE turns a key and keeps its length, so that it does not matter on which side of it a model
    caches keys.
    """

    SOURCE: ClassVar[str] = "Devoto et al. (arXiv 2406.11430); kvpress KnormPress"
    goes_on = False

    def scores(self, keys: Tensor, values: Tensor, totals: Tensor) -> Tensor:
        """Minus the length of each key."""
        return -keys.norm(dim=-1)
