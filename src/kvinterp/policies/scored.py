"""The base of policies that keep the rows with the largest scores."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kvinterp.common.checks import check_number
from kvinterp.common.spec import name_of
from kvinterp.errors import unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, positions_of, running


def check_share(policy: Policy, field: str) -> None:
    """Raises InputError if a field of a policy is no share from 0 up to, and not reaching, 1."""
    name = f"policy {name_of(type(policy))!r}: {field}"
    if not 0 <= check_number(name, getattr(policy, field)) < 1:
        raise unexpected(name, getattr(policy, field), "a share from 0 up to, and not reaching, 1")


@dataclasses.dataclass(frozen=True)
class Scored(Policy, abc.ABC):
    """A policy that evicts the rows with the smallest scores, in each KV head on its own; of equal
    scores the newer rows.

    A subclass defines :meth:`budget` and :meth:`scores`, and :meth:`accumulate` if scores rest on
    attention.
    """

    goes_on: ClassVar[bool] = True
    """Whether it evicts rows at every step; else once, when the prompt is whole, and every later
    row stays.
    """
    _heads: ClassVar[int]
    _totals: ClassVar[dict[int, Tensor]]
    """By layer the total of :meth:`accumulate` for each absolute position."""

    def start(self, facts: ModelInfo) -> Policy:
        """A copy that accumulates attention."""
        return running(self, _heads=facts.kv_heads, _totals={})

    @abc.abstractmethod
    def budget(self, prompt: int) -> int:
        """How many rows stay in each layer and KV head, for a prompt of this length."""

    def newest(self, prompt: int) -> int:
        """How many of the newest rows stay whatever their scores are."""
        return 0

    def accumulate(
        self,
        totals: Float[Tensor, "batch kv_head row"],
        weights: Float[Tensor, "batch kv_head query row"],
        cache_rows: CacheRows,
    ) -> Float[Tensor, "batch kv_head row"]:
        """Updates the total of each row after a forward.

        Args:
            totals: The totals before it; 0 for new rows.
            weights: The forward's attention probabilities, averaged over the query heads of each KV
                head.
            cache_rows: The layer and positions; the last query is at position ``cache_rows.stop - 1``.
        """
        return totals

    @abc.abstractmethod
    def scores(
        self, keys: Tensor, values: Tensor, totals: Float[Tensor, "batch kv_head row"]
    ) -> Float[Tensor, "batch kv_head row"]:
        """The scores of the rows in the cache.

        Args:
            keys: ``[batch, kv_head, row, head_dim]``.
            values: The values, in the same shape.
            totals: The totals of :meth:`accumulate`; 0 if it was not called.
        """

    def see(self, site: str, tensor: Tensor, cache_rows: CacheRows) -> None:
        """Accumulates the attention that the rows received."""
        # Blocks may differ in how many KV heads they have (Gemma 4).
        heads = (
            self._heads if cache_rows.positions_left is None else cache_rows.positions_left.shape[1]
        )
        groups = rearrange(
            tensor,
            "batch (kv_head group) query key -> batch kv_head group query key",
            kv_head=heads,
        )
        weights = groups.mean(2, dtype=torch.promote_types(tensor.dtype, torch.float32))
        totals = self._totals_of(weights[:, :, 0], cache_rows)
        at = positions_of(cache_rows, weights[:, :, 0])
        self._totals[cache_rows.layer].scatter_(2, at, self.accumulate(totals, weights, cache_rows))

    def keep(
        self, keys: Tensor, values: Tensor, cache_rows: CacheRows
    ) -> Int[Tensor, "batch kv_head kept"] | None:
        """The rows with the largest scores, as many as there is room for."""
        prompt, rows = cache_rows.prompt or cache_rows.stop, keys.shape[2]
        budget = self.budget(prompt)
        if rows <= budget or (cache_rows.stop != prompt and not self.goes_on):
            return None
        scores = self.scores(keys, values, self._totals_of(keys[..., 0], cache_rows))
        scores = scores.masked_fill(
            torch.arange(rows, device=scores.device) >= rows - self.newest(prompt), torch.inf
        )
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]

    def _totals_of(self, like: Tensor, cache_rows: CacheRows) -> Tensor:
        """The totals of the rows in the cache; makes room for the positions to come."""
        totals = self._totals.get(cache_rows.layer)
        if totals is None:
            totals = like.new_zeros(
                *like.shape[:2], 0, dtype=torch.promote_types(like.dtype, torch.float32)
            )
        if totals.shape[2] < cache_rows.stop:
            # Twice what is needed, so that a long decode moves it a few times and not at every
            # step.
            totals = self._totals[cache_rows.layer] = pad(
                totals, (0, 2 * cache_rows.stop - totals.shape[2])
            )
        return totals.gather(2, positions_of(cache_rows, like))


@dataclasses.dataclass(frozen=True)
class Budgeted(Scored, abc.ABC):
    """A scored policy with kvpress's field for the number of rows.

    Attributes:
        compression_ratio: Share of the prompt's rows that is evicted. kvpress's default is 0.0.
    """

    compression_ratio: float = 0.5

    def __post_init__(self) -> None:
        check_share(self, "compression_ratio")

    def budget(self, prompt: int) -> int:
        """The rows of the prompt that are not evicted, as kvpress counts them: the whole part, at
        least 1.
        """
        # 100 * (1 - 0.9) is 9.999999999999998 in float64, and means 10.
        return max(1, int(prompt * (1 - self.compression_ratio) + 1e-9))
