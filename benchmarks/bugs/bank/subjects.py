"""Everything a detector is tried on: planted bugs, planted faults of named programs, clean models."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

from bank.bug import Bug
from bank.bugs import FAMILIES
from bank.calls import FAULTS
from bank.clean import CLEAN

CLEAN_KIND = "clean"


class Patches(contextlib.ExitStack):
    """Undoes what is planted outside a model, as pytest's `monkeypatch` does."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end."""
        self.enter_context(mock.patch.object(target, name, value))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that a detector looks at.

    Args:
        name: Its name.
        kind: What was planted: the family and the first tensor that is wrong; `clean`, where nothing was.
        make: Makes it; what it plants outside the model goes with the patches.
        dtype: Of the model.
        lengths: Prompts long enough to reach the bug.
        layers: The layers any of which is right; empty where none is said.
        tensors: What the tensor's name may begin with; empty where more than one honest name exists.
    """

    name: str
    kind: str
    make: Callable[[Patches], nn.Module]
    dtype: str = "float32"
    lengths: tuple[int, ...] = (9, 33)
    layers: tuple[int | None, ...] = ()
    tensors: tuple[str, ...] = ()

    def placed(self, layer: int | None, tensor: str) -> bool:
        """Whether a place is a right one."""
        return layer in self.layers and (not self.tensors or tensor.startswith(self.tensors))


def _planted(bug: Bug, patches: Patches) -> nn.Module:
    model = bug.build()
    bug.plant(model, patches)
    return model


def subjects() -> dict[str, Subject]:
    """All of them by name."""
    found = [
        Subject(bug.name, f"{family}: {(*bug.tensors, 'other')[0]}", partial(_planted, bug), bug.dtype, bug.lengths,
                bug.layers, bug.tensors)
        for family, bugs in FAMILIES.items()
        for bug in bugs
    ]  # fmt: skip
    found += [
        Subject(f"call: {name}", f"call: {fault.plan.partition('(')[0]}",
                lambda patches, fault=fault: fault.plant(fault.build(), patches), layers=fault.layers)
        for name, fault in FAULTS.items()
    ]  # fmt: skip
    found += _of_plans()
    found += [
        Subject(f"clean: {name}", CLEAN_KIND, lambda _, one=one: one.build(), one.dtype) for name, one in CLEAN.items()
    ]
    named = {subject.name: subject for subject in found}
    assert len(named) == len(found), "two subjects have one name"
    return named


def _of_plans() -> Iterator[Subject]:
    """The planted faults of named programs."""
    from plans_planted.everything import FAULTS as PLANS

    for name, fault in PLANS.items():
        layers = () if fault.layer is None else (fault.layer,)
        kind = f"plan: {fault.plan.partition('(')[0]}"
        yield Subject(f"plan: {name}", kind, lambda _, fault=fault: fault.plant(fault.build("float32")), layers=layers)
