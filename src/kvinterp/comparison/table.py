"""A tidy table that gathers blocks on the device and brings them to the host once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor


class Table:
    """Gathers blocks of numbers with named dimensions and makes one tidy frame of them.

    Args:
        dimensions: Column names of the dimensions, outermost first.
        values: Column names of the numbers.
    """

    def __init__(self, dimensions: Sequence[str], values: Sequence[str]) -> None:
        self.dimensions, self.values = tuple(dimensions), tuple(values)
        self._coordinates: list[tuple[np.ndarray, ...]] = []
        self._masks: list[Tensor | None] = []
        self._blocks: dict[str, list[Tensor]] = {name: [] for name in self.values}

    def add(
        self,
        coordinates: Mapping[str, Any],
        values: Mapping[str, Tensor],
        mask: Tensor | None = None,
    ) -> None:
        """Adds one block.

        Args:
            coordinates: For each dimension, in any order, its labels in this block.
            values: For each value a tensor with one size a dimension.
            mask: Which of the numbers are rows of the table; all for None.
        """
        self._masks.append(None if mask is None else mask.reshape(-1))
        self._coordinates.append(tuple(np.asarray(coordinates[name]) for name in self.dimensions))
        for name in self.values:
            block = values[name].reshape(-1)
            self._blocks[name].append(block if mask is None else block[self._masks[-1]])

    def frame(self) -> pd.DataFrame:
        """All blocks in one frame, a row a number."""
        columns: dict[str, np.ndarray] = {}
        masks = [None if mask is None else mask.cpu().numpy() for mask in self._masks]
        grids = [np.meshgrid(*block, indexing="ij", copy=False) for block in self._coordinates]
        for index, name in enumerate(self.dimensions):
            rows = [grid[index].reshape(-1) for grid in grids]
            rows = [
                row if mask is None else row[mask] for row, mask in zip(rows, masks, strict=True)
            ]
            columns[name] = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        for name, blocks in self._blocks.items():
            columns[name] = torch.cat(blocks).cpu().numpy() if blocks else np.zeros(0)
        return pd.DataFrame(columns)
