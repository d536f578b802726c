"""Keeps what the newest query attended to on both paths, at a few steps of each example.

All rows of a comparison would be as large as its model's patterns. Kept are those a reader asks
about: at the step of an example's first flip and at its steps of largest KL on the same text. The
choice depends only on the example's own numbers, so that a resumed run keeps the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.comparison.table import Table

STEPS = 3
"""Most steps of an example whose rows are kept."""
OF_EXAMPLE, OF_ALL = 2**15, 2**19
"""Most probabilities kept per path of one example, and of all examples: half a megabyte, and
eight.
"""
WAITING = 2**22
"""Most numbers of both paths that wait for their KL on a CPU; other devices take 32 times as
many.
"""
DIMENSIONS, VALUES = ("example", "step", "layer", "head", "position"), ("a", "b")
COLUMNS = (*DIMENSIONS, *VALUES, "after_flip")


@dataclasses.dataclass(frozen=True)
class _StepRows:
    """The rows of one step: both paths' ``[layer, batch, head, key]``, keys aligned at the
    newest.
    """

    layers: Sequence[int]
    heads: Sequence[int]
    end: int
    pair: tuple[Tensor, Tensor]


class AttentionRows:
    """Takes the rows of every step and, once the KL of the steps is known, drops those that are not
    kept.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _StepRows] = {}
        self._numbers = 0
        self._undecided: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._best: dict[int, list[tuple[float, int]]] = {}

    @property
    def full(self) -> bool:
        """Whether so many rows wait that the KL of their steps should be measured now."""
        first = next(iter(self._rows.values()), None)
        return first is not None and self._numbers > WAITING * (
            1 if first.pair[0].device.type == "cpu" else 32
        )

    def add(
        self, step: int, layers: Sequence[int], heads: Sequence[int], end: int, pair: tuple[Tensor, Tensor], marks: Tensor,
        flips: Tensor | None,
    ) -> None:  # fmt: skip
        """Takes the rows of one step.

        Args:
            step: The step.
            layers: The layers.
            heads: The heads' labels.
            end: How many positions there are.
            pair: Both paths' ``[layer, batch, head, key]``; kept without a copy.
            marks: For each row of the batch 1 after its flip, 0 before it, -1 where its text has
                ended.
            flips: Which rows flip their first token at this step; None where it is not known.
        """
        self._rows[step], self._undecided[step] = (
            _StepRows(layers, heads, end, pair),
            (marks, flips),
        )
        self._numbers += 2 * pair[0].numel()

    def select(self, steps: Sequence[int], kl: Tensor, same_text: bool) -> None:
        """Chooses the steps whose rows are kept, by their KL.

        Args:
            steps: The steps.
            kl: Their KL, ``[step, batch]``.
            same_text: Whether both paths hold the same text after a flip too.
        """
        ranks = []
        for index, step in enumerate(steps):
            if step not in self._undecided:
                return
            marks, flips = self._undecided.pop(step)
            out = marks < 0 if same_text else marks != 0
            rank = kl[index].nan_to_num(nan=-1.0).masked_fill(out, -1.0)
            ranks.append(
                rank if flips is None else rank.masked_fill(flips & (marks >= 0), torch.inf)
            )
        for row, of_row in enumerate(torch.stack(ranks, -1).tolist()):
            ranked = [(-rank, step) for rank, step in zip(of_row, steps, strict=True) if rank >= 0]
            self._best[row] = sorted([*self._best.get(row, ()), *ranked])[:STEPS]
        best_steps = {step for best in self._best.values() for _, step in best}
        self._rows = {
            step: rows
            for step, rows in self._rows.items()
            if step in best_steps or step in self._undecided
        }
        self._numbers = sum(2 * self._rows[step].pair[0].numel() for step in self._undecided)

    def frame(self, examples: Sequence[int]) -> pd.DataFrame:
        """The kept rows: one row an example, step, layer, query head and key position, with both
        paths' probabilities.
        """
        table = Table(DIMENSIONS, VALUES)
        for row in sorted(self._best, key=lambda row: examples[row]):
            left, kept = OF_EXAMPLE, {}
            # An example's steps get room in the order of their rank; in the table they follow one
            # another.
            for _, step in self._best[row]:
                a, b = (_on_host(path[:, row]) for path in self._rows[step].pair)
                kept[step] = a, b, _largest_kl(a, b, left // a.shape[-1])
                left -= int(kept[step][-1].sum())
            for step, (a, b, mask) in sorted(kept.items()):
                rows = self._rows[step]
                positions = range(rows.end - a.shape[-1], rows.end)
                labels = ([examples[row]], [step], rows.layers, rows.heads, positions)
                table.add(dict(zip(DIMENSIONS, labels, strict=True)), {"a": a, "b": b}, mask)
        return table.frame()


def _on_host(pattern: Tensor) -> Tensor:
    """Copies probabilities to the host: float64 stays, every other dtype becomes float32, which
    holds it exactly.
    """
    return pattern.to("cpu", torch.float64 if pattern.dtype == torch.float64 else torch.float32)


def _largest_kl(a: Tensor, b: Tensor, most: int) -> Tensor:
    """Which probabilities, ``[layer, head, key]``, belong to the heads with the largest KL."""
    order = metrics.pattern_kl(a, b.to(a.dtype)).neg().flatten().argsort(stable=True)
    kept = torch.zeros_like(order, dtype=torch.bool).index_fill_(0, order[:most], True)
    return kept.view(*a.shape[:2], 1).expand_as(a)


def within(rows: pd.DataFrame, steps: pd.DataFrame, most: int = OF_ALL) -> pd.DataFrame:
    """Keeps as many whole steps as ``most`` allows: those of first flips first, then by KL.

    Cutting parts first and then their concatenation gives the same rows as cutting the whole at
    once.

    Args:
        rows: A table from :meth:`AttentionRows.frame`.
        steps: The table of steps of the same examples.
        most: Most rows.
    """
    if len(rows) <= most:
        return rows
    keys = ["example", "step"]
    sizes = (
        rows.groupby(keys, as_index=False)
        .size()
        .merge(steps[[*keys, "kl", "flipped", "after_flip"]], on=keys)
    )
    sizes["first"] = sizes["flipped"].astype(bool) & ~sizes["after_flip"].astype(bool)
    sizes = sizes.sort_values(["first", "kl", *keys], ascending=[False, False, True, True])
    return rows.merge(sizes.loc[sizes["size"].cumsum() <= most, keys], on=keys, how="inner")
