"""What decided each token: the probability that a path gave its own, and how far the draw was from falling otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def chance(logits: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each row's token under the softmax of its logits, float64; no temperature, no cut.

    Args:
        logits: ``[batch, vocab]``.
        tokens: ``[batch]``.
    """
    # Softmax and not a sum of exponentials of one's own: a row's bits do not depend on the batch it is in.
    return torch.softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]


class Choices:
    """Gathers, step by step, what decided the tokens of both paths; brought to the host once."""

    def __init__(self) -> None:
        self._chances: list[Tensor] = []

    def add(self, logits: Sequence[Tensor], chosen: Sequence[Tensor]) -> None:
        """Adds a step: of each path the logits and the tokens it chose."""
        self._chances.append(torch.stack([*map(chance, logits, chosen)]))

    def of_rows(self, distances: Sequence[Tensor], other: int = 1) -> list[dict[str, np.ndarray]]:
        """For each row of the batch the columns that go into its table of steps.

        Args:
            distances: How far each choice was from another one, path by path and step by step; infinite for never.
            other: The number of the path beside the first.
        """
        chances = torch.stack(self._chances, -1).cpu().numpy()
        paths = chances.shape[0]
        far = torch.stack([torch.stack([*distances[path::paths]], -1) for path in range(paths)]).cpu().numpy()
        # No other token could be drawn: there is no distance.
        far = np.where(np.isinf(far), np.nan, far)
        return [
            {f"{name}_{side}": values[path, row] for name, values in (("probability", chances), ("boundary", far))
             for side, path in (("a", 0), ("b", other))}
            for row in range(chances.shape[1])
        ]  # fmt: skip
