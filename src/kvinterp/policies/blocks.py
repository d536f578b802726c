"""Shared by quantising policies: the check of blocks, affine integers, and rows that are rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import zoo
from kvinterp.policies.base import CacheRows


def check_blocks(policy: object, block: int, width: int, name: str) -> None:
    """Raises UnsupportedError if ``width``, a model's ``head_dim``, is no multiple of a policy's
    block.
    """
    if width % block:
        fitting = [
            f"zoo:{record['name']}" for record in zoo.describe() if record["head_dim"] % block == 0
        ]
        such = f", such as {fitting[0]}" if fitting else ""
        raise UnsupportedError(
            f"policy {policy} works on blocks of {block} along head_dim, and {name} has head_dim {width}: load a model whose "
            f"head_dim is a multiple of {block}{such}."
        )


def cut(tensor: Tensor, block: int, policy: object) -> Tensor:
    """The blocks of a tensor along its last dimension, ``[..., blocks, block]``; see
    :func:`check_blocks`.
    """
    check_blocks(policy, block, tensor.shape[-1], "what it was given")
    return tensor.unflatten(-1, (-1, block))


def affine(groups: Tensor, bits: int) -> Tensor:
    """Rounds groups to asymmetric integers: ``scale = (max - min) / (2**bits - 1)``,
    ``x = min + scale * code``.

    A group whose elements are all equal has scale 0 and does not change. Everything is computed in
    the tensor's own dtype, in which the scale and the minimum are stored: KIVI (arXiv 2402.02750,
    section 3.1), and optimum-quanto's ``MaxOptimizer``.

    Args:
        groups: ``[..., group]``.
        bits: Bits of a code.
    """
    levels = 2**bits - 1
    least = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - least) / levels
    codes = ((groups - least) / scale.masked_fill(scale == 0, 1)).round().clamp(0, levels)
    return codes * scale + least


class Settled:
    """The rows that attention reads of one tensor of one layer: older rows rounded once each, newer
    rows exact.

    So a step rounds only the rows that became old, however long the history.
    """

    def __init__(self) -> None:
        self._read: Tensor | None = None
        self._start = self._stop = 0

    def read(
        self,
        cached: Tensor,
        cache_rows: CacheRows,
        upto: int,
        rounded: Callable[[Tensor, int], Tensor],
    ) -> Tensor:
        """Returns the rows that attention reads now.

        Args:
            cached: ``[batch, kv_head, row, head_dim]``, a row for each position from
                ``cache_rows.start`` to ``cache_rows.stop``.
            cache_rows: The layer and positions.
            upto: Positions below it are rounded; never less than at the call before.
            rounded: Rounds rows, given these and the position of the first.
        """
        if upto <= cache_rows.start:
            return cached
        first, parts = max(self._stop, cache_rows.start), []
        if self._read is not None:
            parts.append(self._read[:, :, cache_rows.start - self._start : first - self._start])
        if upto > first:
            parts.append(
                rounded(cached[:, :, first - cache_rows.start : upto - cache_rows.start], first)
            )
        self._read = torch.cat([*parts, cached[:, :, upto - cache_rows.start :]], 2)
        self._start, self._stop = cache_rows.start, upto
        return self._read


class Memory(dict[tuple[int, str], Settled]):
    """The rounded rows of each layer's keys and values in one pass."""

    def at(self, cache_rows: CacheRows, which: str) -> Settled:
        """The rows of a layer and tensor; empty if another policy may have changed the rows since
        the last read.
        """
        return (
            Settled()
            if cache_rows.remade
            else self.setdefault((cache_rows.layer, which), Settled())
        )
