"""What policies share that keep the rows with the largest scores: how many stay, what attention showed, and which they are."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kvinterp.common.checks import check_number
from kvinterp.common.spec import name_of
from kvinterp.errors import unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import Place, Policy, running


def check_share(policy: Policy, field: str) -> None:
    """Raises InputError where a field of a policy is no share from 0 up to, and not reaching, 1."""
    name = f"policy {name_of(type(policy))!r}: {field}"
    if not 0 <= check_number(name, getattr(policy, field)) < 1:
        raise unexpected(name, getattr(policy, field), "a share from 0 up to, and not reaching, 1")


def rows_left(rows: int, compression_ratio: float) -> int:
    """How many of so many rows stay, as kvpress counts them: the whole part of ``rows * (1 - compression_ratio)``, at least 1."""
    # 100 * (1 - 0.9) is 9.999999999999998 in float64, and means 10.
    return max(1, int(rows * (1 - compression_ratio) + 1e-9))


@dataclasses.dataclass(frozen=True)
class Scored(Policy, abc.ABC):
    """A policy that lets go of the rows with the smallest scores, in each KV head on its own; of equal scores the newer go.

    A policy that derives from it writes :meth:`room` and :meth:`scores`, and :meth:`heard` where scores rest on attention.
    """

    goes_on: ClassVar[bool] = True
    """Whether it lets go of rows at every step; else once, when the prompt is whole, and every later row stays."""
    _heads: ClassVar[int]
    _held: ClassVar[dict[int, Tensor]]
    """What is remembered of each absolute position, by layer."""

    def start(self, facts: ModelInfo) -> Policy:
        """A twin that remembers what attention showed."""
        return running(self, _heads=facts.kv_heads, _held={})

    @abc.abstractmethod
    def room(self, prompt: int) -> int:
        """Rows that stay in each layer and KV head, of a prompt of so many positions."""

    def rows_stored(self, prompt: int, seen: int) -> int:
        """The room, and where only the prompt is compressed all that came later."""
        room = self.room(prompt)
        return min(seen, room if self.goes_on else room + max(seen - prompt, 0))

    def newest(self, prompt: int) -> int:
        """Rows at the end that stay whatever their scores are."""
        return 0

    def heard(
        self,
        before: Float[Tensor, "batch kv_head row"],
        weights: Float[Tensor, "batch kv_head query row"],
        place: Place,
    ) -> Float[Tensor, "batch kv_head row"]:
        """What is remembered of each row, once a forward was heard.

        Args:
            before: What was remembered before it, 0 of new rows.
            weights: The forward's attention probabilities, averaged over the query heads of each KV head.
            place: Where; its last query is at position ``place.stop - 1``.
        """
        return before

    @abc.abstractmethod
    def scores(
        self, keys: Tensor, values: Tensor, remembered: Float[Tensor, "batch kv_head row"]
    ) -> Float[Tensor, "batch kv_head row"]:
        """The scores of the rows held.

        Args:
            keys: ``[batch, kv_head, row, head_dim]``.
            values: The same of values.
            remembered: What :meth:`heard` gave last; 0 where it was not heard.
        """

    def see(self, site: str, tensor: Tensor, place: Place) -> None:
        """Remembers what the rows' attention says of them."""
        # Blocks may differ in how many KV heads they have (Gemma 4).
        heads = self._heads if place.rows is None else place.rows.shape[1]
        weights = tensor.unflatten(1, (heads, -1)).mean(2, dtype=torch.promote_types(tensor.dtype, torch.float32))
        at = _at(place, weights[:, :, 0])
        before = self._remembered(weights[:, :, 0], place)
        self._held[place.layer].scatter_(2, at, self.heard(before, weights, place))

    def keep(self, keys: Tensor, values: Tensor, place: Place) -> Int[Tensor, "batch kv_head kept"] | None:
        """As many as there is room for, those with the largest scores."""
        prompt, rows = place.prompt or place.stop, keys.shape[2]
        room = self.room(prompt)
        if rows <= room or (place.stop != prompt and not self.goes_on):
            return None
        scores = self.scores(keys, values, self._remembered(keys[..., 0], place))
        scores = scores.masked_fill(torch.arange(rows, device=scores.device) >= rows - self.newest(prompt), torch.inf)
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :room]

    def _remembered(self, like: Tensor, place: Place) -> Tensor:
        """What is remembered of the rows held, and room for those of positions to come."""
        held = self._held.get(place.layer)
        if held is None:
            held = like.new_zeros(*like.shape[:2], 0, dtype=torch.promote_types(like.dtype, torch.float32))
        if held.shape[2] < place.stop:
            # Twice what is needed, so that it is moved a few times in a long decode and not at every step.
            held = self._held[place.layer] = pad(held, (0, 2 * place.stop - held.shape[2]))
        return held.gather(2, _at(place, like))


def _at(place: Place, like: Tensor) -> Tensor:
    return place.positions.to(like.device).expand(*like.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class Budgeted(Scored, abc.ABC):
    """A scored policy whose rows are counted by kvpress's one field.

    Attributes:
        compression_ratio: Share of the prompt's rows that is let go of. kvpress's default 0.0 lets go of none.
    """

    compression_ratio: float = 0.5

    def __post_init__(self) -> None:
        check_share(self, "compression_ratio")

    def room(self, prompt: int) -> int:
        """The rest of the prompt's rows."""
        return rows_left(prompt, self.compression_ratio)
