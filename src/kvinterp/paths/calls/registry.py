"""Finds every call plan in this folder, so that a new one is one new file; and reads one, or several that go together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import kvinterp.paths.calls as folder
from kvinterp.common import spec
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.paths.calls.base import Call, Feeder, Loop

CALLS = spec.plugins_of(folder, Call)


@dataclasses.dataclass(frozen=True)
class Together(Call):
    """Several plans at once, as in ``padded(left,5)+static``: one at most says what is fed, the others how it is run.

    Attributes:
        plans: At least two.
    """

    plans: tuple[Call, ...]

    def __post_init__(self) -> None:
        feeding = [str(plan) for plan in self.plans if plan.feeds]
        kinds = [type(plan) for plan in self.plans]
        if len(feeding) > 1 or len(set(kinds)) < len(kinds):
            raise InputError(
                f"call={self} was given, of which each says what is fed or the same thing twice: leave one out."
            )
        for name, together in (("forms", self._forms()), ("policies", all(plan.policies for plan in self.plans))):
            object.__setattr__(self, name, together)
        object.__setattr__(self, "kernels", all(plan.kernels for plan in self.plans))

    def _forms(self) -> tuple[str, ...]:
        return tuple(form for form in ("cached", "recompute") if all(form in plan.forms for plan in self.plans))

    @property
    def options(self) -> dict[str, Any]:
        """Those of all."""
        return {name: value for plan in self.plans for name, value in plan.options.items()}

    @property
    def rest(self) -> Call | None:
        """Those that are no name for an option."""
        return together([plan for plan in self.plans if not plan.options])

    @contextlib.contextmanager
    def running(self, feeder: Feeder) -> Iterator[None]:
        """As all of them run it."""
        with contextlib.ExitStack() as stack:
            for plan in self.plans:
                stack.enter_context(plan.running(feeder))
            yield

    def feed(self, feeder: Feeder) -> Loop:
        """As the one that feeds does, run as the others say."""
        feeding = next((plan for plan in self.plans if plan.feeds), None)
        if feeding is None:
            yield from super().feed(feeder)
            return
        with contextlib.ExitStack() as stack:
            for plan in self.plans:
                stack.enter_context(plan.running(feeder))
            yield from feeding.feed(feeder)

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """The most that any takes."""
        rooms = zip(*(plan.room(length, steps) for plan in self.plans), strict=True)
        rows, before, after = map(max, rooms)
        return rows, before, after

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """What any refuses."""
        for plan in self.plans:
            plan.check(adapter, length, steps)

    def seen(self, cache: str, length: int) -> dict[str, int]:
        """What all of them saw."""
        return {name: count for plan in self.plans for name, count in plan.seen(cache, length).items()}

    def missing(self, witness: dict[str, int]) -> str:
        """What is missing of the first of which something is."""
        return next(filter(None, (plan.missing(witness) for plan in self.plans)), "")

    def __str__(self) -> str:
        """Their text forms."""
        return "+".join(map(str, self.plans))


def together(plans: list[Call]) -> Call | None:
    """One plan of several, the only one, or None where there is none."""
    return Together(tuple(plans)) if len(plans) > 1 else plans[0] if plans else None


def call_named(given: object) -> Call | None:
    """Reads a call plan's text form, such as ``padded(left,5)`` or ``padded(left,5)+static``; None for None.

    Raises:
        InputError: A name is unknown, the values do not fit, or two do not go together.
    """
    if given is None or isinstance(given, Call):
        return given
    if not isinstance(given, str):
        raise InputError(
            f"call={given!r} was given: expected a call plan, one of {', '.join(CALLS)}, as in 'padded(left,5)'."
        )
    hint = "Values go in brackets, as in padded(left,5); plans that go together are joined by +."
    return together([spec.read("call plan", part, CALLS, hint) for part in spec.split(given, "+") or [given]])
