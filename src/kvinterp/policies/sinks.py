"""Attention sinks and a window: the first rows and the newest stay, whatever is in between."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.policies.base import CacheRows, Policy


@dataclasses.dataclass(frozen=True)
class Sinks(Policy):
    """Keeps the first and the newest positions at every step; ``sinks=0`` is a window alone.

    StreamingLLM also renumbers the rows that are left, 0, 1, 2, ..., and rotates their keys by
    these numbers. This policy does
    not: every key stays rotated by the position of its token, as with kvpress's StreamingLLMPress
    without KeyRerotationPress. So texts longer than the model's context remain impossible.

    Attributes:
        sinks: The first rows, kvpress's ``n_sink``.
        window: The newest rows.
    """

    SOURCE: ClassVar[str] = (
        "StreamingLLM (arXiv 2309.17453), 4 and 1020 rows; it also renumbers positions, this does not"
    )

    sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        check_whole("policy 'sinks': sinks", self.sinks, 0)
        check_whole("policy 'sinks': window", self.window)

    def keep(
        self, keys: Tensor, values: Tensor, cache_rows: CacheRows
    ) -> Int[Tensor, " kept"] | None:
        """The first rows and the last."""
        count = keys.shape[2]
        if count <= self.sinks + self.window:
            return None
        rows = torch.arange(count, device=keys.device)
        return torch.cat([rows[: self.sinks], rows[count - self.window :]])
