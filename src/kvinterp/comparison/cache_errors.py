"""How far apart K and V are, kept as sums while two paths run: by step, and by position. Every pair of the two on request.

A vector of every position at every step is quadratic in the steps: a thousand of them on one prompt made 33 million rows. What
is read of it are means by step or by position, which grow with the steps alone.
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

CACHE_ERRORS = {
    "aggregated": "K/V errors by step and by position separately (kv_steps, kv_positions)",
    "whole": "besides these every position at every step (kv), which is quadratic in the steps",
}

_POSITION = KINDS["kv"].dimensions
_STEP = ("step", *_POSITION[:-1])
SUMMED = {
    metric.column + f"_{way}" * (way != metric.over[0]): (metric.column, way)
    for metric in OF_KIND["kv"]
    for way in metric.over
}
"""The columns of the summed tables: of which metric each is, and whether the mean of several vectors or the most of any."""
COUNTS = ("vectors", "differing")
ADDED = (*COUNTS, *(name for name, (_, way) in SUMMED.items() if way == "mean"))
"""What is added up over positions or steps, one behind the other in one tensor: a small model's errors take longer in Python."""
MOST = tuple(name for name, (_, way) in SUMMED.items() if way == "max")
"""What is the most of any, the same way."""
VALUES = (*COUNTS, *SUMMED)
LET_GO = ("let_go_a", "let_go_b")
"""How many of a step's positions each path's policy let go of, in the table by step."""


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Where the positions of a step are, and how its rows count.

    Attributes:
        start: Absolute position of the first key.
        length: How many there are.
        marks: For each row of the batch 1 after its flip, 0 before it, -1 where its text has ended.
        held: For each path which of the positions it still holds, in the shape of an error; None where all. Only those that
            both hold are compared.
    """

    start: int
    length: int
    marks: Tensor
    held: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def there(self) -> Tensor | None:
        """Which positions both paths hold; None where all."""
        a, b = self.held
        return a if b is None else b if a is None else a & b


class CacheErrors:
    """Takes the errors of one block of steps after the other.

    Args:
        layers: The layers that are watched.
        keep: One of :data:`CACHE_ERRORS`.

    Attributes:
        steps: Over the positions, by step.
        every: By step and position; empty unless it is asked for.
    """

    def __init__(self, layers: Sequence[int], keep: str = "aggregated") -> None:
        self.layers, self.keep = list(layers), keep
        self.steps = Table(_STEP, (*VALUES, *LET_GO))
        self.every = Table(("step", *_POSITION), [metric.column for metric in OF_KIND["kv"]])
        self._sums: dict[tuple[str, int], _Sums] = {}

    def add(
        self, steps: Sequence[int], at: Mapping[str, Sequence[Any]], spans: Sequence[Span], errors: Mapping[str, Tensor]
    ) -> None:
        """Adds what some layers showed at some steps.

        Args:
            steps: The decode steps.
            at: The labels of the dimensions but for the position: tensor (``"K"``, ``"K before RoPE"`` or ``"V"``), layer,
                example and kv_head.
            spans: The positions of each step; one of which rows were let go of comes alone.
            errors: What every metric of K and V gave, by column, ``[tensor, layer, batch, kv_head, position]``, in which the
                positions of one step lie behind those of the step before.
        """
        there = spans[0].there
        if there is not None:
            # What is not compared is 0, and adds nothing to sum or maximum.
            errors = {name: error.where(there, 0.0) for name, error in errors.items()}
        relative, lengths = errors["relative_error"], [span.length for span in spans]
        compared = torch.ones_like(relative) if there is None else there.to(relative.dtype)
        differing = (relative != 0).to(relative.dtype)
        summed = torch.stack([compared, differing, *(errors[SUMMED[name][0]] for name in ADDED[len(COUNTS) :])])
        most = torch.stack([errors[SUMMED[name][0]] for name in MOST])
        by_step = [*zip(summed.split(lengths, -1), most.split(lengths, -1), strict=True)]
        self.steps.add({"step": steps, **at}, self._by_step(by_step, spans[0]))
        marked = torch.stack([span.marks for span in spans]).tolist()
        whole = [error.split(lengths, -1) for error in errors.values()] if self.keep == "whole" else []
        for number, (step, span) in enumerate(zip(steps, spans, strict=True)):
            if whole:
                places = {"position": np.arange(span.start, span.start + span.length)}
                mine = dict(zip(errors, (each[number] for each in whole), strict=True))
                self.every.add({"step": [step], **at, **places}, mine, there)
            if step > 0:
                # Step 0 is the prefill's on both paths.
                self._sum(at, span.start, by_step[number], marked[number])

    def _by_step(self, errors: Sequence[tuple[Tensor, Tensor]], first: Span) -> dict[str, Tensor]:
        """The columns of the table by step: each step's errors over its positions."""
        there = first.there
        counts = torch.stack([summed[: len(COUNTS)].sum(-1) for summed, _ in errors], 1)
        means = torch.stack([_mean(summed[len(COUNTS) :], there) for summed, _ in errors], 1)
        maxima = torch.stack([most.amax(-1) for _, most in errors], 1)
        none = torch.zeros_like(counts[0])
        let_go = [none if held is None else none + (~held).sum(-1) for held in first.held]
        return dict(zip((*ADDED, *MOST, *LET_GO), (*counts, *means, *maxima, *let_go), strict=True))

    def _sum(
        self, at: Mapping[str, Sequence[Any]], start: int, errors: tuple[Tensor, Tensor], marks: Sequence[int]
    ) -> None:
        """Adds one step's errors to the sums by position."""
        rows = [self.layers.index(layer) for layer in at["layer"]]
        for number, tensor in enumerate(at["tensor"]):
            summed, most = (each[:, number] for each in errors)
            place = (tensor, len(at["kv_head"]))
            if place not in self._sums:
                self._sums[place] = _Sums(len(self.layers), summed)
            self._sums[place].add(rows, start, summed, most, marks)

    def positions(self, examples: Sequence[int], heads: Sequence[int]) -> pd.DataFrame:
        """Over the steps from 1 on, by position and by whether they come after the flip."""
        table = Table((*_POSITION, "after_flip"), VALUES)
        for (tensor, count), sums in self._sums.items():
            places = {"layer": self.layers, "example": examples, "kv_head": heads[:count], "after_flip": [0, 1]}
            found = sums.means()
            table.add({**places, "tensor": [tensor], "position": np.arange(sums.room)}, found)
        frame = table.frame()
        return frame[frame["vectors"] > 0].astype({"after_flip": bool}).reset_index(drop=True)


def _mean(errors: Tensor, there: Tensor | None) -> Tensor:
    return errors.mean(-1) if there is None else errors.sum(-1) / there.sum(-1)


class _Sums:
    """Sums and maxima over steps, ``[column, before or after the flip, layer, batch, kv_head, position]``."""

    def __init__(self, layers: int, like: Tensor) -> None:
        self.shape, self.room = (2, layers, *like.shape[2:4]), 0
        self.summed, self.most = (like.new_zeros(len(names), *self.shape, 0) for names in (ADDED, MOST))

    def add(self, layers: Sequence[int], start: int, summed: Tensor, most: Tensor, marks: Sequence[int]) -> None:
        stop = start + summed.shape[-1]
        if stop > self.room:
            # Twice what is needed, so that it is moved a few times in a long decode and not at every step.
            self.summed, self.most = (
                torch.nn.functional.pad(held, (0, 2 * stop - self.room)) for held in (self.summed, self.most)
            )
            self.room = 2 * stop
        for kind in (0, 1):
            rows = [row for row, mark in enumerate(marks) if mark == kind]
            for (to, of), (row, _) in itertools.product(_parts(layers, self.shape[1]), _parts(rows, self.shape[2])):
                # Views, for what is added to a place that lists name is read out and written back.
                added, larger = (held[:, kind, to, row, ..., start:stop] for held in (self.summed, self.most))
                added += summed[:, of, row]
                torch.maximum(larger, most[:, of, row], out=larger)

    def means(self) -> dict[str, Tensor]:
        """The sums over what they count; in the order of the table's dimensions."""
        count = self.summed[0]
        means = [held / count for held in self.summed[len(COUNTS) :]]
        # Dimensions of the table: tensor, layer, example, KV head, position, after the flip.
        columns = zip((*ADDED, *MOST), (*self.summed[: len(COUNTS)], *means, *self.most), strict=True)
        return {name: held.movedim(0, -1).contiguous() for name, held in columns}


def _parts(chosen: Sequence[int], count: int) -> list[tuple[Any, Any]]:
    """What is chosen of a dimension, each with its place among the chosen: in one slice where it is all of it."""
    everything = list(chosen) == list(range(count))
    return [(slice(None), slice(None))] if everything else [(to, number) for number, to in enumerate(chosen)]


# What is read of it ----------------------------------------------------------------------------------------------------
