"""What an experiment is given is looked at before a model is loaded, and is called by the name that it was given by."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kvinterp as kv
from kvinterp.commands.base import OPTION
from kvinterp.commands.registry import experiment_named, experiments


@pytest.mark.parametrize("name", experiments())
def test_a_number_below_the_least_of_its_option_is_refused_by_its_name(name: str) -> None:
    """The command line holds options to it; from Python some were taken, and one of root-cause's told by another's name."""
    kind = experiment_named(name)
    for field in dataclasses.fields(kind):
        least = field.metadata.get(OPTION, {}).get("min")
        if least is not None:
            with pytest.raises(
                kv.InputError, match=rf"^{field.name}={least - 1} was given: expected a whole number of at least"
            ):
                kind(**{field.name: least - 1}).check()


class Reached(Exception):
    """Raised in the place of the work."""


MODEL = {"model", "kind", "dtype", "device", "attention", "prompts"}


@pytest.mark.parametrize(
    ("name", "work", "elsewhere"),
    [
        ("compare", "kvinterp.commands.compare.compare_each", MODEL),
        # Its paths go by the names that a sweep has for them.
        ("patch", "kvinterp.commands.patch.sweep", {*MODEL, "sweep", "preset", "examples", "a", "b"}),
    ],
)
def test_every_option_reaches_the_work(name: str, work: str, elsewhere: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the experiment does not hand on would change nothing and be printed all the same."""
    given: dict[str, Any] = {}

    def reached(*_: Any, **options: Any) -> None:
        given.update(options)
        raise Reached

    asked = experiment_named(name)("zoo:gqa2-mini", prompts="arithmetic:1")
    (cell,) = asked.cells()
    monkeypatch.setattr(work, reached)
    with pytest.raises(Reached):
        cell.function([cell.key], None)
    assert {field.name for field in dataclasses.fields(asked)} - elsewhere <= given.keys()
