"""What the quantising policies share: blocks that must fit, affine integers, and rows that are made what they stay once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import zoo
from kvinterp.policies.base import Place


def check_blocks(policy: object, block: int, width: int, name: str) -> None:
    """Raises UnsupportedError where ``width``, a model's ``head_dim``, is no multiple of a policy's block along it."""
    if width % block:
        fitting = [f"zoo:{record['name']}" for record in zoo.describe() if record["head_dim"] % block == 0]
        such = f", such as {fitting[0]}" if fitting else ""
        raise UnsupportedError(
            f"policy {policy} works on blocks of {block} along head_dim, and {name} has head_dim {width}: load a model whose "
            f"head_dim is a multiple of {block}{such}."
        )


def cut(tensor: Tensor, block: int, policy: object) -> Tensor:
    """The blocks of a tensor along its last dimension, ``[..., blocks, block]``; see :func:`check_blocks`."""
    check_blocks(policy, block, tensor.shape[-1], "what it was given")
    return tensor.unflatten(-1, (-1, block))


def affine(groups: Tensor, bits: int) -> Tensor:
    """Groups as asymmetric integers hold them: ``scale = (max - min) / (2**bits - 1)``, ``x = min + scale * code``.

    A group whose elements are all equal has scale 0 and stays what it is. All is computed in the tensor's own dtype, in which
    the scale and the minimum are stored: KIVI (arXiv 2402.02750, section 3.1), and optimum-quanto's ``MaxOptimizer``.

    Args:
        groups: ``[..., group]``.
        bits: Of a code.
    """
    levels = 2**bits - 1
    least = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - least) / levels
    codes = ((groups - least) / scale.masked_fill(scale == 0, 1)).round().clamp(0, levels)
    return codes * scale + least


class Settled:
    """What attention reads of one tensor of one layer: older rows as they were made, once each; newer ones as they are held.

    So a step makes only the rows whose turn has come, however long the history.
    """

    def __init__(self) -> None:
        self._read: Tensor | None = None
        self._start = self._stop = 0

    def read(self, held: Tensor, place: Place, upto: int, make: Callable[[Tensor, int], Tensor]) -> Tensor:
        """What is read now.

        Args:
            held: ``[batch, kv_head, row, head_dim]``, a row for each position from ``place.start`` to ``place.stop``.
            place: Where.
            upto: Positions below it are settled; never less than at the call before.
            make: Gives what stays of rows, of these and the position of the first.
        """
        if upto <= place.start:
            return held
        first, parts = max(self._stop, place.start), []
        if self._read is not None:
            parts.append(self._read[:, :, place.start - self._start : first - self._start])
        if upto > first:
            parts.append(make(held[:, :, first - place.start : upto - place.start], first))
        self._read = torch.cat([*parts, held[:, :, upto - place.start :]], 2)
        self._start, self._stop = place.start, upto
        return self._read


class Memory(dict[tuple[int, str], Settled]):
    """What was settled of each layer's keys and values in one pass."""

    def at(self, place: Place, which: str) -> Settled:
        """That of a place where no row was let go of; a new one where rows may not be those of the read before."""
        return Settled() if place.remade else self.setdefault((place.layer, which), Settled())
