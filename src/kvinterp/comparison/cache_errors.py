"""How far apart K and V are, kept as sums while two paths run: by step, and by position. Every pair of the two on request.

A vector of every position at every step is quadratic in the steps: a thousand of them on one prompt made 33 million rows. What
is read of it are means by step or by position, which grow with the steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


class CacheErrors:
    """Takes the errors of one step after the other.

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
        self,
        step: int,
        tensor: str,
        layers: Sequence[int],
        examples: Sequence[int],
        heads: Sequence[int],
        start: int,
        errors: Mapping[str, Tensor],
        kinds: Sequence[int | None],
        held: Sequence[Tensor | None] = (None, None),
    ) -> None:
        """Adds what some layers showed at a step.

        Args:
            step: The decode step.
            tensor: ``"K"``, ``"K before RoPE"`` or ``"V"``.
            layers: Their numbers.
            examples: The example number of each row of the batch.
            heads: Labels of the KV heads.
            start: Absolute position of the first key.
            errors: What every metric of K and V gave, by column, ``[layer, batch, kv_head, position]``.
            kinds: For each row of the batch 1 after its flip, 0 before it, None where its text has ended.
            held: For each path which of the positions it still holds, in the shape of an error; None where all. Only those
                that both hold are compared.
        """
        relative = errors["relative_error"]
        count, none = relative.shape[-1], torch.zeros_like(relative[..., 0])
        let_go = [none if one is None else (~one).sum(-1).to(none.dtype) for one in held]
        there = held[0] if held[1] is None else held[1] if held[0] is None else held[0] & held[1]
        if there is not None:
            errors = {name: error.where(there, 0.0) for name, error in errors.items()}
            relative = errors["relative_error"]
        vectors = none + count if there is None else there.sum(-1).to(none.dtype)
        coordinates = {"step": [step], "tensor": [tensor], "layer": layers, "example": examples, "kv_head": heads}
        # What is not compared is 0 here, and adds nothing to sum or maximum.
        together = {
            "mean": lambda error: error.mean(-1) if there is None else error.sum(-1) / vectors,
            "max": lambda error: error.amax(-1),
        }
        over = {
            "vectors": vectors,
            "differing": (relative != 0).sum(-1).to(relative.dtype),
            **{name: together[way](errors[of]) for name, (of, way) in SUMMED.items()},
            **dict(zip(LET_GO, let_go, strict=True)),
        }
        self.steps.add(coordinates, over)
        if self.keep == "whole":
            self.every.add({**coordinates, "position": np.arange(start, start + count)}, errors, there)
        if step > 0:
            # Step 0 is the prefill's on both paths.
            place = (tensor, relative.shape[2])
            if place not in self._sums:
                self._sums[place] = _Sums(len(self.layers), relative)
            rows = [self.layers.index(layer) for layer in layers]
            self._sums[place].add(rows, start, errors, kinds, there)

    def positions(self, examples: Sequence[int], heads: Sequence[int]) -> pd.DataFrame:
        """Over the steps from 1 on, by position and by whether they come after the flip."""
        table = Table((*_POSITION, "after_flip"), VALUES)
        for (tensor, count), sums in self._sums.items():
            places = {"layer": self.layers, "example": examples, "kv_head": heads[:count], "after_flip": [0, 1]}
            found = sums.means()
            table.add({**places, "tensor": [tensor], "position": np.arange(sums.room)}, found)
        frame = table.frame()
        return frame[frame["vectors"] > 0].astype({"after_flip": bool}).reset_index(drop=True)


class _Sums:
    """Sums and maxima over steps, ``[layer, batch, kv_head, position, before or after the flip]``."""

    def __init__(self, layers: int, like: Tensor) -> None:
        self.shape, self.room, self.like = (layers, like.shape[1], like.shape[2]), 0, like
        self.held = {name: self._empty(0) for name in VALUES}

    def _empty(self, room: int) -> Tensor:
        return self.like.new_zeros(*self.shape, room, 2)

    def add(
        self,
        layers: Sequence[int],
        start: int,
        errors: Mapping[str, Tensor],
        kinds: Sequence[int | None],
        there: Tensor | None = None,
    ) -> None:
        stop = start + errors["relative_error"].shape[-1]
        if stop > self.room:
            # Twice what is needed, so that it is moved a few times in a long decode and not at every step.
            more = self._empty(2 * stop - self.room)
            self.held = {name: torch.cat([held, more], 3) for name, held in self.held.items()}
            self.room = 2 * stop
        at = torch.tensor(layers, device=self.like.device)[:, None]
        for kind in (0, 1):
            rows = [row for row, found in enumerate(kinds) if found == kind]
            if not rows:
                continue
            place = (at, torch.tensor(rows, device=self.like.device)[None], slice(None), slice(start, stop), kind)
            mine = {name: error[:, rows] for name, error in errors.items()}
            self.held["vectors"][place] += 1 if there is None else there[:, rows].to(self.like.dtype)
            self.held["differing"][place] += mine["relative_error"] != 0
            for name, (of, way) in SUMMED.items():
                if way == "mean":
                    self.held[name][place] += mine[of]
                else:
                    self.held[name][place] = torch.maximum(self.held[name][place], mine[of])

    def means(self) -> dict[str, Tensor]:
        """The sums over what they count; in the order of the table's dimensions."""
        count = self.held["vectors"]
        means = {name: self.held[name] / count for name, (_, way) in SUMMED.items() if way == "mean"}
        found = {**self.held, **means}
        # Dimensions of the table: tensor, layer, example, KV head, position, after the flip.
        return {name: held.contiguous() for name, held in found.items()}


# What is read of it ----------------------------------------------------------------------------------------------------
