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

__all__ = ["CACHE_ERRORS", "CacheErrors"]

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
VALUES = ("vectors", "differing", *SUMMED)
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
        counts = [span.length for span in spans]
        differing = errors["relative_error"] != 0
        by_step = {name: error.split(counts, -1) for name, error in {**errors, "differing": differing}.items()}
        over = {name: torch.stack([_over(way, each, there) for each in by_step[of]]) for name, (of, way) in SUMMED.items()}
        over["differing"] = torch.stack([each.sum(-1) for each in by_step["differing"]]).double()
        none = torch.zeros_like(over["differing"])
        vectors = none + (none.new_tensor(counts).view(-1, *[1] * (none.dim() - 1)) if there is None else there.sum(-1))
        let_go = (none if held is None else none + (~held).sum(-1) for held in spans[0].held)
        self.steps.add({"step": steps, **at}, {**over, "vectors": vectors, **dict(zip(LET_GO, let_go, strict=True))})
        marked = torch.stack([span.marks for span in spans]).tolist()
        for number, (step, span) in enumerate(zip(steps, spans, strict=True)):
            mine = {name: each[number] for name, each in by_step.items()}
            if self.keep == "whole":
                places = {"position": np.arange(span.start, span.start + span.length)}
                self.every.add({"step": [step], **at, **places}, mine, there)
            if step > 0:
                # Step 0 is the prefill's on both paths.
                self._sum(at, span.start, mine if there is None else {**mine, "there": there}, marked[number])

    def _sum(self, at: Mapping[str, Sequence[Any]], start: int, errors: Mapping[str, Tensor], marks: Sequence[int]) -> None:
        """Adds one step's errors to the sums by position."""
        rows = [self.layers.index(layer) for layer in at["layer"]]
        for number, tensor in enumerate(at["tensor"]):
            mine = {name: error[number] for name, error in errors.items()}
            place = (tensor, len(at["kv_head"]))
            if place not in self._sums:
                self._sums[place] = _Sums(len(self.layers), mine["relative_error"])
            self._sums[place].add(rows, start, mine, marks)

    def positions(self, examples: Sequence[int], heads: Sequence[int]) -> pd.DataFrame:
        """Over the steps from 1 on, by position and by whether they come after the flip."""
        table = Table((*_POSITION, "after_flip"), VALUES)
        for (tensor, count), sums in self._sums.items():
            places = {"layer": self.layers, "example": examples, "kv_head": heads[:count], "after_flip": [0, 1]}
            found = sums.means()
            table.add({**places, "tensor": [tensor], "position": np.arange(sums.room)}, found)
        frame = table.frame()
        return frame[frame["vectors"] > 0].astype({"after_flip": bool}).reset_index(drop=True)


def _over(way: str, errors: Tensor, there: Tensor | None) -> Tensor:
    if way == "max":
        return errors.amax(-1)
    return errors.mean(-1) if there is None else errors.sum(-1) / there.sum(-1)


class _Sums:
    """Sums and maxima over steps, ``[before or after the flip, layer, batch, kv_head, position]``."""

    def __init__(self, layers: int, like: Tensor) -> None:
        self.shape, self.room, self.like = (2, layers, like.shape[1], like.shape[2]), 0, like
        self.held = {name: self._empty(0) for name in VALUES}

    def _empty(self, room: int) -> Tensor:
        return self.like.new_zeros(*self.shape, room)

    def add(self, layers: Sequence[int], start: int, errors: Mapping[str, Tensor], marks: Sequence[int]) -> None:
        stop = start + errors["relative_error"].shape[-1]
        if stop > self.room:
            # Twice what is needed, so that it is moved a few times in a long decode and not at every step.
            more = self._empty(2 * stop - self.room)
            self.held = {name: torch.cat([held, more], -1) for name, held in self.held.items()}
            self.room = 2 * stop
        for kind in (0, 1):
            rows = [row for row, mark in enumerate(marks) if mark == kind]
            for (to, of), (row, _) in itertools.product(_parts(layers, self.shape[1]), _parts(rows, self.shape[2])):
                # Views, for what is added to a place that lists name is read out and written back.
                held = {name: each[kind, to, row, ..., start:stop] for name, each in self.held.items()}
                mine = {name: each[of, row] for name, each in errors.items()}
                held["vectors"] += mine.get("there", 1)
                held["differing"] += mine["differing"]
                for name, (column, way) in SUMMED.items():
                    if way == "mean":
                        held[name] += mine[column]
                    else:
                        torch.maximum(held[name], mine[column], out=held[name])

    def means(self) -> dict[str, Tensor]:
        """The sums over what they count; in the order of the table's dimensions."""
        count = self.held["vectors"]
        means = {name: self.held[name] / count for name, (_, way) in SUMMED.items() if way == "mean"}
        # Dimensions of the table: tensor, layer, example, KV head, position, after the flip.
        return {name: held.movedim(0, -1).contiguous() for name, held in {**self.held, **means}.items()}


def _parts(chosen: Sequence[int], count: int) -> list[tuple[Any, Any]]:
    """What is chosen of a dimension, each with its place among the chosen: in one slice where it is all of it."""
    everything = list(chosen) == list(range(count))
    return [(slice(None), slice(None))] if everything else [(to, number) for number, to in enumerate(chosen)]


# What is read of it ----------------------------------------------------------------------------------------------------
