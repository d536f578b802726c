"""Results of functions that are no commands: how they are kept, read and drawn, as an experiment says it of a command's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from kvinterp.patching import findings as of
from kvinterp.study.experiments.base import Experiment


class OfFunction(Experiment):
    """What a function found: it has no cells, since nothing but the function makes it."""

    VERB: ClassVar = ""

    @classmethod
    def verb(cls) -> str:
        """What the result says that made it."""
        return cls.VERB

    @classmethod
    def question(cls) -> str:
        """What the class says: several share this file."""
        return inspect.cleandoc(cls.__doc__ or "")

    def __reduce__(self) -> Any:
        """By its name, under which no module has its class."""
        return _named, (self.VERB,)


def _named(verb: str) -> Experiment:
    return FUNCTIONS[verb]()


def _function(verb: str, result: str, question: str, *shown: Callable[[Any], Any], drawn: tuple[str, ...] = ()) -> Any:
    attributes = {"__doc__": question, "VERB": verb, "RESULT": f"kvinterp.{result}", "SHOWN": shown, "DRAWN": drawn}
    return type("OfFunction", (OfFunction,), attributes)


FUNCTIONS: dict[str, type[Experiment]] = {
    kind.verb(): kind
    for kind in (
        _function(
            "activation-patching",
            "patching:ActivationPatching",
            "Which place of a clean prompt restores its answer in a corrupted one?",
            of.headline_of_activation_patching,
            of.rows_of_activation_patching,
            of.charts_of_activation_patching,
        ),
        _function("localise", "patching:Cause", "Where is the difference at the first decode step made?"),
        _function(
            "logit-lens",
            "comparison.lens:LogitLens",
            "Behind which layer does the difference become visible in token space?",
            of.headline_of_lens,
            of.rows_of_lens,
            of.charts_of_lens,
        ),
    )
}
"""How what a function found is kept, by what the result says that made it."""
