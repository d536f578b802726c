"""Low rank: of the prompt's keys and values what a few singular vectors hold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import Place, Policy, Selective, running


@dataclasses.dataclass(frozen=True)
class LowRank(Selective):
    """Replaces the prompt's K and V by their truncated singular value decomposition (tokens by heads times head_dim).

    The layers of a group lie side by side in one matrix, ``[token, layer x head x head_dim]``, so that they share the factor
    that has a row a token. K and V are apart. The answer's rows stay as they are.

    Attributes:
        rank: Singular values kept of each group; a matrix of no larger rank is read back to rounding.
        group: How many of the layers that follow one another share a decomposition.
    """

    SOURCE: ClassVar[str] = "xKV (arXiv 2503.18893), which takes keys before RoPE: give keys=before"
    depends_on = ("prompt",)

    rank: int = 64
    group: int = 1
    _every: ClassVar[list[int]]
    _given: ClassVar[dict[tuple[str, int], list[Tensor]]]
    _made: ClassVar[dict[tuple[str, int], Tensor]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("policy 'low_rank': rank", self.rank)
        check_whole("policy 'low_rank': group", self.group)

    def start(self, facts: ModelInfo) -> Policy:
        """A twin that holds the prompt until it is whole, and then what is read of it."""
        super().start(facts)
        layers = self.layers or tuple(range(facts.layers))
        if len(layers) % self.group:
            raise InputError(
                f"policy {self} groups {len(layers)} layers by {self.group}: expected a divisor of {len(layers)}."
            )
        return running(self, _every=sorted(layers), _given={}, _made={})

    def written(self, tensor: Tensor, which: str, place: Place) -> Tensor:
        """Holds the rows of the prompt."""
        if place.start < (place.prompt or 1):
            self._given.setdefault((which, place.layer), []).append(tensor)
        return tensor

    def seen(self, tensor: Tensor, which: str, place: Place) -> Tensor:
        """The decomposition's rows in place of the prompt's; in a stored prefill of the rows there are by then."""
        pieces = self._given.get((which, place.layer), [])
        if pieces and sum(piece.shape[2] for piece in pieces) == place.stop:
            if self.group > 1:
                raise UnsupportedError(
                    f"policy {self} needs K and V of {self.group} layers at once, and with prefill=stored or "
                    "without a cache a layer is read before the next is computed: leave it out, or give group=1."
                )
            low = truncated([torch.cat(pieces, 2)], self.rank)[0]
        else:
            low = self._of_prompt(which, place.layer)
        at = place.positions.to(tensor.device).expand(tensor.shape[:3])
        if place.rows is None:
            return torch.cat([low[:, :, place.start :], tensor[:, :, max(low.shape[2] - place.start, 0) :]], 2)
        rows = low.gather(2, at.clamp(max=low.shape[2] - 1)[..., None].expand_as(tensor))
        return torch.where((at < low.shape[2])[..., None], rows, tensor)

    def _of_prompt(self, which: str, layer: int) -> Tensor:
        """What is read of a layer's prompt, decomposed with its group's when it is first asked for."""
        if (which, layer) not in self._made:
            first = self._every.index(layer) // self.group * self.group
            group = self._every[first : first + self.group]
            pieces = [torch.cat(self._given.pop((which, each)), 2) for each in group]
            self._made.update(zip([(which, each) for each in group], truncated(pieces, self.rank), strict=True))
        return self._made[which, layer]


def truncated(layers: list[Tensor], rank: int) -> list[Tensor]:
    """The matrices of some layers, decomposed side by side and put together again of the largest singular values.

    Args:
        layers: Keys or values, ``[batch, kv_head, token, head_dim]``, of as many tokens each.
        rank: How many singular values are kept.
    """
    dtype = layers[0].dtype
    # LAPACK has no 16 bits. The product is compared and never the factors, whose signs are anyone's.
    wide = [layer.transpose(1, 2).to(torch.promote_types(dtype, torch.float32)) for layer in layers]
    left, values, right = torch.linalg.svd(torch.cat([layer.flatten(2) for layer in wide], 2), full_matrices=False)
    product = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]
    parts = product.split([layer[0, 0].numel() for layer in wide], 2)
    return [part.unflatten(2, layer.shape[2:]).transpose(1, 2).to(dtype) for part, layer in zip(parts, wide, strict=True)]
