"""What an experiment is given is looked at before a model is loaded, and is called by the name that it was given by."""

from __future__ import annotations

import dataclasses

import pytest

import kvinterp as kv
from kvinterp.study.experiments.base import OPTION
from kvinterp.study.experiments.registry import experiment_named, experiments


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


@pytest.mark.parametrize(("name", "elsewhere"), [("compare", set()), ("patch", {"sweep", "preset"})])
def test_every_option_reaches_the_work(name: str, elsewhere: set[str]) -> None:
    """One that neither the function takes nor the experiment hands on would change nothing and be printed all the same."""
    asked = experiment_named(name)("zoo:gqa2-mini", prompts="arithmetic:1")
    settings = asked.cells()[0].settings
    assert {field.name for field in dataclasses.fields(asked)} - elsewhere <= {*settings, *settings["model"]}
