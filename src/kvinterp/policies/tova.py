"""TOVA: the rows that the newest query attends to most."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from kvinterp.policies.base import Place
from kvinterp.policies.scored import Budgeted


@dataclasses.dataclass(frozen=True)
class Tova(Budgeted):
    """Keeps at every step the rows that the newest query attends to most, averaged over all heads; all heads keep the same rows.

    The newest row itself always stays, as in kvpress; the paper lets it go too, were its own probability the least. kvpress
    lets go of rows once, after the prompt.
    """

    SOURCE: ClassVar[str] = "TOVA (arXiv 2401.06104), the variant with one choice of rows for a layer; kvpress TOVAPress"
    sites = ("pattern",)

    def newest(self, prompt: int) -> int:
        """The row of the query itself."""
        return 1

    def heard(self, before: Tensor, weights: Tensor, place: Place) -> Tensor:
        """What the newest query gave, and nothing of those before it."""
        return weights[:, :, -1].mean(1, keepdim=True).expand_as(before)

    def scores(self, keys: Tensor, values: Tensor, remembered: Tensor) -> Tensor:
        """That of the newest query."""
        return remembered
