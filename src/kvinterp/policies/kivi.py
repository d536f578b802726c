"""``kivi``: keys per channel in groups of tokens, values per token, and the newest tokens exact."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor

from kvinterp.common.checks import check_whole
from kvinterp.errors import UnsupportedError, unexpected
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import TENSORS, CacheRows, Policy, Selective, running
from kvinterp.policies.blocks import Memory, Settled, affine, check_blocks, cut


@dataclasses.dataclass(frozen=True)
class Kivi(Selective):
    """Integers, quantised per channel for K and per token for V; a window of the newest rows stays
    exact.

    Keys leave when the window has filled, all of it at once, after the step that filled it has read
    them; values leave one by one, once the window is over-full. So what attention reads at a step
    follows from its position alone, whatever the prompt's length and chunks were. The cache here
    keeps all rows as they were computed: a row is rounded when it leaves.

    Attributes:
        bits: Of a code: 2, 4 or 8.
        group: Tokens (K) or elements along ``head_dim`` (V) that share a scale and a minimum.
        residual: Tokens of the window.
    """

    SOURCE: ClassVar[str] = "KIVI (arXiv 2402.02750), algorithm 1, and its code's llama_kivi.py"

    bits: int = 4
    group: int = 32
    residual: int = 128
    _memory: ClassVar[Memory | None] = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.bits not in (2, 4, 8) or isinstance(self.bits, float):
            raise unexpected("policy 'kivi': bits", self.bits, "2, 4 or 8, as in kivi(2,32,128)")
        group = check_whole("policy 'kivi': group", self.group)
        if check_whole("policy 'kivi': residual", self.residual) % group:
            raise unexpected(
                "policy 'kivi': residual",
                self.residual,
                f"a multiple of group={group}, as in kivi(2,32,128)",
            )
        super().__post_init__()

    def element_bits(self, width: int) -> float:
        """The codes and, for each group, a scale and a minimum of 16 bits; without the window,
        which does not grow.
        """
        return self.bits + 32 / self.group

    def exact_rows(self, tensor: str, context: int) -> int:
        """The window: what :meth:`read_rows` has not rounded when the newest row is read."""
        before = max(context - 1, 0)
        return context - (
            before - before % self.residual if tensor == "k" else max(before - self.residual, 0)
        )

    def start(self, facts: ModelInfo) -> Policy:
        """A copy that remembers the rows it rounded."""
        if "v" in TENSORS[self.on]:
            check_blocks(self, self.group, facts.head_dim, facts.name)
        super().start(facts)
        return running(self, _memory=Memory())

    def read_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """Rounds the rows that have left the window, each once in a pass.

        Raises:
            UnsupportedError: Rows are missing, so that groups of neighbouring tokens are not there.
        """
        if cache_rows.positions_left is not None:
            raise UnsupportedError(
                "policy kivi rounds neighbouring tokens together, and another policy of this path lets go of rows: leave one out."
            )
        settled, before = (
            Settled() if self._memory is None else self._memory.at(cache_rows, which),
            cache_rows.stop - 1,
        )
        if which == "k":
            return settled.read(
                tensor, cache_rows, before - before % self.residual, self.per_channel
            )
        return settled.read(tensor, cache_rows, max(before - self.residual, 0), self.per_token)

    def per_channel(self, rows: Tensor, first: int) -> Tensor:
        """Rounds keys; groups of tokens begin at multiples of the group."""
        # A group that slid partly out of a window is filled with its first row, which changes
        # neither minimum nor maximum.
        gone = first % self.group
        whole = torch.cat([rows[:, :, :1].expand(-1, -1, gone, -1), rows], 2)
        groups = rearrange(
            whole, "batch head (group token) dim -> batch head dim group token", token=self.group
        )
        rounded = affine(groups, self.bits)
        return rearrange(rounded, "batch head dim group token -> batch head (group token) dim")[
            :, :, gone:
        ]

    def per_token(self, rows: Tensor, first: int) -> Tensor:
        """Rounds values; each group is of one token."""
        return affine(cut(rows, self.group, self), self.bits).flatten(-2)
