"""What a detector is, and what it says of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from bank.subjects import Subject


@dataclasses.dataclass(frozen=True)
class Found:
    """What a detector says of a model.

    Args:
        alarm: `yes`, `no` or `cannot tell`.
        said: Why, in a sentence.
        layer: The layer that it names, where it names one.
        tensor: The tensor that it names; empty where it names none.
    """

    alarm: str
    said: str
    layer: int | None = None
    tensor: str = ""


@dataclasses.dataclass(frozen=True)
class Detector:
    """A way to look for a bug in a model's cache. It is given the model, its dtype and how long prompts must be, nothing else.

    Args:
        name: Its name on the command line.
        says: What it does, in a line.
        detect: Looks.
    """

    name: str
    says: str
    detect: Callable[[Subject, nn.Module], Found]
