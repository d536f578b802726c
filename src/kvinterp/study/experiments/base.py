"""What every experiment is: a question with its choices as fields, answered by cells of work and what they are reduced to.

Everything that the command line shows of an experiment stands in its file: the options are the fields made by
:func:`option` and :func:`argument`, the help is the file's own docstring, the command's name is that of the file. Heavy things
are imported where they are used, so that the help of the command line answers at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kvinterp.common.result import Result
from kvinterp.errors import InputError, unknown
from kvinterp.study.experiments.options import OPTION, model, shared

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvinterp.common.store import Made
    from kvinterp.findings import Chart
    from kvinterp.models import Adapter
    from kvinterp.study.cells import Cell

NOTHING = "nothing was finished; run the same command again"
"""What an interruption of a single piece of work leaves behind."""

Tables: TypeAlias = "dict[str, pd.DataFrame]"
Rows: TypeAlias = "list[dict[str, Any]]"
"""What findings are made of, a row each."""
Charts: TypeAlias = "dict[str, Chart]"
Parts: TypeAlias = "Mapping[str, Made]"
"""What each cell gave, by its key."""

_LONGEST = 80
"""So many characters has the name of a folder that nobody named."""
SAID, WIDTH = 5, 120
"""So many lines of what was found are printed, and so many characters to a line."""


def numbered(keys: Iterable[str]) -> dict[int, str]:
    """Keys of cells by the number that each ends with, as in ``example-3``."""
    return {int(key.rpartition("-")[2]): key for key in keys}


def _provenances(result: Result) -> list[Mapping[str, Any]]:
    """What each model of a result was run with."""
    about = result.contents()[1].get("provenance") or {}
    return list(about.values()) if all(isinstance(one, Mapping) for one in about.values()) else [about]


def brief(sentences: Sequence[str]) -> list[str]:
    """The first sentences in at most SAID lines, and how many more there are; the first is there whole."""
    lines: list[str] = []
    for number, sentence in enumerate(sentences):
        more = textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if lines and len(lines) + len(more) > SAID:
            return [*lines, f"{len(sentences) - number} more sentences on the page and in summary.json."]
        lines += more
    return lines


# Experiments -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A question asked of one or more models; the fields are its choices."""

    OUT: ClassVar[str | None] = ""
    """The folder that the command writes unless another is given: ``""``, that of :meth:`place`; None, nothing is written."""
    OVERWRITES: ClassVar[str] = "asked"
    """``"always"``: the command writes over its own earlier result without ``--overwrite``."""
    TABLES: ClassVar[tuple[str, ...]] = ()
    """The names of its tables."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """The names of what else it writes, beside tables, figures and the summary."""
    DRAWN: ClassVar[tuple[str, ...]] = ()
    """What the names of its figures begin with, where it is not the command's."""
    RESULT: ClassVar[str] = ""
    """The import name of the class of its result, which is read from tables and summary; ``""``: one of tables alone."""
    SHOWN: ClassVar[tuple[Callable[[Any], Any], ...]] = ()
    """Of its result: the headline, the findings and the charts, where it does not say them itself."""
    STEPS: ClassVar[tuple[str, ...]] = ("max_new_tokens",)
    """The fields that say how many steps are decoded, where there are any: no model is asked for more than its context."""
    UNIT: ClassVar[str] = "parts"
    """What a cell is of, in the plural."""
    INTERRUPTED: ClassVar[str] = "what was finished is on disk; the same command goes on from there"
    """What an interruption leaves behind."""
    PARTIAL: ClassVar[str] = "no"
    """``"yes"``: an interrupted run writes the tables of what is finished."""

    @classmethod
    def verb(cls) -> str:
        """The name of its command: that of its file."""
        return cls.__module__.rpartition(".")[2].replace("_", "-")

    # What each experiment says -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Looks at what was given, as far as no model is needed: see :func:`kvinterp.study.experiments.choices.check_choices`."""
        from kvinterp.study.experiments.choices import check_choices

        check_choices(self)

    def check_steps(self) -> None:
        """Raises where a model has fewer positions than steps were asked for: before any part of the work is done."""
        asked = {name: steps for name in self.STEPS if (steps := vars(self).get(name)) is not None}
        for adapter in self.adapters() if asked else ():
            for name, steps in asked.items():
                if steps > (context := adapter.facts.context):
                    raise InputError(
                        f"{name}={steps} was given, but {adapter.facts.name} has a context of {context:,} positions: decode "
                        "fewer steps."
                    )

    def cells(self) -> list[Cell]:
        """The pieces of work, once :meth:`check` has looked at what was given."""
        return []

    def then(self, made: Parts) -> list[Cell]:
        """The cells of a second stage, which are known only from what the first gave: on the examples of the highest KL, say.

        Args:
            made: What every cell of the first stage gave. A run that is taken up again asks once more, so that the answer
                must rest on this and on the choices alone.
        """
        return []

    def reduce(self, made: Parts) -> Result:
        """What the cells come to: its tables, and what ran.

        Args:
            made: What each cell gave, by its key; some where an interrupted run writes what it has.
        """
        from kvinterp.models.provenance import provenance

        about = {adapter.facts.name: provenance(adapter, **self.noted()) for adapter in self.adapters()}
        return Result(self.tables(made), {"provenance": about})

    def tables(self, made: Parts) -> Tables:
        """Its tables, those of all models one below the other."""
        from kvinterp.study.cells import joined

        return {self.TABLES[0]: joined(made)["table"]} if made else {}

    def noted(self) -> dict[str, Any]:
        """What the provenance says beside the model."""
        return {}

    def rows(self, tables: Tables) -> Any:
        """What its tables come to, a finding each (:func:`kvinterp.findings.finding`); None where its sentences say it."""
        return None

    def findings(self, result: Result) -> pd.DataFrame | None:
        """What was found, a row each: :meth:`rows`, unless it rests on more than the tables."""
        from kvinterp.findings import findings_of

        rows = self.SHOWN[1](result) if self.SHOWN else self.rows(result.tables)
        return None if rows is None else findings_of(rows)

    def headline(self, result: Result) -> list[str]:
        """What was found in one or two sentences, and warnings; the rest stands in :meth:`findings`."""
        return list(self.SHOWN[0](result)) if self.SHOWN else []

    def charts(self, result: Result) -> Charts:
        """Its figures by name, as data."""
        return dict(self.SHOWN[2](result)) if self.SHOWN else {}

    def figures(self, result: Result, folder: Path) -> list[Path]:
        """Writes its figures into a folder and returns their files."""
        from kvinterp.study.report.style import save

        return [save(figure, folder / f"{name}.png") for name, figure in self.drawings(result).items()]

    def sentences(self, result: Result) -> list[str]:
        """What was found, a sentence a line."""
        said = result.contents()[1].get("reading")
        if said is None and "findings" in self.judged(result).tables:
            from kvinterp.findings import lines_of

            said = [*self.headline(result), *lines_of(result.tables["findings"])]
        return list(said or ())

    def read(self, folder: Path) -> Result:
        """A finished result as it is in its folder.

        Raises:
            InputError: A table is missing or damaged, or is of another version of kvinterp.
        """
        from kvinterp.data import load_prompts
        from kvinterp.study.results import PROMPTS, read_summary, read_tables, reading

        summary = read_summary(folder)
        tables = read_tables(folder, summary)
        with reading(folder, summary):
            result = self.again(tables, summary)
            result.tables, result.folder = tables, folder
            result.settings = summary["settings"]
            result.choices = summary.get("choices", result.settings)
            if "prompts" in vars(result):
                vars(result)["prompts"] = load_prompts(folder / PROMPTS) if PROMPTS in summary["files"] else []
            return self.judged(result)

    def judged(self, result: Result) -> Result:
        """The same with its findings among its tables."""
        vars(result).update(VERB=self.verb(), experiment=self)
        if "findings" not in result.tables and (rows := self.findings(result)) is not None:
            result.tables = {"findings": rows.assign(experiment=self.verb()), **result.tables}
        return result

    def drawings(self, result: Result) -> dict[str, Figure]:
        """Its figures by name; nothing is written."""
        from kvinterp.study.report.charts import drawn

        models = _provenances(result)
        return {name: drawn(chart, models) for name, chart in self.charts(result).items()}

    def say(self, result: Result, echo: Callable[..., None]) -> None:
        """Prints what the command prints.

        Args:
            result: What was found.
            echo: Prints a line; with ``err=True`` on standard error.
        """
        from kvinterp.common.numbers import models_of

        lines = brief(self.sentences(result))
        first = "".join(lines[:1])
        unsaid = [of for of in _provenances(result) if "kind" in of and f"({of['kind']}, {of['dtype']}" not in first]
        for line in [models_of(unsaid), *lines] if unsaid else lines:
            echo(line)
        if result.folder is not None:
            echo(f"\npage  {result.folder / 'report.html'}\nmore  {result.folder}: tables, figures, summary.json")

    # What all of them share --------------------------------------------------------------------------------------------

    def place(self) -> Path:
        """The folder that its command writes unless one is given: ``out/VERB-MODEL``."""
        models = filter(None, (vars(self).get("model"), *vars(self).get("models", ())))
        names = [re.sub(r"[^\w.-]+", "-", re.split("[:/]", str(name).rstrip("/"))[-1]).strip("-") for name in models]
        return Path("out") / "-".join([self.verb(), *names])[:_LONGEST].rstrip("-.")

    def names(self) -> list[str]:
        """The names of the files that it writes, beside the summary and figures."""
        own = type(self)
        finds = self.SHOWN or own.findings is not Experiment.findings or own.rows is not Experiment.rows
        tables = (f"{table}.parquet" for table in (*["findings"] * bool(finds), *self.TABLES))
        return [*tables, *self.FILES, "report.html"]

    @classmethod
    def asks(cls) -> str:
        """What is asked: the class's question, a page's heading, and what its file says."""
        return "\n\n".join(inspect.cleandoc(of.__doc__ or "") for of in (cls, sys.modules[cls.__module__]))

    @classmethod
    def drawn(cls) -> tuple[str, ...]:
        """What the names of its figures begin with: its command's, unless it says otherwise."""
        return cls.DRAWN or (cls.verb().replace("-", "_"),)

    def again(self, tables: Tables, summary: Mapping[str, Any]) -> Result:
        """What was found, from its tables and summary alone: without a model its figures and sentences are made again."""
        from kvinterp.study.cells import imported

        kind: Any = imported(self.RESULT) if self.RESULT else None
        return Result(tables, summary) if kind is None else kind.read(tables, summary)

    def chosen(self) -> dict[str, Any]:
        """The choices that decide the numbers."""
        given = [field for field in dataclasses.fields(self) if field.init]
        fields = {field.name: field.metadata.get(OPTION, {}).get("decides") for field in given}
        return {name: getattr(self, name) for name, decides in fields.items() if decides != "nothing"}

    def taken(self, *names: str) -> dict[str, Any]:
        """Some of its choices."""
        return {name: getattr(self, name) for name in names}

    def named(self, name: str | None = None) -> dict[str, Any]:
        """The plain settings of a model, by which a cell loads it.

        Args:
            name: Its name; that of the option ``model`` unless given.
        """
        given = vars(self)
        wanted: dict[str, Any] = {each: given[each] for each in ("kind", "dtype", "device", "attention") if each in given}
        return {"name": str(given["model"] if name is None else name), **wanted}

    def check_reached(self) -> None:
        """Raises where a model is on a hub that cannot be reached: before torch is imported, since that takes seconds."""
        from kvinterp.models.naming import check_reached

        given = vars(self)
        for name in filter(None, (given.get("model"), *given.get("models", ()))):
            # TransformerLens has names of its own.
            if given.get("kind") not in ("hooked", "transformer_lens") or "/" in name:
                check_reached(name)

    def adapters(self) -> list[Adapter]:
        """The models it is asked of, loaded: those of the option ``models`` or ``model``, where there is one."""
        from kvinterp.study.cells import loaded

        given = vars(self)
        return [loaded(self.named(name)) for name in given.get("models", [given["model"]] if "model" in given else [])]

    def asked(self) -> dict[str, Any]:
        """The choices that decide the numbers, with what the prompts hold."""
        from kvinterp.data import load_prompts
        from kvinterp.study.results import prompts_digest

        found: dict[str, Any] = {"verb": self.verb(), **self.chosen()}
        if found.get("prompts") is not None:
            found["prompts"] = prompts_digest(load_prompts(found["prompts"]))
        return found

    def settings(self) -> dict[str, Any]:
        """Everything that decides what the tables will hold: choices, prompts, and the circumstances of each model."""
        from kvinterp.study.experiments.circumstances import circumstances

        found = self.asked()
        made_with = [circumstances(adapter) for adapter in self.adapters()]
        several = {str(number): each for number, each in enumerate(made_with)}
        return {**found, "made_with": made_with[0] if len(made_with) == 1 else several}

    def run(
        self,
        out: str | Path | None,
        existing: str = "error",
        progress: str = "bar",
        *,
        figures: str = "drawn",
        engine: str = "local",
    ) -> Any:
        """Answers it, or the rest of it.

        Args:
            out: A folder, in which an interrupted run can go on; None keeps everything in memory.
            existing: What to do about what is already there, see :data:`kvinterp.study.results.EXISTING`.
            progress: ``"bar"`` (on a terminal or in a notebook, or ``"none"``.
            figures: ``"drawn"`` or ``"none"``: whether figures and page are written too.
            engine: Where the cells are done: ``"local"``, in this process; ``"ray"`` or ``"ray(4)"``, by workers of Ray.

        Returns:
            Its result: of the experiment's class of results, where it has one.

        Raises:
            InputError: Something given does not exist or does not fit.
            UnsupportedError: This kind of model cannot give what was asked for.
            KeyboardInterrupt: It was interrupted; what was finished is in the folder.
        """
        self.check_reached()
        from kvinterp.common.checks import check_choice, check_known, check_unread
        from kvinterp.common.store import CELLS
        from kvinterp.study.results import EXISTING

        check_known("way to treat an existing result", existing, EXISTING)
        check_choice("progress", progress, ("bar", "none"))
        check_choice("figures", figures, ("drawn", "none"))
        if out is None:
            check_unread("existing", existing, "error", "there is no folder; give one as out, or leave it out")
        try:
            return self.answered(None if out is None else Path(out), existing, progress, figures, engine)
        except KeyboardInterrupt as error:
            some = out is not None and any((Path(out) / CELLS).rglob("*.parquet"))
            error.args = (self.INTERRUPTED if some else NOTHING,)
            raise

    def answered(self, out: Path | None, existing: str, progress: str, figures: str, engine: str) -> Result:
        """Does what :meth:`run` promises; an experiment that keeps its work otherwise has its own."""
        from kvinterp.common.store import Store
        from kvinterp.study.cells import CellsMade, Local, loading_once, run_cells
        from kvinterp.study.results import check_free, is_finished

        # The cheap questions first: a typing error should not cost the loading of a model.
        worker: Any = Local()
        if engine != "local":
            from kvinterp.study.engines import engine_named

            worker = engine_named(engine)
        self.check()
        there = out is not None and check_free(out, self.verb(), self.names(), existing)
        with loading_once():
            cells = self.cells()
            self.check_steps()
            settings = self.settings() if out is not None else self.asked()
            store = None if out is None else Store(out, settings)
            if out is not None and there and is_finished(out, settings):
                return self.read(out)
            if store is not None:
                store.say_others()
            how = (store, progress, self.UNIT, worker)
            try:
                made = run_cells(cells, *how)
                if more := self.then(made):
                    cells += more
                    made |= run_cells(more, *how)
            except KeyboardInterrupt:
                if store is not None and self.PARTIAL == "yes":
                    made = CellsMade({cell.key: (cell, store) for cell in cells}).finished()
                    if made:
                        self.write(store.folder, settings, self.reduce(made), ending="interrupted")
                raise
            result = self.reduce(made)
            if out is None:
                result.settings, result.choices = settings, self.chosen()
                return self.judged(result)
            return self.write(out, settings, result, figures)

    def write(
        self, folder: Path, settings: Mapping[str, Any], result: Result, figures: str = "none", ending: str = "finished"
    ) -> Result:
        """Writes a result into a folder, which is then finished."""
        from kvinterp.study.results import prompts_of, write_result

        result.settings, result.choices, result.folder = settings, result.choices or self.chosen(), folder
        self.judged(result)
        summary = {**result.contents()[1], "choices": result.choices}
        if "reading" not in summary:
            # Kept as they are said now: what is read again has no NaN, which JSON does not know.
            summary["reading"] = self.sentences(result)
        draw = (lambda place: self.drawn_into(result, place)) if figures == "drawn" else None
        texts, files = result.others or prompts_of(result), self.files_of(result)
        result.files = write_result(folder, settings, files, result.tables, summary, texts, draw, ending)
        return result

    def files_of(self, result: Result) -> list[str]:
        """The names of a result's files beside the summary, drawn or not yet; of figures what they begin with, and a star."""
        from kvinterp.study.results import prompts_of

        tables = (f"{name}.parquet" for name in result.tables)
        figures = (f"figures/{name}*" for name in self.drawn())
        return [*tables, *(result.others or prompts_of(result)), "report.html", *figures]

    def keep(self, result: Result, folder: Path, existing: str = "error", figures: str = "none") -> None:
        """Writes a result that a function gave into a folder; see :meth:`kvinterp.common.result.Result.save`."""
        from kvinterp.study.results import check_free, is_finished

        there = check_free(folder, self.verb(), self.files_of(self.judged(result)), existing)
        if there and is_finished(folder, result.settings):
            raise unknown("way to treat an existing result", existing, ("error", "overwrite"))
        self.write(folder, result.settings, result, figures)

    def drawn_into(self, result: Result, folder: Path) -> list[Path]:
        """The figures, and the page with them.

        Args:
            result: What was found.
            folder: The folder of the figures; the page lies beside it.
        """
        from kvinterp.study.report.experiment import write_experiment
        from kvinterp.study.report.style import keeping

        with keeping():
            files, about = self.figures(result, folder), result.contents()[1].get("provenance") or {}
            findings = self.judged(result).tables.get("findings")
            said = self.sentences(result) if findings is None else self.headline(result)
            shown = (said, result.tables, files, result.choices or {}, about, self.lead(result), findings)
            beside = [name for name in self.files_of(result) if name != "report.html" and "*" not in name]
            return [*files, write_experiment(folder.parent, self.asks(), *shown, [*beside, "summary.json"])]

    def lead(self, result: Result) -> list[Any]:
        """What stands on the page behind the findings; nothing unless an experiment says so."""
        return []


@dataclasses.dataclass(frozen=True)
class OfModel(Experiment):
    """An experiment on one model."""

    model: str = model()
    _: dataclasses.KW_ONLY
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    device: str | None = shared("device")
    attention: str | None = shared("attention")
