"""Keeps what the newest query attended to on both paths, at a few steps of each example.

All rows of a comparison would be as large as its model's patterns. Kept are those a reader asks about: at the step of an
example's first flip and at its steps of largest KL on the same text. The choice depends only on the example's own numbers, so
that a resumed run keeps the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics

STEPS = 3
"""Most steps of an example whose rows are kept."""
OF_EXAMPLE, OF_ALL = 2**15, 2**19
"""Most probabilities kept per path of one example, and of all examples: half a megabyte, and eight."""
WAITING = 2**22
"""Most numbers of both paths that wait for their KL on a CPU; other devices take 32 times as many."""
DIMENSIONS, VALUES = ("example", "step", "layer", "head", "position"), ("a", "b")
COLUMNS = (*DIMENSIONS, *VALUES, "after_flip")


@dataclasses.dataclass(frozen=True)
class _StepRows:
    """The rows of one step: both paths' ``[layer, batch, head, key]``, keys aligned at the newest."""

    layers: Sequence[int]
    heads: Sequence[int]
    end: int
    pair: tuple[Tensor, Tensor]


class AttentionRows:
    """Takes the rows of every step and, once the KL of the steps is known, drops those that are not kept."""

    def __init__(self) -> None:
        self._rows: dict[int, _StepRows] = {}
        self._numbers = 0
        self._undecided: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._best: dict[int, list[tuple[float, int]]] = {}

    @property
    def full(self) -> bool:
        """Whether so many rows wait that the KL of their steps should be measured now."""
        first = next(iter(self._rows.values()), None)
        return first is not None and self._numbers > WAITING * (1 if first.pair[0].device.type == "cpu" else 32)

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
            marks: For each row of the batch 1 after its flip, 0 before it, -1 where its text has ended.
            flips: Which rows flip their first token at this step; None where it is not known.
        """
        self._rows[step], self._undecided[step] = _StepRows(layers, heads, end, pair), (marks, flips)
        self._numbers += 2 * pair[0].numel()

    def select(self, steps: Sequence[int], kl: Tensor, same_text: bool) -> None:
        """Chooses the steps whose rows are kept, by their KL.

        Args:
            steps: The steps.
            kl: Their KL, ``[step, batch]``.
            same_text: Whether both paths hold the same text after a flip too.
        """
        ranks = []
        for place, step in enumerate(steps):
            if step not in self._undecided:
                return
            marks, flips = self._undecided.pop(step)
            out = marks < 0 if same_text else marks != 0
            rank = kl[place].nan_to_num(nan=-1.0).masked_fill(out, -1.0)
            ranks.append(rank if flips is None else rank.masked_fill(flips & (marks >= 0), torch.inf))
        for row, of_row in enumerate(torch.stack(ranks, -1).tolist()):
            ranked = [(-rank, step) for rank, step in zip(of_row, steps, strict=True) if rank >= 0]
            self._best[row] = sorted([*self._best.get(row, ()), *ranked])[:STEPS]
        best_steps = {step for best in self._best.values() for _, step in best}
        self._rows = {step: rows for step, rows in self._rows.items() if step in best_steps or step in self._undecided}
        self._numbers = sum(2 * self._rows[step].pair[0].numel() for step in self._undecided)

    def frame(self, examples: Sequence[int]) -> pd.DataFrame:
        """The kept rows: one row an example, step, layer, query head and key position, with both paths' probabilities."""
        blocks, left = list[dict[str, np.ndarray]](), dict.fromkeys(self._best, OF_EXAMPLE)
        # The table is sorted by example and step, but an example's steps get room in the order of their rank.
        for row in sorted(self._best, key=lambda row: examples[row]):
            by_step = {}
            for _, step in self._best[row]:
                rows = self._rows[step]
                a, b = (_on_host(path[:, row]) for path in rows.pair)
                heads = _heads_of_largest_kl(a, b, left[row] // a.shape[-1])
                left[row] -= len(heads) * a.shape[-1]
                by_step[step] = _block(examples[row], step, rows, heads, a.numpy(), b.numpy())
            blocks += [by_step[step] for step in sorted(by_step)]
        empty = {name: np.zeros(0, np.int64 if name in DIMENSIONS else np.float32) for name in (*DIMENSIONS, *VALUES)}
        return pd.DataFrame({name: np.concatenate([block[name] for block in blocks or [empty]]) for name in empty})


def _block(
    example: int, step: int, rows: _StepRows, heads: np.ndarray, a: np.ndarray, b: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns of some heads (``[head, 2]``: indices of layer and head) at one step."""
    width, (layer, head) = a.shape[-1], heads.T
    count = len(heads) * width
    return {
        "example": np.full(count, example, np.int64),
        "step": np.full(count, step, np.int64),
        "layer": np.asarray(rows.layers, np.int64)[layer].repeat(width),
        "head": np.asarray(rows.heads, np.int64)[head].repeat(width),
        "position": np.tile(np.arange(rows.end - width, rows.end, dtype=np.int64), len(heads)),
        "a": a[layer, head].ravel(),
        "b": b[layer, head].ravel(),
    }


def _on_host(pattern: Tensor) -> Tensor:
    """Copies probabilities to the host: float64 stays, every other dtype becomes float32, which holds it exactly."""
    return pattern.to("cpu", torch.float64 if pattern.dtype == torch.float64 else torch.float32)


def _heads_of_largest_kl(a: Tensor, b: Tensor, most: int) -> np.ndarray:
    """The indices of layer and head, ``[head, 2]`` in the model's order, of the heads with the largest KL."""
    kl = metrics.pattern_kl(a, b.to(a.dtype)).numpy()
    order = np.sort(np.argsort(-kl, axis=None, kind="stable")[:most])
    return np.stack(np.unravel_index(order, kl.shape), -1)


def within(rows: pd.DataFrame, steps: pd.DataFrame, most: int = OF_ALL) -> pd.DataFrame:
    """Keeps as many whole steps as ``most`` allows: those of first flips first, then by KL.

    Cutting parts first and then their concatenation gives the same rows as cutting the whole at once.

    Args:
        rows: A table from :meth:`AttentionRows.frame`.
        steps: The table of steps of the same examples.
        most: Most rows.
    """
    if len(rows) <= most:
        return rows
    keys = ["example", "step"]
    sizes = rows.groupby(keys, as_index=False).size().merge(steps[[*keys, "kl", "flipped", "after_flip"]], on=keys)
    sizes["first"] = sizes["flipped"].astype(bool) & ~sizes["after_flip"].astype(bool)
    sizes = sizes.sort_values(["first", "kl", *keys], ascending=[False, False, True, True])
    return rows.merge(sizes.loc[sizes["size"].cumsum() <= most, keys], on=keys, how="inner")
