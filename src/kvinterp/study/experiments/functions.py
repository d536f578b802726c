"""Results of functions that are no commands: how they are kept, read and drawn, as an experiment says it of a command's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.comparison.findings import charts_of_comparisons, headline_of, rows_between
from kvinterp.patching import findings as of
from kvinterp.study.experiments.base import Experiment

if TYPE_CHECKING:
    from kvinterp.findings import Chart


class OfFunction(Experiment):
    """What a function found: it has no cells, since nothing but the function makes it."""

    VERB: ClassVar = ""

    @classmethod
    def verb(cls) -> str:
        """What the result says that made it."""
        return cls.VERB

    @classmethod
    def asks(cls) -> str:
        """What the class says: several share this file."""
        return inspect.cleandoc(cls.__doc__ or "")

    def __reduce__(self) -> Any:
        """By its name, under which no module has its class."""
        return _named, (self.VERB,)


def _named(verb: str) -> Experiment:
    return FUNCTIONS[verb]()


def _charts_of_several(found: Any) -> dict[str, Chart]:
    """KL by step and drift by layer, a line a pair."""
    charts = charts_of_comparisons({pair.provenance["paths"]["b"]: pair for pair in found})
    return {name: charts[name] for name in ("kl_by_step", "drift_by_layer") if name in charts}


def _function(verb: str, result: str, question: str, *shown: Callable[[Any], Any], drawn: tuple[str, ...] = ()) -> Any:
    said = {"__doc__": question, "VERB": verb, "RESULT": f"kvinterp.{result}", "SHOWN": shown, "DRAWN": drawn}
    return type("OfFunction", (OfFunction,), said)


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
        _function(
            "compare-several",
            "comparison:Comparisons",
            "How far apart are a path and several others?",
            lambda found: headline_of(found.pairs),
            lambda found: rows_between(found.pairs),
            _charts_of_several,
            drawn=("kl_by_step", "drift_by_layer"),
        ),
    )
}
"""How what a function found is kept, by what the result says that made it."""
