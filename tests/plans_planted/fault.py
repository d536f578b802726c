"""What a planted fault of a call plan is, and how a check of its plan is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

from bank.clean import ARCHITECTURES
from bank.small import small
from torch import nn

from kvinterp.auditing import exercises
from kvinterp.auditing.bench import Check
from kvinterp.auditing.called import plans_of
from kvinterp.models import wrap

PROMPTS = [[(7 * n + 3) % 131 for n in range(40)], [(11 * n + 5) % 131 for n in range(40)]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that a call plan shows.

    Attributes:
        name: Its name in tests and tables.
        plan: The text form of the plan that shows it.
        plant: Makes the buggy model from a clean one, which it may change.
        layer: The first block that is wrong, the number of blocks for the logits; None where more than one answer is honest.
        architecture: The transformers model type of the clean model.
        config: Of it, over the architecture's own.
    """

    name: str
    plan: str
    plant: Callable[[nn.Module], nn.Module]
    layer: int | None = None
    architecture: str = "llama"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, dtype: str = "float64") -> nn.Module:
        """The clean model."""
        return small(self.architecture, **ARCHITECTURES.get(self.architecture, {}) | {"dtype": dtype} | self.config)


def named(*faults: Fault) -> dict[str, Fault]:
    """Faults by name."""
    found = {fault.name: fault for fault in faults}
    assert len(found) == len(faults), "two faults have one name"
    return found


def checked(model: nn.Module, plan: str) -> Check:
    """What an audit's check of one plan says of a model."""
    with mock.patch.object(exercises, "CHECKS", {}):
        (found,) = exercises.exercise(wrap(model), PROMPTS, calls=plans_of(plan))
    return found
