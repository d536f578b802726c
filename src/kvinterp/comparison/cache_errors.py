"""Sums the errors of K and V by step and by position while two paths run; the table by step and
position only on request.

A vector of every position at every step is quadratic in the steps: a thousand steps of one prompt
made 33 million rows. Readers use means by step or by position, which grow linearly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.comparison.table import Table
from kvinterp.metrics import KINDS, OF_KIND

_POSITION = KINDS["kv"].dimensions
_STEP = ("step", *_POSITION[:-1])
SUMMED = {
    metric.column + f"_{way}" * (way != metric.over[0]): (metric.column, way)
    for metric in OF_KIND["kv"]
    for way in metric.over
}
"""The columns of the summed tables, each with its metric and whether it is the mean or the maximum
over vectors.
"""
COUNTS = ("vectors", "differing")
ADDED = (*COUNTS, *(name for name, (_, way) in SUMMED.items() if way == "mean"))
"""The columns that are added up over positions or steps. They share one tensor: several small ones
cost more in Python.
"""
MOST = tuple(name for name, (_, way) in SUMMED.items() if way == "max")
"""The columns that are maxima over positions or steps; they share one tensor too."""
VALUES = (*COUNTS, *SUMMED)
LET_GO = ("let_go_a", "let_go_b")
"""The columns of the table by step with how many positions each path's policy evicted."""


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """The positions of one step, and how the rows of its batch count.

    Attributes:
        start: Absolute position of the first key.
        length: How many there are.
        marks: For each row of the batch 1 after its flip, 0 before it, -1 where its text has ended.
        masks: For each path which positions it still holds, in the shape of an error; None for all.
            Only positions that both paths hold are compared.
    """

    start: int
    length: int
    marks: Tensor
    masks: tuple[Tensor | None, Tensor | None]

    @property
    def mask(self) -> Tensor | None:
        """Which positions both paths hold; None for all."""
        a, b = self.masks
        return a if b is None else b if a is None else a & b


class CacheErrors:
    """Takes the errors of K and V, one block of steps after the other.

    Args:
        layers: The layers that are compared.
        keep: ``"aggregated"``: the errors by step and by position separately; ``"whole"``: besides
            these those of every position at every step, which is quadratic in the steps.

    Attributes:
        steps: The table by step, over the positions.
        whole: The table by step and position; empty unless ``keep`` is ``"whole"``.
    """

    def __init__(self, layers: Sequence[int], keep: str) -> None:
        self.layers, self.keep = list(layers), keep
        self.steps = Table(_STEP, (*VALUES, *LET_GO))
        self.whole = Table(("step", *_POSITION), [metric.column for metric in OF_KIND["kv"]])
        self._sums: dict[tuple[str, int], _Sums] = {}

    def add(
        self,
        steps: Sequence[int],
        labels: Mapping[str, Sequence[Any]],
        spans: Sequence[Span],
        errors: Mapping[str, Tensor],
    ) -> None:
        """Adds the errors of some layers at some steps.

        Args:
            steps: The decode steps.
            labels: The labels of the dimensions except the position: tensor (``"K"``,
                ``"K before RoPE"`` or ``"V"``), layer, example and kv_head.
            spans: The positions of each step; a step with evicted rows comes alone.
            errors: The values of every metric of K and V by column,
                ``[tensor, layer, batch, kv_head, position]``; the positions of one step follow
                those of the step before.
        """
        mask = spans[0].mask
        if mask is not None:
            # Where nothing is compared the error is 0 and adds nothing to a sum or maximum.
            errors = {name: error.where(mask, 0.0) for name, error in errors.items()}
        relative, lengths = errors["relative_error"], [span.length for span in spans]
        compared = torch.ones_like(relative) if mask is None else mask.to(relative.dtype)
        differing = (relative != 0).to(relative.dtype)
        summed = torch.stack(
            [compared, differing, *(errors[SUMMED[name][0]] for name in ADDED[len(COUNTS) :])]
        )
        most = torch.stack([errors[SUMMED[name][0]] for name in MOST])
        by_step = [*zip(summed.split(lengths, -1), most.split(lengths, -1), strict=True)]
        self.steps.add({"step": steps, **labels}, self._step_columns(by_step, spans[0]))
        marks = torch.stack([span.marks for span in spans]).tolist()
        whole = (
            [error.split(lengths, -1) for error in errors.values()] if self.keep == "whole" else []
        )
        for number, (step, span) in enumerate(zip(steps, spans, strict=True)):
            if whole:
                positions = np.arange(span.start, span.start + span.length)
                values = dict(zip(errors, (error[number] for error in whole), strict=True))
                self.whole.add({"step": [step], **labels, "position": positions}, values, mask)
            if step > 0:
                # Step 0 is the prefill on both paths.
                self._add_to_sums(labels, span.start, by_step[number], marks[number])

    def _step_columns(
        self, errors: Sequence[tuple[Tensor, Tensor]], first: Span
    ) -> dict[str, Tensor]:
        """The columns of the table by step: each step's errors over its positions."""
        counts = torch.stack([summed[: len(COUNTS)].sum(-1) for summed, _ in errors], 1)
        totals = [summed[len(COUNTS) :] for summed, _ in errors]
        means = torch.stack(
            [t.mean(-1) if first.mask is None else t.sum(-1) / first.mask.sum(-1) for t in totals],
            1,
        )
        maxima = torch.stack([most.amax(-1) for _, most in errors], 1)
        zeros = torch.zeros_like(counts[0])
        evicted = [zeros if mask is None else zeros + (~mask).sum(-1) for mask in first.masks]
        return dict(
            zip((*ADDED, *MOST, *LET_GO), (*counts, *means, *maxima, *evicted), strict=True)
        )

    def _add_to_sums(
        self,
        labels: Mapping[str, Sequence[Any]],
        start: int,
        errors: tuple[Tensor, Tensor],
        marks: Sequence[int],
    ) -> None:
        """Adds one step's errors to the sums by position."""
        rows = [self.layers.index(layer) for layer in labels["layer"]]
        for number, tensor in enumerate(labels["tensor"]):
            summed, most = (part[:, number] for part in errors)
            key = (tensor, len(labels["kv_head"]))
            if key not in self._sums:
                self._sums[key] = _Sums(len(self.layers), summed)
            self._sums[key].add(rows, start, summed, most, marks)

    def positions(self, examples: Sequence[int], heads: Sequence[int]) -> pd.DataFrame:
        """The table by position, and by before or after the flip, over the steps from 1 on."""
        table = Table((*_POSITION, "after_flip"), VALUES)
        for (tensor, count), sums in self._sums.items():
            labels = {
                "layer": self.layers,
                "example": examples,
                "kv_head": heads[:count],
                "after_flip": [0, 1],
            }
            table.add(
                {**labels, "tensor": [tensor], "position": np.arange(sums.capacity)}, sums.means()
            )
        frame = table.frame()
        return frame[frame["vectors"] > 0].astype({"after_flip": bool}).reset_index(drop=True)


class _Sums:
    """Sums and maxima over steps,
    ``[column, before or after the flip, layer, batch, kv_head, position]``.
    """

    def __init__(self, layers: int, like: Tensor) -> None:
        self.shape, self.capacity = (2, layers, *like.shape[2:4]), 0
        self.summed, self.most = (
            like.new_zeros(len(names), *self.shape, 0) for names in (ADDED, MOST)
        )

    def add(
        self, layers: Sequence[int], start: int, summed: Tensor, most: Tensor, marks: Sequence[int]
    ) -> None:
        stop = start + summed.shape[-1]
        if stop > self.capacity:
            # Twice what is needed, so that a long decode moves it a few times and not at every
            # step.
            self.summed, self.most = (
                torch.nn.functional.pad(sums, (0, 2 * stop - self.capacity))
                for sums in (self.summed, self.most)
            )
            self.capacity = 2 * stop
        for kind in (0, 1):
            rows = [row for row, mark in enumerate(marks) if mark == kind]
            for (to, source), (row, _) in itertools.product(
                _slices(layers, self.shape[1]), _slices(rows, self.shape[2])
            ):
                # Views, because indexing by lists would copy what is added to and write it back.
                sums, maxima = (
                    total[:, kind, to, row, ..., start:stop] for total in (self.summed, self.most)
                )
                sums += summed[:, source, row]
                torch.maximum(maxima, most[:, source, row], out=maxima)

    def means(self) -> dict[str, Tensor]:
        """The columns of the table, each in the order of its dimensions: the sums divided by the
        number of vectors.
        """
        count = self.summed[0]
        means = [total / count for total in self.summed[len(COUNTS) :]]
        # Dimensions of the table: tensor, layer, example, KV head, position, after the flip.
        columns = zip(
            (*ADDED, *MOST), (*self.summed[: len(COUNTS)], *means, *self.most), strict=True
        )
        return {name: column.movedim(0, -1).contiguous() for name, column in columns}


def _slices(indices: Sequence[int], count: int) -> list[tuple[Any, Any]]:
    """The indices of a dimension, each with its place in the list; one slice for both if they are
    the whole dimension.
    """
    if list(indices) == list(range(count)):
        return [(slice(None), slice(None))]
    return [(index, slot) for slot, index in enumerate(indices)]
