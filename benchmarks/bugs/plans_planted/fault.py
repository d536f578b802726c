"""What a planted fault of a named program is, and how that program is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from bank.clean import ARCHITECTURES
from bank.small import small
from torch import nn

from kvinterp.auditing.checks import Check
from kvinterp.auditing.programs.names import programs_named
from kvinterp.auditing.uses import uses_of
from kvinterp.models import wrap

NOT_RIGHT = ("wrong", "off without a cache too")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that a program shows.

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


def checked(model: nn.Module, plan: str = "") -> list[Check]:
    """What an audit's programs, with the plan beside them, say of a model."""
    return uses_of(wrap(model), given=programs_named(plan))


def found(fault: Fault) -> Check | None:
    """The first use that is not right with the fault, and is without it; what is planted in every forward is off without a cache.

    Raises:
        AssertionError: A use of the clean model is wrong.
    """
    clean = {check.name: check.status for check in checked(fault.build(), fault.plan)}
    assert "wrong" not in clean.values(), clean
    faulty = checked(fault.plant(fault.build()), fault.plan)
    return next((check for check in faulty if check.status in NOT_RIGHT and clean.get(check.name) != check.status), None)


def placed(fault: Fault, check: Check) -> bool:
    """Whether a use that is wrong is placed in the fault's layer; where the plain forward is off no place is looked for."""
    plain = check.status != "wrong" or "without a cache the same columns are off" in check.detail
    return plain or fault.layer is None or check.layer == fault.layer
