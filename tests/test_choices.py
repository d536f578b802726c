"""A choice that is printed is one that was used: every option of every verb changes the result, or is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kvinterp as kv
from choices import ELSEWHERE, FREE, REFUSED, VERBS, Keeps, Loads, Writes
from kvinterp.commands import base, cells
from kvinterp.commands.registry import experiment_named, experiments
from kvinterp.common.files import strict_json
from kvinterp.models import zoo


def options_of(verb: str) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(experiment_named(verb)) if field.init}


CASES = [(verb, option) for verb, (_, options) in VERBS.items() for option in options]


@pytest.mark.parametrize("verb", experiments())
def test_every_option_of_every_verb_has_its_place_in_the_table(verb: str) -> None:
    _, listed = VERBS.get(verb, ({}, {}))
    missing = sorted(set(options_of(verb)) - set(listed) - {option for of, option in ELSEWHERE if of == verb})
    assert not missing, (
        f"add to VERBS[{verb!r}] of tests/choices.py a value of {', '.join(missing)} that changes the result"
    )
    assert not set(listed) - set(options_of(verb)), f"VERBS[{verb!r}] of tests/choices.py has options that there are not"


# What changes ------------------------------------------------------------------------------------------------------------


_MADE: dict[str, tuple[str, str]] = {}


def ran(verb: str, choices: dict[str, Any], folder: Path) -> tuple[str, str]:
    """What a verb's tables and summary hold, and what the summary says of what made it."""
    key = f"{verb} {sorted(choices.items())!r}"
    if key not in _MADE:
        outcome = experiment_named(verb)(**choices).run(None, progress="none", figures="none")
        summary = outcome.written()[1]
        comparisons = summary.get("comparisons", {})
        tables = {name: _rounded(table) for name, table in outcome.tables.items()}
        told = {name: said for name, said in summary.items() if name not in ("settings", "choices", "files", "cells")}
        _MADE[key] = (
            strict_json([tables, _without(told, "provenance"), sorted(comparisons)]),
            strict_json(_only(summary, "provenance")),
        )
    return _MADE[key]


def _rounded(table: pd.DataFrame) -> Any:
    # Where it was done is in the table of a study's cells.
    return json.loads(table.drop(columns=["settings", "key"], errors="ignore").to_json(orient="split", double_precision=15))


def _without(told: Any, name: str) -> Any:
    if isinstance(told, dict):
        return {str(key): _without(value, name) for key, value in told.items() if key not in (name, "settings", "seconds")}
    return [_without(each, name) for each in told] if isinstance(told, list | tuple) else told


def _only(told: Any, name: str) -> Any:
    return {str(key): value for key, value in told.items() if key == name}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds what some values name: a model with a chat template."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    return tmp_path


def prepare(folder: Path) -> None:
    """Writes what some values name."""
    shutil.copytree(zoo.folder("gqa2-mini"), folder / "templated")
    place = folder / "templated" / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    place.write_text(json.dumps({**json.loads(place.read_text()), "chat_template": template}))


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize(("verb", "option"), CASES)
def test_a_value_that_changes_the_result_does(verb: str, option: str, there: Path) -> None:
    """A study ran 20 prompts, greedy, 24 steps, where its folder said one prompt, sampled, 3 steps."""
    base, options = VERBS[verb]
    what = options[option]
    before = {**base, **what.beside}
    after = {**before, option: what.value}
    if isinstance(what, Writes):
        ran(verb, {**before, option: Path(what.value)}, there / "after")
        assert (there / what.value).is_file()
        return
    one, other = ran(verb, before, there / "before"), ran(verb, after, there / "after")
    said = f"{verb}: {option}={what.value!r}"
    if isinstance(what, Keeps):
        assert one[0] == other[0], f"{said} is said to change nothing, and does"
    elif isinstance(what, Loads):
        assert one != other, f"{said} changes nothing, not even what the summary says of the model"
    else:
        assert one[0] != other[0], f"{said} changes nothing"


# What is refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded is a failure."""

    def loaded(given: Any) -> None:
        raise AssertionError("a model is loaded before the choice is refused")

    modules = [sys.modules[experiment_named(verb).__module__] for verb in experiments()]
    for module in (base, cells, *modules):
        if hasattr(module, "loaded"):
            monkeypatch.setattr(module, "loaded", loaded)


@pytest.mark.parametrize(("verb", "choices", "said"), REFUSED, ids=lambda each: each if isinstance(each, str) else None)
def test_a_choice_that_nothing_would_read_is_refused(
    verb: str, choices: dict[str, Any], said: str, no_model: None, tmp_path: Path
) -> None:
    with pytest.raises(kv.InputError) as refused:
        kv.experiment(verb, **choices, out=tmp_path / "out", progress="none")
    assert said in str(refused.value)
    assert not list(tmp_path.rglob("summary.json"))


TEXTS = [
    (verb, name)
    for verb in experiments()
    for name, field in options_of(verb).items()
    if name not in FREE and ("str" in str(field.type))
]


@pytest.mark.parametrize(("verb", "option"), TEXTS)
def test_a_word_that_is_none_is_refused_before_a_model_is_loaded(
    verb: str, option: str, no_model: None, tmp_path: Path
) -> None:
    several = str(options_of(verb)[option].type).startswith("tuple")
    with pytest.raises(kv.KvinterpError) as refused:
        kv.experiment(
            verb, **{option: ["no such thing"] if several else "no such thing"}, out=tmp_path / "out", progress="none"
        )
    assert "no such thing" in str(refused.value)
    assert not list(tmp_path.rglob("*.parquet"))
