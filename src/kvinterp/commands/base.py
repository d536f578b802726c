"""What every experiment is: a question with its choices as fields, answered by cells of work and
what they are reduced to.

Everything that the command line shows of an experiment stands in its file: the options are the
fields made by :func:`option` and :func:`argument`, the help is the file's own docstring, the
command's name is that of the file. The help of the command line reads all this from the source
(:mod:`kvinterp.common.source`), so that no experiment is imported for it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import pandas as pd
from typing_extensions import dataclass_transform

from kvinterp.commands import running
from kvinterp.commands.cells import Cell, joined, loaded
from kvinterp.commands.choices import check_choices
from kvinterp.commands.circumstances import circumstances
from kvinterp.commands.options import OPTION, argument, model, option, shared, take_parameters
from kvinterp.commands.results import records
from kvinterp.common.numbers import models_of
from kvinterp.common.result import Result
from kvinterp.common.store import CellResult
from kvinterp.common.words import dtype_word, unwrapped
from kvinterp.data import Prompt, load_prompts
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Finding, lines_of
from kvinterp.models import Adapter
from kvinterp.models.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tables: TypeAlias = dict[str, pd.DataFrame]
Rows: TypeAlias = Iterable[Finding]
"""What was found, a row each."""
Charts: TypeAlias = dict[str, Chart]
CellResults: TypeAlias = Mapping[str, CellResult]
"""What each cell gave, by its key."""

SAID, WIDTH = 5, 120
"""The command prints at most so many lines of what was found, each of at most so many
characters.
"""


def numbered(keys: Iterable[str]) -> dict[int, str]:
    """Keys of cells by the number that each ends with, as in ``example-3``."""
    return {int(key.rpartition("-")[2]): key for key in keys}


def brief(sentences: Sequence[str]) -> list[str]:
    """The first sentences in at most SAID lines, and how many more there are; the first is there
    whole.
    """
    lines: list[str] = []
    for number, sentence in enumerate(sentences):
        wrapped = textwrap.wrap(
            sentence, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        if lines and len(lines) + len(wrapped) > SAID:
            return [
                *lines,
                f"{len(sentences) - number} more sentences on the page and in summary.json.",
            ]
        lines += wrapped
    return lines


# Experiments --------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(argument, model, option, shared))
@dataclasses.dataclass(frozen=True)
class Experiment:
    """A question asked of one or more models; the fields are its choices.

    Every class that derives from it is a frozen dataclass, by being one.
    """

    OVERWRITES: ClassVar[str] = "asked"
    """``"always"``: the command writes over its own earlier result without ``--overwrite``."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """The names of what else it writes, beside tables, figures and the summary."""
    SUMMED: ClassVar[tuple[str, ...]] = ()
    """The names of the tables whose rows ``summary.json`` has too."""
    NOTED: ClassVar[tuple[str, ...]] = ()
    """The names of the choices that stand in the provenance, beside the model."""
    RESULT: ClassVar[type[Result]] = Result
    """The class of its result."""
    PARTIAL: ClassVar[str] = "no"
    """``"yes"``: an interrupted run writes the tables of what is finished."""

    TAKEN: ClassVar[Mapping[str, str]] = {}
    """The parameters of the function that it runs, by the names of the options that give them."""

    def __init_subclass__(cls, of: str = "", without: Sequence[str] = (), **named: str) -> None:
        if of:
            cls.TAKEN = take_parameters(cls, of, without, named)
        dataclasses.dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        # By one name, so that fp16 goes on with what float16 began.
        if isinstance(named := vars(self).get("dtype"), str):
            object.__setattr__(self, "dtype", dtype_word(named))

    @classmethod
    def verb(cls) -> str:
        """The name of its command: that of its file."""
        return cls.__module__.rpartition(".")[2].replace("_", "-")

    # What each experiment says --------------------------------------------------------------------

    check = check_choices
    """Looks at what was given, as far as no model is needed."""

    def cells(self) -> list[Cell]:
        """The pieces of work, once :meth:`check` has looked at what was given."""
        return []

    def second_stage(self, results: CellResults) -> list[Cell]:
        """The cells of a second stage, which are known only from what the first gave: on the
        examples of the highest KL, say.

        Args:
            results: What every cell of the first stage gave. A run that is taken up again asks once
                more, so that the answer must rest on this and on the choices alone.
        """
        return []

    def reduce(self, results: CellResults) -> Result:
        """What the cells come to: its tables, and what ran.

        Args:
            results: What each cell gave, by its key; some where an interrupted run writes what it
                has.
        """
        tables = self.tables(results)
        return Result(tables, {**self.summary(tables), "provenance": self.provenances()})

    def tables(self, results: CellResults) -> Tables:
        """Its tables, those of all models one below the other."""
        return joined(results)

    def summary(self, tables: Tables) -> dict[str, Any]:
        """What ``summary.json`` holds beside the provenance."""
        return {name: records(tables[name]) for name in self.SUMMED}

    def provenances(self) -> dict[str, Any]:
        """What each model was run with, by its name."""
        return {
            adapter.facts.name: provenance(adapter, **self.noted()) for adapter in self.adapters()
        }

    def noted(self) -> dict[str, Any]:
        """What the provenance says beside the model."""
        return {name: getattr(self, name) for name in self.NOTED}

    def rows(self, result: Any, /) -> Rows | None:
        """What was found, a row each (:func:`kvinterp.findings.finding`); None where its sentences
        say it.
        """
        return result.rows()  # type: ignore[no-any-return]

    def headline(self, result: Any, /) -> list[str]:
        """What was found in one or two sentences, and warnings; the rest stands in
        :meth:`findings`.
        """
        return result.headline()  # type: ignore[no-any-return]

    def charts(self, result: Any, /) -> Charts:
        """Its figures by name, as data."""
        return result.charts()  # type: ignore[no-any-return]

    def drawn(self, result: Any) -> Charts:
        """Its charts with the panels that have anything to show."""
        charts = {}
        for name, chart in self.charts(result).items():
            if panels := [panel for panel in chart.panels if len(panel.table)]:
                charts[name] = dataclasses.replace(chart, panels=panels)
        return charts

    def sentences(self, result: Result) -> list[str]:
        """What was found, a sentence a line."""
        lines = result.contents()[1].get("reading")
        if lines is None and "findings" in running.with_findings(self, result).tables:
            lines = [*self.headline(result), *lines_of(result.tables["findings"])]
        return list(lines or ())

    def page_parts(self, result: Result) -> list[Any]:
        """What stands on the page behind the findings; nothing unless an experiment says so."""
        return []

    def has_page(self, result: Result) -> bool:
        """Whether there is anything to draw and to show on a page."""
        return True

    def figures(self, result: Result) -> dict[str, Figure]:
        """Its figures by name; nothing is written."""
        from kvinterp.report.charts import draw_chart

        models = [*result.provenances().values()]
        return {name: draw_chart(chart, models) for name, chart in self.drawn(result).items()}

    def print_result(self, result: Result, echo: Callable[..., None]) -> None:
        """Prints what the command prints.

        Args:
            result: What was found.
            echo: Prints a line; with ``err=True`` on standard error.
        """
        lines = brief(self.sentences(result))
        first = "".join(lines[:1])
        unsaid = [
            about
            for about in result.provenances().values()
            if f"({about.get('kind')}, {about.get('dtype')}" not in first
        ]
        for line in filter(None, [models_of(unsaid), *lines]):
            echo(line)
        if result.folder is not None:
            files = "tables, figures" if (result.folder / "figures").is_dir() else "tables"
            echo(
                f"\npage  {result.folder / 'report.html'}\nmore  {result.folder}: {files}, summary.json"
            )

    @classmethod
    def question(cls) -> str:
        """What is asked: the class's question, a page's heading, and what its file says."""
        return "\n\n".join(unwrapped(of.__doc__ or "") for of in (cls, sys.modules[cls.__module__]))

    def result_of(self, tables: Tables, summary: Mapping[str, Any]) -> Result:
        """What was found, from its tables and summary alone: without a model its figures and
        sentences are made again.
        """
        return self.RESULT.read(tables, summary)  # type: ignore[no-any-return]

    def choices(self, *names: str) -> dict[str, Any]:
        """Gives some of its choices by name; without names all that decide the numbers."""
        fields = dataclasses.fields(self)
        decide = (
            field.name
            for field in fields
            if field.metadata.get(OPTION, {}).get("decides") != "nothing"
        )
        return {name: getattr(self, name) for name in names or decide}

    def arguments(self) -> dict[str, Any]:
        """What its options give to the function that it runs."""
        return {parameter: getattr(self, name) for name, parameter in self.TAKEN.items()}

    def model_settings(self, name: str | None = None) -> dict[str, Any]:
        """The plain settings of a model, by which a cell loads it.

        Args:
            name: Its name; that of the option ``model`` unless given.
        """
        fields = vars(self)
        given = {"name": str(fields["model"] if name is None else name)}
        return given | {
            option: fields[option]
            for option in ("kind", "dtype", "device", "attention")
            if option in fields
        }

    @functools.cached_property
    def prompt_list(self) -> list[Prompt]:
        """What the option ``prompts`` stands for, read once."""
        return load_prompts(vars(self)["prompts"])

    def adapter(self, name: str | None = None) -> Adapter:
        """A model it is asked of, loaded: that of a name, or of the option ``model``."""
        return loaded(self.model_settings(name))  # type: ignore[no-any-return]

    def adapters(self) -> list[Adapter]:
        """The models it is asked of, loaded: those of the option ``models`` or ``model``, where
        there is one.
        """
        return [
            self.adapter(name)
            for name in vars(self).get("models", [None] * ("model" in vars(self)))
        ]

    def settings(self) -> dict[str, Any]:
        """Everything that decides what the tables will hold: choices, prompts, and the
        circumstances of each model.
        """
        settings, made_with = running.asked(self), list(map(circumstances, self.adapters()))
        by_number = {str(number): about for number, about in enumerate(made_with)}
        return {**settings, "made_with": made_with[0] if len(made_with) == 1 else by_number}

    run = running.run
    save = running.save
    report = running.report
    card = running.card


class OfModels(Experiment):
    """An experiment on some models, in float16 where no other dtype can be chosen, and on
    prompts.
    """

    models: tuple[str, ...] = argument(
        ("zoo:mistral-mini",), "zoo:NAME, checkpoint folders or hub ids."
    )
    prompts: str = shared("prompts", "arithmetic:20")
    kind: str = shared("kind")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    def model_settings(self, name: str | None = None) -> dict[str, Any]:
        """A model with its weights in float16, where no other dtype can be chosen."""
        return {"dtype": "float16", **super().model_settings(name)}

    def check(self) -> None:
        """The names of the models too, by which the tables tell them apart."""
        super().check()
        if len(set(self.models)) < len(self.models):
            raise InputError(f"the models {', '.join(self.models)} name one twice: give each once.")

    def numbered_models(self) -> list[tuple[int, str, Adapter]]:
        """The number of each model, the name that was given for it, and the model."""
        return [(number, name, self.adapter(name)) for number, name in enumerate(self.models)]


class OfModel(Experiment):
    """An experiment on one model."""

    model: str = model()
    _: dataclasses.KW_ONLY
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    def provenances(self) -> dict[str, Any]:
        """What the model was run with."""
        (about,) = super().provenances().values()
        return about  # type: ignore[no-any-return]
