"""One tidy table, gathered block by block on the device and brought to the host once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor


class Table:
    """Blocks of numbers with named dimensions, to become one tidy frame.

    Args:
        dimensions: Column names of the dimensions, outermost first.
        values: Column names of the numbers.
    """

    def __init__(self, dimensions: Sequence[str], values: Sequence[str]) -> None:
        self.dimensions, self.values = tuple(dimensions), tuple(values)
        self._coordinates: list[tuple[np.ndarray, ...]] = []
        self._there: list[Tensor | None] = []
        self._blocks: dict[str, list[Tensor]] = {name: [] for name in self.values}

    def add(self, coordinates: Mapping[str, Any], values: Mapping[str, Tensor], there: Tensor | None = None) -> None:
        """Adds one block.

        Args:
            coordinates: For each dimension, in any order, its labels in this block.
            values: For each value a tensor with one size a dimension.
            there: Which of them are rows of the table; all for None.
        """
        self._there.append(None if there is None else there.reshape(-1))
        self._coordinates.append(tuple(np.asarray(coordinates[name]) for name in self.dimensions))
        for name in self.values:
            block = values[name].reshape(-1)
            self._blocks[name].append(block if there is None else block[self._there[-1]])

    def frame(self) -> pd.DataFrame:
        """Everything added, a row a number."""
        columns: dict[str, np.ndarray] = {}
        masks = [None if there is None else there.cpu().numpy() for there in self._there]
        # Each block is spread out once, for all its dimensions.
        spread = [np.meshgrid(*block, indexing="ij", copy=False) for block in self._coordinates]
        for index, name in enumerate(self.dimensions):
            rows = [block[index].reshape(-1) for block in spread]
            rows = [one if mask is None else one[mask] for one, mask in zip(rows, masks, strict=True)]
            columns[name] = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        for name, blocks in self._blocks.items():
            columns[name] = torch.cat(blocks).cpu().numpy() if blocks else np.zeros(0)
        return pd.DataFrame(columns)
