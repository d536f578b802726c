"""Compare two small trained models in FP16, two kinds and two protocols each, and write a report."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.study.experiments.base import Experiment, How, Outcome
from kvinterp.study.experiments.compare import Compare, places
from kvinterp.study.experiments.options import option

if TYPE_CHECKING:
    from kvinterp.study.cells import Cell, Made
    from kvinterp.study.results import Result

log = logging.getLogger("kvinterp")


@dataclasses.dataclass(frozen=True)
class Demo(Experiment):
    """Does decoding from the KV cache compute what recomputing the prefix computes, in two small trained models?

    Attributes:
        models: The models.
        kinds: Kinds of model; ``bridge`` stands in for ``hooked`` where TransformerLens has no HookedTransformer.
        protocols: Protocols.
        dtype: The dtype in question.
        rungs: Dtypes in which the native kind is asked the same again, on fewer problems.
        problems: How many generated problems.
        rung_problems: How many of them on a rung.
        max_new_tokens: Most steps.
        flip_problems: Of how many problems those are sought in which a token flips.
        smoke: Whether it is :data:`SMOKE`.
        picture: Where the four figures are written as one picture.
    """

    OUT: ClassVar = "kvinterp-demo"

    models: tuple[str, ...] = ("zoo:mistral-mini", "zoo:gemma2-mini")
    kinds: tuple[str, ...] = ("hooked", "native")
    protocols: tuple[str, ...] = ("matched", "free")
    dtype: str = "float16"
    rungs: tuple[str, ...] = ("float32", "float64")
    problems: int = 6
    rung_problems: int = 2
    max_new_tokens: int = 48
    flip_problems: int = 40
    smoke: bool = option(False, "One problem and few steps: does everything run?")
    picture: Path | None = option(None, "Also write the four figures as one picture here.", decides="nothing")

    def plan(self) -> dict[str, Compare]:
        """Every comparison it makes, by the name of its folder."""
        kinds = _available(self.kinds)
        runs = [
            Compare(model, f"arithmetic:{self.problems}", kind=kind, protocol=protocol, dtype=self.dtype)
            for model in self.models
            for kind in kinds
            for protocol in self.protocols
        ]
        runs += [
            Compare(model, f"arithmetic:{min(self.rung_problems, self.problems)}", kind="native", dtype=dtype)
            for model in self.models
            for dtype in self.rungs
        ]
        runs = [dataclasses.replace(run, max_new_tokens=self.max_new_tokens) for run in runs]
        return {f"{run.model.rpartition(':')[2]}-{run.kind}-{run.dtype}-{run.protocol}": run for run in runs}

    def flips(self) -> Compare:
        """A comparison in which tokens flip on any machine: a cache kept in eight bits beside the recomputation.

        What rounding does is the kernels' choice, and may be nothing; this is coarse enough to change a token in some of
        these problems whatever the kernels.
        """
        return Compare(
            "zoo:mqa-mini", f"arithmetic:{self.flip_problems}", a="cached[cache=quantized(8,fp8)]", kind="native",
            protocol="free", dtype=self.dtype, max_new_tokens=self.max_new_tokens, record="resid_post,pattern",
        )  # fmt: skip

    def settled(self) -> Demo:
        """The smallest one, where that was asked for."""
        if not self.smoke:
            return self
        from kvinterp.models.inputs import check_unread

        for field in dataclasses.fields(self):
            if field.name not in ("smoke", "picture"):
                said = "the smallest demo has its own; leave it out, or leave out smoke"
                check_unread(field.name, getattr(self, field.name), field.default, said)
        return dataclasses.replace(SMOKE, picture=self.picture)

    def answered(self, how: How) -> Outcome:
        """Makes every comparison that is not there yet, each in a folder of its own under ``runs``, and the page last.

        A demo is finished when its ``report.html`` is there; until then finished comparisons are read, not made again.

        Raises:
            InputError: The folder holds a finished demo, or comparisons made with other settings.
        """
        from kvinterp.common.store import Lock, Record

        if how.out is None:
            raise InputError("a demo is a folder of comparisons: give one.")
        folder = Path(how.out)
        for run in (*self.plan().values(), self.flips()):
            run.check()
        with Lock(folder):
            self._check_free(folder, how.existing)
            results = self._runs(folder / "runs", how)
            flips = results.pop(FLIPS)
            if how.existing == "overwrite":
                # The old page and its figures go last, when what they showed is replaced.
                record = Record(folder)
                record.remove(record.names())
            summary = {"comparisons": {name: result.summary for name, result in {**results, FLIPS: flips}.items()}}
            outcome = Outcome([*results.values(), flips], summary=summary, folder=folder)
            if how.figures == "drawn":
                outcome.files = self.figures(outcome, folder / "figures")
        return outcome

    def figures(self, outcome: Outcome, folder: Path) -> list[Path]:
        """The page with its figures, and the picture where one was asked for."""
        from kvinterp.study.report import overview_of, save, write_report

        *results, flips = outcome.result
        drawn = [] if self.picture is None else [save(overview_of(results), self.picture)]
        # The page last: where it is, everything is.
        return [*drawn, write_report(results, folder.parent, flips)]

    def say(self, outcome: Outcome, echo: Callable[..., None]) -> None:
        """What each comparison found in a line, and where everything is."""
        assert outcome.folder is not None, "a demo is a folder"
        picture = [] if self.picture is None else [f"picture  {self.picture}"]
        found = [result.comparison.where().splitlines()[0] for result in outcome.result]
        for line in (*picture, *found, *places(outcome.folder, outcome.folder / "runs" / "*")):
            echo(line)

    @classmethod
    def held_runs(cls, folder: Path) -> tuple[Path, list[str]] | None:
        """The page of a demo's folder, made again from its comparisons, and the first line of each; None: it holds none."""
        from kvinterp.common.files import SUMMARY, is_file
        from kvinterp.common.store import Lock
        from kvinterp.study.report import write_report
        from kvinterp.study.results import load_result

        runs = folder / "runs"
        if is_file(folder / SUMMARY) or not is_file(runs / FLIPS / SUMMARY):
            return None
        planned = [
            name for kinds in (("hooked", "native"), ("bridge",)) for name in dataclasses.replace(cls(), kinds=kinds).plan()
        ]
        with Lock(folder):
            results = [load_result(runs / name) for name in dict.fromkeys(planned) if is_file(runs / name / SUMMARY)]
            page = write_report(results, folder, load_result(runs / FLIPS))
        return page, [result.comparison.where().splitlines()[0] for result in results]

    def cells(self) -> list[Cell]:
        """None of its own: they are those of its comparisons."""
        return []

    def reduce(self, made: Mapping[str, Made], settings: Mapping[str, Any], folder: Path | None) -> Outcome:
        """Nothing, without a folder of comparisons."""
        return Outcome(None)

    def _check_free(self, folder: Path, existing: str) -> None:
        from kvinterp.common.files import check_target, is_there, told
        from kvinterp.common.store import check_names

        if existing == "error" and (folder / "report.html").exists():
            raise InputError(
                f"folder {str(folder)!r} already holds a report: choose another folder with --out, or pass --overwrite."
            )
        with told(folder):
            check_names(folder, ["report.html", *(f"figures/{name}*" for name in Compare.drawn())])
            for place in (folder / "runs", *(folder / "runs" / name for name in (*self.plan(), FLIPS))):
                if is_there(place) and (place.is_symlink() or not place.is_dir()):
                    raise InputError(
                        f"{str(place)!r}, where comparisons belong, is no folder: choose another with --out, or move it away."
                    )
        if self.picture is not None:
            check_target(self.picture, "--picture", ".png")

    def _runs(self, folder: Path, how: How) -> dict[str, Result]:
        from kvinterp.common.progress import Pace

        plan = {**self.plan(), FLIPS: self.flips()}
        pace = Pace({name: run.dtype for name, run in plan.items()}, "comparisons", how.tell or (lambda *_: None))
        kept, results = "overwrite" if how.existing == "overwrite" else "use", {}
        for number, (name, run) in enumerate(plan.items(), start=1):
            if name == FLIPS:
                log.info("and one in which tokens flip: %s, %s beside %s", run.model, run.a, run.b)
            else:
                log.info("%d of %d: %s, %s, %s, %s", number, len(plan) - 1, run.model, run.kind, run.dtype, run.protocol)
            mine = dataclasses.replace(how, out=folder / name, existing=kept, figures="none", tell=pace.say)
            results[name] = run.answered(mine).result
            pace.done(name)
        return results


FLIPS = "a-token-that-flips"
"""The folder of that comparison."""

SMOKE = Demo(problems=1, rung_problems=1, max_new_tokens=5, flip_problems=1)


def _available(kinds: tuple[str, ...]) -> list[str]:
    from kvinterp.models.convert import hooked_class

    try:
        hooked_class()
    except UnsupportedError as error:
        log.info("bridge stands in for hooked: %s", error)
        return list(dict.fromkeys("bridge" if kind == "hooked" else kind for kind in kinds))
    return list(kinds)
