"""What every experiment is: a question with its choices as fields, answered by cells of work and what they are reduced to.

Everything that the command line shows of an experiment stands in its file: the options are the fields made by
:func:`option` and :func:`argument`, the help is the file's own docstring, the command's name is that of the file. Heavy things
are imported where they are used, so that the help of the command line answers at once.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.errors import InputError
from kvinterp.study.experiments.options import OPTION
from kvinterp.study.experiments.outcome import How, Outcome, records

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvinterp.common.progress import Tell
    from kvinterp.common.store import Made, Parts
    from kvinterp.models import Adapter
    from kvinterp.study.cells import Cell, CellsMade
    from kvinterp.study.findings import Chart
    from kvinterp.study.results import ResultFolder

NOTHING = "nothing was finished; run the same command again"
"""What an interruption of a single piece of work leaves behind."""

_LONGEST = 80
"""So many characters has the name of a folder that nobody named."""
SAID, WIDTH = 5, 120
"""So many lines of what was found are printed, and so many characters to a line."""


def numbered(keys: Iterable[str]) -> dict[int, str]:
    """Keys of cells by the number that each ends with, as in ``example-3``."""
    return {int(key.rpartition("-")[2]): key for key in keys}


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
class Experiment(abc.ABC):
    """A question asked of one or more models; the fields are its choices."""

    OUT: ClassVar[str | None] = ""
    """The folder that the command writes unless another is given: ``""``, that of :meth:`place`; None, nothing is written."""
    OVERWRITES: ClassVar[str] = "asked"
    """``"always"``: the command writes over its own earlier result without ``--overwrite``."""
    TABLES: ClassVar[tuple[str, ...]] = ()
    """The names of its tables."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """The names of what else it writes, beside tables, figures and the summary."""
    PAGE: ClassVar[str] = "report.html"
    """The page that every experiment gets; ``""``: it has none, or one of its own among its files."""
    DRAWN: ClassVar[tuple[str, ...]] = ()
    """What the names of its figures begin with, where it is not the command's."""
    RESULT: ClassVar[str] = ""
    """The import name of the class of its result, which is read from tables and summary; ``""``: the tables are its result."""
    SHOWN: ClassVar[tuple[Callable[[Any], Any], ...]] = ()
    """Of its result: the headline, the findings and the charts, where it does not say them itself."""
    CLAIMS: ClassVar[str] = ""
    """The source whose claims its tables decide: they are judged among what it found; ``""``: none."""
    STEPS: ClassVar[tuple[str, ...]] = ("max_new_tokens",)
    """The fields that say how many steps are decoded, where there are any: no model is asked for more than its context."""
    UNIT: ClassVar[str] = "parts"
    """What a cell is of, in the plural."""
    LOGGED: ClassVar[str] = "everything"
    """What is logged while its cells are done: ``"everything"`` or ``"warnings"``."""
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

    @abc.abstractmethod
    def cells(self) -> list[Cell]:
        """The pieces of work, once :meth:`check` has looked at what was given."""

    def then(self, made: Mapping[str, Made]) -> list[Cell]:
        """The cells of a second stage, which are known only from what the first gave: on the examples of the highest KL, say.

        Args:
            made: What every cell of the first stage gave. A run that is taken up again asks once more, so that the answer
                must rest on this and on the choices alone.
        """
        return []

    @abc.abstractmethod
    def reduce(self, made: Mapping[str, Made], settings: Mapping[str, Any], folder: Path | None) -> Outcome:
        """What the cells come to.

        Args:
            made: What each cell gave, by its key; some where an interrupted run writes what it has.
            settings: As :meth:`settings` gave them.
            folder: Where it will be written; None where it will not.
        """

    def findings(self, outcome: Outcome) -> pd.DataFrame | None:
        """What was found, a row each (:func:`kvinterp.study.findings.findings_of`); None where its sentences say it."""
        from kvinterp.study.findings import findings_of

        return findings_of(self.SHOWN[1](outcome.result)) if self.SHOWN else None

    def headline(self, outcome: Outcome) -> list[str]:
        """What was found in one or two sentences, and warnings; the rest stands in :meth:`findings`."""
        return list(self.SHOWN[0](outcome.result)) if self.SHOWN else []

    def charts(self, outcome: Outcome) -> dict[str, Chart]:
        """Its figures by name, as data."""
        return dict(self.SHOWN[2](outcome.result)) if self.SHOWN else {}

    def figures(self, outcome: Outcome, folder: Path) -> list[Path]:
        """Writes its figures into a folder and returns their files."""
        from kvinterp.study.report.style import save

        return [save(figure, folder / f"{name}.png") for name, figure in self.drawings(outcome).items()]

    def sentences(self, outcome: Outcome) -> list[str]:
        """What was found, a sentence a line."""
        said = outcome.summary.get("reading")
        if said is None and "findings" in self.with_findings(outcome).tables:
            from kvinterp.study.findings import lines_of

            said = [*self._headed(outcome), *lines_of(outcome.tables["findings"])]
        return list(said or ())

    def _headed(self, outcome: Outcome) -> list[str]:
        """What leads: the headline, and how many of a source's claims hold."""
        from kvinterp.study.claims.said import claims_said

        return [*self.headline(outcome), *([claims_said(outcome.tables["claims"])] if "claims" in outcome.tables else ())]

    def read(self, folder: Path) -> Outcome:
        """A finished result as it is in its folder.

        Raises:
            InputError: A table is missing or damaged, or is of another version of kvinterp.
        """
        from kvinterp.study.results import read_summary, read_tables, reading

        summary = read_summary(folder)
        tables = read_tables(folder, summary)
        with reading(folder, summary):
            choices = summary.get("choices", summary["settings"])
            return self._of(self.again(tables, summary), summary["settings"], choices, folder)

    @classmethod
    def held(cls, folder: Path) -> Experiment:
        """The experiment whose result is in a folder; with its defaults, where it reads without its choices."""
        return cls()

    def with_findings(self, outcome: Outcome) -> Outcome:
        """The same with its findings among its tables."""
        if "findings" not in outcome.tables and (found := self.findings(outcome)) is not None:
            outcome.tables = {"findings": found.assign(experiment=self.verb()), **outcome.tables}
        return outcome

    def _of(
        self,
        outcome: Outcome,
        settings: Mapping[str, Any],
        choices: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> Outcome:
        self.with_findings(outcome)
        if self.CLAIMS and "claims" not in outcome.tables:
            from kvinterp.study.claims import CLAIMS, claims_of

            judged = claims_of(outcome.tables, [claim for claim in CLAIMS if claim.source == self.CLAIMS])
            outcome.tables = {**outcome.tables, "claims": judged}
            outcome.summary = {**outcome.summary, "claims": records(judged)}
        outcome.verb, outcome.settings, outcome.folder = self.verb(), settings, folder
        outcome.choices = self.chosen() if choices is None else choices
        return outcome

    def drawings(self, outcome: Outcome) -> dict[str, Figure]:
        """Its figures by name; nothing is written."""
        from kvinterp.study.report.charts import drawn

        about = outcome.summary.get("provenance") or {}
        models = list(about.values()) if all(isinstance(one, Mapping) for one in about.values()) else [about]
        return {name: drawn(chart, models) for name, chart in self.charts(outcome).items()}

    def say(self, outcome: Outcome, echo: Callable[..., None]) -> None:
        """Prints what the command prints.

        Args:
            outcome: What was found.
            echo: Prints a line; with ``err=True`` on standard error.
        """
        for line in brief(self.sentences(outcome)):
            echo(line)
        if outcome.folder is not None:
            echo(f"\npage  {outcome.folder / 'report.html'}\nmore  {outcome.folder}: tables, figures, summary.json")

    # What all of them share --------------------------------------------------------------------------------------------

    def place(self) -> Path:
        """The folder that its command writes unless one is given: ``out/VERB-MODEL``."""
        models = filter(None, (vars(self).get("model"), *vars(self).get("models", ())))
        names = [re.sub(r"[^\w.-]+", "-", re.split("[:/]", str(name).rstrip("/"))[-1]).strip("-") for name in models]
        return Path("out") / "-".join([self.verb(), *names])[:_LONGEST].rstrip("-.")

    def settled(self) -> Experiment:
        """The experiment that these choices come to, where one of them stands for several."""
        return self

    def names(self) -> list[str]:
        """The names of the files that it writes, beside the summary; of figures what they begin with, and a star."""
        finds = bool(self.SHOWN) or type(self).findings is not Experiment.findings
        tables = (f"{table}.parquet" for table in (*["findings"] * finds, *self.TABLES))
        return [*tables, *self.FILES, *filter(None, [self.PAGE]), *(f"figures/{name}*" for name in self.drawn())]

    @classmethod
    def asks(cls) -> str:
        """What is asked: the class's question, a page's heading, and what its file says."""
        return "\n\n".join(inspect.cleandoc(of.__doc__ or "") for of in (cls, sys.modules[cls.__module__]))

    @classmethod
    def drawn(cls) -> tuple[str, ...]:
        """What the names of its figures begin with: its command's, unless it says otherwise."""
        return cls.DRAWN or (cls.verb().replace("-", "_"),)

    def again(self, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Outcome:
        """What was found, from its tables and summary alone: without a model its figures and sentences are made again."""
        from kvinterp.study.cells import imported

        kind: Any = imported(self.RESULT) if self.RESULT else None
        return Outcome(tables if kind is None else kind.read(tables, summary), tables, summary)

    def chosen(self) -> dict[str, Any]:
        """The choices that decide the numbers."""
        given = [field for field in dataclasses.fields(self) if field.init]
        fields = {field.name: field.metadata.get(OPTION, {}).get("decides") for field in given}
        return {name: getattr(self, name) for name, decides in fields.items() if decides != "nothing"}

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
        from kvinterp.models.finding import check_reached

        given = vars(self)
        for name in filter(None, (given.get("model"), *given.get("models", ()))):
            # TransformerLens has names of its own.
            if given.get("kind") != "hooked" or "/" in name:
                check_reached(name)

    def adapters(self) -> list[Adapter]:
        """The models it is asked of, loaded: that of the option ``model``, where there is one."""
        from kvinterp.study.cells import loaded

        return [loaded(self.named())] if "model" in vars(self) else []

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
        tell: Tell | None = None,
        engine: str = "local",
    ) -> Outcome:
        """Answers it, or the rest of it.

        Args:
            out: A folder, in which an interrupted run can go on; None keeps everything in memory.
            existing: What to do about what is already there, see :data:`kvinterp.common.store.EXISTING`.
            progress: ``"bar"`` (on a terminal or in a notebook, unless ``tell`` is given) or ``"none"``.
            figures: ``"drawn"`` or ``"none"``: whether figures and page are written too.
            tell: Told what runs now, and which share is done where that is known.
            engine: Where the cells are done: ``"local"``, in this process; ``"ray"`` or ``"ray(4)"``, by workers of Ray.

        Raises:
            InputError: Something given does not exist or does not fit.
            UnsupportedError: This kind of model cannot give what was asked for.
            KeyboardInterrupt: It was interrupted; what was finished is in the folder.
        """
        settled = self.settled()
        settled.check_reached()
        from kvinterp.common.progress import shown
        from kvinterp.common.store import EXISTING, Record
        from kvinterp.models.inputs import check_choice, check_known, check_unread
        from kvinterp.study.engines import engine_named

        check_known("way to treat an existing result", existing, EXISTING)
        check_choice("progress", progress, ("bar", "none"))
        check_choice("figures", figures, ("drawn", "none"))
        if out is None:
            check_unread("existing", existing, "error", "there is no folder; give one as out, or leave it out")
        try:
            with contextlib.ExitStack() as held:
                if tell is None and progress == "bar":
                    tell = held.enter_context(shown(elsewhere="nothing"))
                return settled.answered(How(out, existing, progress, figures, tell, engine_named(engine)))
        except KeyboardInterrupt as error:
            if out is None or not Record(Path(out)).rows("select run from cell"):
                error.args = (NOTHING,)
            raise

    def answered(self, how: How) -> Outcome:
        """Does what :meth:`run` promises; an experiment that keeps its work otherwise has its own."""
        from kvinterp.study.cells import CellsMade, loading_once
        from kvinterp.study.results import ResultFolder

        # The cheap questions first: a typing error should not cost the loading of a model, nor the freeing of a folder.
        self.check()
        with contextlib.ExitStack() as held:
            folder = None
            if how.out is not None:
                folder = held.enter_context(ResultFolder(how.out, self.asked(), self.names(), how.existing))
            held.enter_context(loading_once())
            cells = self.cells()
            self.check_steps()
            if folder is None:
                made, settings = self._made(cells, None, how), self.asked()
                return self._of(self.reduce(made, settings, None), settings)
            if folder.take_up(self.settings()):
                return self.read(folder.folder)
            try:
                made = self._made(cells, folder.parts, how)
            except KeyboardInterrupt:
                if self.PARTIAL == "yes" and (
                    done := [cell.key for cell in cells if folder.parts.read(cell.key) is not None]
                ):
                    made = CellsMade(dict.fromkeys(done, folder.parts))
                    self.written(folder, self.reduce(made, folder.settings, folder.folder), ending="interrupted")
                raise
            if how.tell is not None:
                how.tell("writing tables, figures and page")
            return self.written(folder, self.reduce(made, folder.settings, folder.folder), how.figures)

    def _made(self, cells: list[Cell], parts: Parts | None, how: How) -> CellsMade:
        """What the cells of both stages gave; the second's are added to the list, for whoever is cut off among them."""
        from kvinterp.study.cells import run_cells
        from kvinterp.study.engines import Remaining

        engine = how.engine if how.tell is None else Remaining(how.engine, self.UNIT, self.LOGGED)
        given = (parts, how.tell, how.progress, self.UNIT, engine)
        made = run_cells(cells, *given)
        cells += (more := self.then(made))
        return made | run_cells(more, *given)

    def written(self, folder: ResultFolder, outcome: Outcome, figures: str = "none", ending: str = "finished") -> Outcome:
        """Writes it into its folder, which is then finished."""
        self._of(outcome, folder.settings, outcome.choices or None, folder.folder)
        draw = (lambda place: self.drawn_into(outcome, place)) if figures == "drawn" else None
        summary = {**outcome.summary, "choices": outcome.choices, "settings": folder.settings}
        if "reading" not in summary:
            # Kept as they are said now: what is read again has no NaN, which JSON does not know.
            summary["reading"] = self.sentences(outcome)
        outcome.files = folder.finish(outcome.tables, summary, outcome.texts, draw, ending)
        return outcome

    def drawn_into(self, outcome: Outcome, folder: Path) -> list[Path]:
        """The figures, and the page with them.

        Args:
            outcome: What was found.
            folder: The folder of the figures; the page lies beside it.
        """
        from kvinterp.study.report.experiment import write_experiment
        from kvinterp.study.report.style import keeping

        with keeping():
            files, about = self.figures(outcome, folder), outcome.summary.get("provenance") or {}
            if not self.PAGE:
                return files
            findings = self.with_findings(outcome).tables.get("findings")
            said = self.sentences(outcome) if findings is None else self._headed(outcome)
            found = (said, outcome.tables, files, outcome.choices, about, self.lead(outcome), findings)
            return [*files, write_experiment(folder.parent, self.asks(), *found, self.beside(outcome))]

    def lead(self, outcome: Outcome) -> list[Any]:
        """What stands on the page behind the findings; nothing unless an experiment says so."""
        return []

    def beside(self, outcome: Outcome) -> list[str]:
        """The files that lie beside the page, for its links."""
        return [*(f"{name}.parquet" for name in outcome.tables), *outcome.texts, "summary.json"]
