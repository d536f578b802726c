"""An option is declared once: where a command runs a function, in the function's ``def`` line and docstring."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import kvinterp as kv
from kvinterp.commands.base import Experiment
from kvinterp.commands.options import _DECLARED, OPTION, option
from kvinterp.commands.registry import experiment_named, experiment_read, experiments
from kvinterp.common.source import file_of, parameters
from kvinterp.comparison import comparing

RUN = {verb: experiment_named(verb) for verb in experiments() if experiment_named(verb).TAKEN}
OWN = {
    # A preset sets these unless they are given, and answers are given one by one.
    "patch": {"site", "sweep", "direction", "steps", "protocol", "distance", "max_new_tokens", "answers"},
    # The function takes the step from a comparison or a trace.
    "attention": {"step"},
}
"""The options with a default of their own, by command: each has a reason."""
OTHERWISE = {"compare-traces": "two files", "turns": "a file of conversations"}
"""Commands that ask something else of what the function of their name asks, and what."""


def function_of(verb: str) -> tuple[ast.ClassDef, str]:
    """The class of a command, as it is written, and the function that it names."""
    module = experiment_named(verb).__module__
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (kind,) = [node for node in classes if any(word.arg == "of" for word in node.keywords)]
    (of,) = [word.value for word in kind.keywords if word.arg == "of"]
    return kind, str(eval(ast.unparse(of), vars(sys.modules[module])))


@pytest.mark.parametrize("verb", RUN)
def test_no_field_declares_again_what_its_function_declares(verb: str) -> None:
    kind, function = function_of(verb)
    of = parameters(function)
    fields = {ast.unparse(part.target): part for part in kind.body if isinstance(part, ast.AnnAssign)}
    defaults = set()
    for name in RUN[verb].TAKEN.keys() & fields.keys():
        call: Any = fields[name].value
        assert ast.unparse(fields[name].annotation) == "Any", f"the type of {name} is that of {function}"
        assert len(call.args) < 2, f"the help of {name} stands in the docstring of {function}"
        defaults |= {name} if call.args else set()
    assert defaults == OWN.get(verb, set()), f"the defaults stand in the def line of {function}"
    for name, parameter in RUN[verb].TAKEN.items():
        declared, said = of[parameter]
        field: Any = RUN[verb].__dataclass_fields__[name]
        assert field.metadata[OPTION]["help"] == said
        assert name in defaults or field.default == declared.default


@pytest.mark.parametrize("verb", experiments())
def test_help_is_plain_text(verb: str) -> None:
    for field in dataclasses.fields(experiment_read(verb)):
        if OPTION in field.metadata:
            said = field.metadata[OPTION]["help"]
            assert not set("`").intersection(said or "`"), f"{verb}: the help of {field.name} is {said!r}"


@pytest.mark.parametrize("verb", [verb for verb in experiments() if hasattr(kv, verb.replace("-", "_"))])
def test_a_command_with_a_function_of_its_name_takes_its_options(verb: str) -> None:
    assert verb in RUN or verb in OTHERWISE


def test_what_passes_settings_on_declares_none() -> None:
    for function in (comparing.compare_each, comparing.compare_examples):
        again = set(inspect.signature(function).parameters) & set(inspect.signature(kv.compare).parameters)
        assert again == {"model", "prompts"}


def test_what_several_commands_say_of_an_option_is_written_once() -> None:
    declared = {help for function in _DECLARED for _, help in parameters(function).values()}
    for verb in experiments():
        tree = ast.parse(file_of(experiment_named(verb).__module__).read_text(encoding="utf-8"))
        own = {
            ast.literal_eval(node.args[1])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("option", "argument")
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        }
        assert own.isdisjoint(declared), (
            f"{verb}: {own & declared}: take it with shared(), or from the function that the command runs"
        )
        declared |= own


def test_a_parameter_that_is_added_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING's walk: the function's file, and a value in tests/choices.py."""
    (tmp_path / "drilled.py").write_text(
        '''from collections.abc import Iterable
MOST = 7
def drilled(model, prompts=None, *, foo: float = 0.5, most: int | None = MOST, sites: Iterable[str] = ("kv",),
            at: Iterable[int] | int | None = None, word: "str | object" = "a", left: int = 0):
    """Does it.

    Args:
        model: A model.
        foo: How much of ``it``
            is done.

            In Python: as a share.
        most: At most so many.
        sites: Where.
        at: When.
        word: Which.
        left: Not on the command line.

    Raises:
        InputError: Never.
    """
'''
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Drilled(Experiment, of="drilled:drilled", without=("left",), word="which"):
        at: Any = option(example="0,1")
        which: Any = option(min=1)

    fields = {field.name: field for field in dataclasses.fields(Drilled)}
    declared = {name: (str(field.type), field.default) for name, field in fields.items()}
    assert declared == {
        "foo": ("float", 0.5),
        "most": ("int", 7),
        "sites": ("tuple[str, ...]", ("kv",)),
        "at": ("tuple[int, ...] | None", None),
        "which": ("str", "a"),
    }
    assert fields["foo"].metadata[OPTION] == {"help": "How much of it is done."}
    assert fields["at"].metadata[OPTION] == {"help": "When.", "example": "0,1"}
    assert Drilled(foo=0.25).arguments() == {"foo": 0.25, "most": 7, "sites": ("kv",), "at": None, "word": "a"}  # type: ignore[call-arg]
