"""Results of functions that are no commands: how they are kept, read and drawn, as an experiment says it of a command's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.study.experiments.base import Experiment
from kvinterp.study.experiments.outcome import Outcome
from kvinterp.study.findings import findings_of
from kvinterp.study.findings.of_comparison import charts_of_comparisons, headline_of, rows_between
from kvinterp.study.findings.of_patching import (
    charts_of_activation_patching,
    charts_of_attribution,
    charts_of_lens,
    headline_of_activation_patching,
    headline_of_attribution,
    headline_of_lens,
    rows_of_activation_patching,
    rows_of_attribution,
    rows_of_lens,
)

if TYPE_CHECKING:
    import pandas as pd

    from kvinterp.study.cells import Cell, Made
    from kvinterp.study.findings import Chart


class _OfFunction(Experiment):
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

    def cells(self) -> list[Cell]:
        """None."""
        return []

    def reduce(self, made: Mapping[str, Made], settings: Mapping[str, Any], folder: Path | None) -> Outcome:
        """Nothing, without cells."""
        return Outcome(None)


class _Localise(_OfFunction):
    """Where is the difference at the first decode step made?"""

    VERB: ClassVar = "localise"
    RESULT: ClassVar = "kvinterp.patching:Cause"


class _ActivationPatching(_OfFunction):
    """Which place of a clean prompt restores its answer in a corrupted one?"""

    VERB: ClassVar = "activation-patching"
    RESULT: ClassVar = "kvinterp.patching:ActivationPatching"
    SHOWN: ClassVar = (headline_of_activation_patching, rows_of_activation_patching, charts_of_activation_patching)


class _LogitLens(_OfFunction):
    """Behind which layer does the difference become visible in token space?"""

    VERB: ClassVar = "logit-lens"
    RESULT: ClassVar = "kvinterp.comparison.lens:LogitLens"
    SHOWN: ClassVar = (headline_of_lens, rows_of_lens, charts_of_lens)


class _LogitAttribution(_OfFunction):
    """Which layer, head and MLP wrote the difference of the logits?"""

    VERB: ClassVar = "logit-attribution"
    RESULT: ClassVar = "kvinterp.comparison.attribution:LogitAttribution"
    SHOWN: ClassVar = (headline_of_attribution, rows_of_attribution, charts_of_attribution)


class _Several(_OfFunction):
    """How far apart are a path and several others?"""

    VERB: ClassVar = "compare-several"
    RESULT: ClassVar = "kvinterp.comparison:Comparisons"
    DRAWN: ClassVar = ("kl_by_step", "drift_by_layer")

    def read(self, folder: Path) -> Outcome:
        """With the prompts."""
        from kvinterp.data import load_prompts
        from kvinterp.study.results import PROMPTS

        outcome = super().read(folder)
        for pair in outcome.result.pairs:
            pair.prompts = load_prompts(folder / PROMPTS) if PROMPTS in outcome.summary["sha256"] else []
        return outcome

    def headline(self, outcome: Outcome) -> list[str]:
        """Of all pairs together."""
        return headline_of(outcome.result.pairs)

    def findings(self, outcome: Outcome) -> pd.DataFrame:
        """Those of each pair."""
        return findings_of(rows_between(outcome.result.pairs))

    def charts(self, outcome: Outcome) -> dict[str, Chart]:
        """KL by step and drift by layer, a line a pair."""
        found = charts_of_comparisons({pair.provenance["paths"]["b"]: pair for pair in outcome.result})
        return {name: found[name] for name in self.DRAWN if name in found}


_KINDS = (_ActivationPatching, _Localise, _LogitAttribution, _LogitLens, _Several)
FUNCTIONS: dict[str, type[Experiment]] = {kind.VERB: kind for kind in _KINDS}
"""How what a function found is kept, by what the result says that made it."""


def prompts_of(found: Any) -> dict[str, str]:
    """The prompts of a result as the text of their file, where it knows them."""
    from kvinterp.study.results import PROMPTS, prompt_lines

    prompts = getattr(found, "prompts", ())
    return {PROMPTS: prompt_lines(prompts)} if prompts else {}
