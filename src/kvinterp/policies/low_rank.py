"""Low rank: the prompt's keys and values, reduced to a few singular vectors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, Selective, positions_of, running


@dataclasses.dataclass(frozen=True)
class LowRank(Selective):
    """Replaces the prompt's K and V by their truncated singular value decomposition (tokens by
    heads times head_dim).

    The layers of a group lie side by side in one matrix, ``[token, layer x head x head_dim]``, so
    that they share the factor that has a row a token. K and V are apart. The answer's rows stay as
    they are.

    Attributes:
        rank: Singular values kept of each group; a matrix of no larger rank is read back to
            rounding.
        group: How many of the layers that follow one another share a decomposition.
    """

    SOURCE: ClassVar[str] = "xKV (arXiv 2503.18893), which takes keys before RoPE: give keys=before"
    depends_on = ("prompt",)

    rank: int = 64
    group: int = 1
    _every: ClassVar[list[int]]
    _prompt: ClassVar[dict[tuple[str, int], list[Tensor]]]
    _truncated: ClassVar[dict[tuple[str, int], Tensor]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("policy 'low_rank': rank", self.rank)
        check_whole("policy 'low_rank': group", self.group)

    def start(self, facts: ModelInfo) -> Policy:
        """A copy that keeps the prompt's rows until the prompt is whole, and then their truncated
        form.
        """
        super().start(facts)
        layers = self.layers or tuple(range(facts.layers))
        if len(layers) % self.group:
            raise InputError(
                f"policy {self} groups {len(layers)} layers by {self.group}: expected a divisor of {len(layers)}."
            )
        return running(self, _every=sorted(layers), _prompt={}, _truncated={})

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Keeps the rows of the prompt."""
        if cache_rows.start < (cache_rows.prompt or 1):
            self._prompt.setdefault((which, cache_rows.layer), []).append(tensor)
        return tensor

    def read_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Replaces the prompt's rows by those of the decomposition; in a stored prefill, of the
        rows there are by then.
        """
        pieces = self._prompt.get((which, cache_rows.layer), [])
        if pieces and sum(piece.shape[2] for piece in pieces) == cache_rows.stop:
            if self.group > 1:
                raise UnsupportedError(
                    f"policy {self} needs K and V of {self.group} layers at once, and with prefill=stored or "
                    "without a cache a layer is read before the next is computed: leave it out, or give group=1."
                )
            low = truncated([torch.cat(pieces, 2)], self.rank)[0]
        else:
            low = self._prompt_rows(which, cache_rows.layer)
        at = positions_of(cache_rows, tensor)
        if cache_rows.positions_left is None:
            return torch.cat(
                [
                    low[:, :, cache_rows.start :],
                    tensor[:, :, max(low.shape[2] - cache_rows.start, 0) :],
                ],
                2,
            )
        rows = low.gather(2, at.clamp(max=low.shape[2] - 1)[..., None].expand_as(tensor))
        return torch.where((at < low.shape[2])[..., None], rows, tensor)

    def _prompt_rows(self, which: str, layer: int) -> Tensor:
        """A layer's rows of the decomposition, which is computed for the whole group on first
        use.
        """
        if (which, layer) not in self._truncated:
            first = self._every.index(layer) // self.group * self.group
            group = self._every[first : first + self.group]
            pieces = [torch.cat(self._prompt.pop((which, member)), 2) for member in group]
            self._truncated.update(
                zip(
                    [(which, member) for member in group], truncated(pieces, self.rank), strict=True
                )
            )
        return self._truncated[which, layer]


def truncated(layers: list[Tensor], rank: int) -> list[Tensor]:
    """Reduces the matrices of some layers, side by side, to their largest singular values.

    Args:
        layers: Keys or values, ``[batch, kv_head, token, head_dim]``, of as many tokens each.
        rank: How many singular values are kept.
    """
    dtype = layers[0].dtype
    # LAPACK has no 16-bit types. Only the product matters: the signs of the factors are arbitrary.
    wide = [
        rearrange(
            layer.to(torch.promote_types(dtype, torch.float32)),
            "batch head token dim -> batch token (head dim)",
        )
        for layer in layers
    ]
    left, values, right = torch.linalg.svd(torch.cat(wide, 2), full_matrices=False)
    product = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]
    parts = zip(product.split([layer.shape[2] for layer in wide], 2), layers, strict=True)
    return [
        rearrange(part, "batch token (head dim) -> batch head token dim", head=layer.shape[1]).to(
            dtype
        )
        for part, layer in parts
    ]
