"""What a planted bug's record says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from bank.clean import ARCHITECTURES
from bank.small import small

Plant = Callable[[nn.Module, Any], None]
"""Given a model, and what has pytest's `monkeypatch.setattr`."""


@dataclasses.dataclass(frozen=True)
class Bug:
    """A planted bug, and what an audit of it must say.

    Args:
        name: Its name in tests and tables.
        architecture: The transformers model type.
        plant: Puts it into a model; `monkeypatch` undoes what is planted outside the model.
        layers: The layers any of which is right as `first_layer`; None among them where the place is in no layer.
        tensors: What `tensor` may begin with; empty where more than one honest name exists.
        error: Measured relative difference of the logits in the model's own dtype, on the path `path`.
        position: The first position that is wrong, where there is only one answer.
        config: Of the model, over the architecture's.
        dtype: Of the model to audit.
        lengths: Prompts long enough to reach it.
        path: The plain path that shows it: `steps`, `chunks` (chunks of 4), `batch` (two prompts, one left-padded), `generate`,
            `static` (a StaticCache), `crop` (steps, crop, steps again), `reorder` (a batch's rows exchanged), `thirds` (three rows, each
            in the next one's place), `repeat` (rows repeated), `sixteen` (a chunk of 16), `generate-padded` (with
            left padding), `select` (rows selected), `mask` (a mask and no positions), `long` (140 tokens),
            `end` (of a context of 256), `one` (a prompt of one token), `twice` (after another prompt),
            `padded-chunks` (as `batch`, four tokens at once).
    """

    name: str
    architecture: str
    plant: Plant
    layers: tuple[int | None, ...]
    tensors: tuple[str, ...]
    error: float
    position: int | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    lengths: tuple[int, ...] = (9, 33)
    path: str = "steps"

    def build(self) -> nn.Module:
        """The model before anything is planted."""
        return small(self.architecture, **ARCHITECTURES.get(self.architecture, {}) | {"dtype": self.dtype} | self.config)
