"""The attention rows that are kept: what the newest query attended to on both paths, at a few steps of each example.

All rows of a comparison would be as large as its model's patterns. Kept are those in which a reader asks what changed: the step
of an example's first flip, and its steps of largest KL on the same text. What is kept is decided by the numbers alone and example
by example, so that a run that was cut off and taken up again keeps the same.
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
"""Most probabilities a path that are kept of one example, and of all: half a megabyte, and eight."""
WAITING = 2**22
"""Most numbers of both paths that wait to be chosen among on a CPU; other devices take 32 times as many."""
DIMENSIONS, VALUES = ("example", "step", "layer", "head", "position"), ("a", "b")
COLUMNS = (*DIMENSIONS, *VALUES, "after_flip")


@dataclasses.dataclass(frozen=True)
class _Shown:
    """The rows of one step: both paths' ``[layer, batch, head, key]``, keys aligned at the newest."""

    layers: Sequence[int]
    heads: Sequence[int]
    end: int
    pair: tuple[Tensor, Tensor]


class AttentionRows:
    """Takes the rows of every step, and lets go of all but those to be kept once the steps' KL is known."""

    def __init__(self) -> None:
        self._shown: dict[int, _Shown] = {}
        self._numbers = 0
        self._unsure: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._best: dict[int, list[tuple[float, int]]] = {}

    @property
    def full(self) -> bool:
        """Whether so much waits that the KL of these steps should be asked for now."""
        first = next(iter(self._shown.values()), None)
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
            pair: Both paths' ``[layer, batch, head, key]``, in copies of their own.
            marks: For each row of the batch 1 after its flip, 0 before it, -1 where its text has ended.
            flips: Which rows flip their first token at this step; None where it is not known.
        """
        self._shown[step], self._unsure[step] = _Shown(layers, heads, end, pair), (marks, flips)
        self._numbers += 2 * pair[0].numel()

    def measured(self, steps: Sequence[int], kl: Tensor, same_text: bool) -> None:
        """Chooses among steps, now that their KL is known.

        Args:
            steps: The steps.
            kl: Their KL, ``[step, batch]``.
            same_text: Whether both paths hold the same text after a flip too.
        """
        ranks = []
        for place, step in enumerate(steps):
            if step not in self._unsure:
                return
            marks, flips = self._unsure.pop(step)
            out = marks < 0 if same_text else marks != 0
            rank = kl[place].nan_to_num(nan=-1.0).masked_fill(out, -1.0)
            ranks.append(rank if flips is None else rank.masked_fill(flips & (marks >= 0), torch.inf))
        for row, of_row in enumerate(torch.stack(ranks, -1).tolist()):
            found = [
                *self._best.get(row, ()),
                *((rank, step) for rank, step in zip(of_row, steps, strict=True) if rank >= 0),
            ]
            self._best[row] = sorted(found, key=lambda each: (-each[0], each[1]))[:STEPS]
        kept = {step for best in self._best.values() for _, step in best}
        self._shown = {step: shown for step, shown in self._shown.items() if step in kept or step in self._unsure}
        self._numbers = sum(2 * shown.pair[0].numel() for step, shown in self._shown.items() if step in self._unsure)

    def frame(self, examples: Sequence[int]) -> pd.DataFrame:
        """What was kept: a row an example, step, layer, query head and position of a key, with both paths' probabilities."""
        blocks, left = list[dict[str, np.ndarray]](), dict.fromkeys(self._best, OF_EXAMPLE)
        # By example and step, as the table is sorted; which of an example's steps have room, is decided by their rank.
        for row in sorted(self._best, key=lambda row: examples[row]):
            found = {}
            for _, step in self._best[row]:
                shown = self._shown[step]
                a, b = (_on_host(path[:, row]) for path in shown.pair)
                chosen = _by_kl(a, b, left[row] // a.shape[-1])
                left[row] -= len(chosen) * a.shape[-1]
                found[step] = _block(examples[row], step, shown, chosen, a.numpy(), b.numpy())
            blocks += [found[step] for step in sorted(found)]
        empty = {name: np.zeros(0, np.int64 if name in DIMENSIONS else np.float32) for name in (*DIMENSIONS, *VALUES)}
        return pd.DataFrame({name: np.concatenate([block[name] for block in blocks or [empty]]) for name in empty})


def _block(
    example: int, step: int, shown: _Shown, chosen: np.ndarray, a: np.ndarray, b: np.ndarray
) -> dict[str, np.ndarray]:
    """The rows of some heads (``[head, 2]``: layer and head by their place) at one step, as columns."""
    width, (layer, head) = a.shape[-1], chosen.T
    said = {
        "layer": np.asarray(shown.layers, np.int64)[layer].repeat(width),
        "head": np.asarray(shown.heads, np.int64)[head].repeat(width),
        "position": np.tile(np.arange(shown.end - width, shown.end, dtype=np.int64), len(chosen)),
        "a": a[layer, head].ravel(),
        "b": b[layer, head].ravel(),
    }
    of = {"example": example, "step": step}
    return {**{name: np.full(len(said["a"]), label, np.int64) for name, label in of.items()}, **said}


def _on_host(pattern: Tensor) -> Tensor:
    """Probabilities in a type that tables have: float64 stays so, all else is float32, which holds it exactly."""
    return pattern.to("cpu", torch.float64 if pattern.dtype == torch.float64 else torch.float32)


def _by_kl(a: Tensor, b: Tensor, most: int) -> np.ndarray:
    """Layer and head by their place, ``[head, 2]`` in this order: as many as there is room for, those of the largest KL."""
    kl = metrics.pattern_kl(a, b.to(a.dtype)).numpy()
    order = np.sort(np.argsort(-kl, axis=None, kind="stable")[:most])
    return np.stack(np.unravel_index(order, kl.shape), -1)


def within(rows: pd.DataFrame, steps: pd.DataFrame, most: int = OF_ALL) -> pd.DataFrame:
    """As many of the rows as there is room for, whole steps: those of first flips first, then by KL.

    What is left of parts that were cut before, each by itself, is what would be left of the whole.

    Args:
        rows: A table as :meth:`AttentionRows.frame` gives it, of some examples.
        steps: The table of their steps.
        most: Most rows.
    """
    if len(rows) <= most:
        return rows
    of = ["example", "step"]
    sizes = rows.groupby(of, as_index=False).size().merge(steps[[*of, "kl", "flipped", "after_flip"]], on=of)
    sizes["first"] = sizes["flipped"].astype(bool) & ~sizes["after_flip"].astype(bool)
    sizes = sizes.sort_values(["first", "kl", *of], ascending=[False, False, True, True])
    kept = sizes.loc[sizes["size"].cumsum() <= most, of]
    return rows.merge(kept, on=of, how="inner")
