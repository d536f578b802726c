"""Compare both paths on two small trained models in FP16, with both protocols, and write a report."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvinterp.common.result import Result
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.study.experiments.base import Charts, Experiment
from kvinterp.study.experiments.compare import Compare
from kvinterp.study.experiments.options import option

if TYPE_CHECKING:
    import pandas as pd

    from kvinterp.common.progress import Tell
    from kvinterp.comparison import Comparison

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
    smoke: bool = option(False, "Run one problem for a few steps, to see that everything works.")
    picture: Path | None = option(None, "Also write the four figures to this file, as one picture.", decides="nothing")

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
        from kvinterp.common.checks import check_unread

        for field in dataclasses.fields(self):
            if field.name not in ("smoke", "picture"):
                said = "the smallest demo has its own; leave it out, or leave out smoke"
                check_unread(field.name, getattr(self, field.name), field.default, said)
        return dataclasses.replace(SMOKE, picture=self.picture)

    def answered(
        self, out: Path | None, existing: str, progress: str, figures: str, tell: Tell | None, engine: str
    ) -> Result:
        """Makes every comparison that is not there yet, each in a folder of its own under ``runs``, and the page last.

        A demo is finished when its ``report.html`` is there; until then finished comparisons are read, not made again.

        Raises:
            InputError: The folder holds a finished demo, or comparisons made with other settings.
        """
        from kvinterp.common.progress import Pace
        from kvinterp.common.store import Store

        if out is None:
            raise InputError("a demo is a folder of comparisons: give one.")
        plan, results = {**self.plan(), FLIPS: self.flips()}, []
        for run in plan.values():
            run.check()
        with Store(out) as store:
            self._check_free(out, existing)
            pace = Pace({name: run.dtype for name, run in plan.items()}, "comparisons", tell or (lambda *_: None))
            kept = "overwrite" if existing == "overwrite" else "use"
            for number, (name, run) in enumerate(plan.items(), start=1):
                if name == FLIPS:
                    log.info("and one in which tokens flip: %s, %s beside %s", run.model, run.a, run.b)
                else:
                    log.info(
                        "%d of %d: %s, %s, %s, %s", number, len(plan) - 1, run.model, run.kind, run.dtype, run.protocol
                    )
                results.append(run.answered(out / "runs" / name, kept, progress, "none", pace.say, engine))
                pace.done(name)
            if existing == "overwrite":
                # The old page and its figures go last, when what they showed is replaced.
                store.remove(store.names())
            result = result_of(results, out)
            if figures == "drawn":
                result.files = self.drawn_into(result, out / "figures")
        return result

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """Whether the paths agree bit for bit, and what becomes of it in higher precision."""
        from kvinterp.common.numbers import listed, number
        from kvinterp.study.findings.of_comparison import headline_of
        from kvinterp.study.findings.results import matched

        sizes: dict[str, float] = {}
        for one in (one for group in _rungs(result).values() for one in group[1:]):
            dtype, size = one.provenance["dtype"], float(one.steps["max_abs_logit"].max())
            sizes[dtype] = max(size, sizes.get(dtype, 0.0))
        higher = listed([f"{number(size)} in {dtype}" for dtype, size in sizes.items()])
        finer = [f"On fewer prompts the largest difference of a logit is {higher}."] if higher else []
        coarse = result.members[-1]
        changed = int(coarse.examples["flip_index"].notna().sum())
        contrast = (
            f"For contrast, a cache in 8 bits (fp8) in a third model, {coarse.provenance['model']}, changes a token in"
        )
        contrasts = [f"{contrast} {changed} of {len(coarse.examples)} decodes."] if len(coarse.steps) else []
        return [*headline_of(matched(_main(result))), *contrasts, *finer]

    def findings(self, result: Result) -> pd.DataFrame:
        """Those of every comparison, and how large the difference is in each dtype."""
        from kvinterp.study.findings import findings_of
        from kvinterp.study.findings.of_comparison import rows_between, rows_of_ladder

        return findings_of([*rows_of_ladder(_rungs(result)), *rows_between(_main(result))])

    def charts(self, result: Result) -> Charts:
        """Those of the comparisons on equal inputs, and the ladder of precisions."""
        from kvinterp.study.findings.of_comparison import called, charts_of_comparisons, ladder_of_comparisons
        from kvinterp.study.findings.results import matched

        rungs = _rungs(result)
        ladder = {"precision_ladder": ladder_of_comparisons(rungs)} if rungs else {}
        return {**charts_of_comparisons(called(matched(_main(result)))), **ladder}

    def lead(self, result: Result) -> list[Any]:
        """The texts of both paths in every comparison, that in which tokens flip among them."""
        from kvinterp.study.findings.of_comparison import called
        from kvinterp.study.report.tokens import changes

        *_, flips = result.members
        return changes(called([*_main(result), *([] if flips.steps.empty else [flips])]))

    def beside(self, result: Result) -> list[str]:
        """The findings, and the summary of each comparison, in whose folder its tables are."""
        return ["findings.parquet", *(f"runs/{one.folder.name}/summary.json" for one in result.members)]

    def drawn_into(self, result: Result, folder: Path) -> list[Path]:
        """The picture where one was asked for, the findings, and the page with its figures last: where it is, everything is."""
        import functools

        from kvinterp.common.parquet import write_table
        from kvinterp.common.store import write_whole
        from kvinterp.study.findings import Chart
        from kvinterp.study.report.charts import drawn
        from kvinterp.study.report.style import save

        if self.picture is not None:
            panels = [
                panel if panel.facet else dataclasses.replace(panel, table=panel.table.assign(at=chart.title), facet="at")
                for name, chart in self.charts(result).items()
                if name != "precision_ladder"
                for panel in chart.panels
            ]
            whole = Chart("Two executions of one computation", panels)
            save(drawn(whole, [one.provenance for one in _main(result)]), self.picture)
        table = self.judged(result).tables["findings"]
        write_whole(folder.parent / "findings.parquet", functools.partial(write_table, table))
        return super().drawn_into(result, folder)

    def sentences(self, result: Result) -> list[str]:
        """What each comparison found, in a sentence."""
        return [one.where().splitlines()[0] for one in result.members]

    @classmethod
    def held_runs(cls, folder: Path) -> tuple[Path, list[str]] | None:
        """The page of a demo's folder, made again from its comparisons, and the first line of each; None: it holds none."""
        from kvinterp.common.files import SUMMARY, is_file
        from kvinterp.common.store import Store

        runs = folder / "runs"
        if is_file(folder / SUMMARY) or not is_file(runs / FLIPS / SUMMARY):
            return None
        planned = [
            name for kinds in (("hooked", "native"), ("bridge",)) for name in dataclasses.replace(cls(), kinds=kinds).plan()
        ]
        with Store(folder):
            names = [name for name in dict.fromkeys(planned) if is_file(runs / name / SUMMARY)]
            results: list[Any] = [Compare().read(runs / name) for name in (*names, FLIPS)]
            page = cls().drawn_into(result_of(results, folder), folder / "figures")[-1]
        return page, [one.where().splitlines()[0] for one in results[:-1]]

    def _check_free(self, folder: Path, existing: str) -> None:
        from kvinterp.common.files import check_target, is_there, told
        from kvinterp.common.store import Store

        if existing == "error" and (folder / "report.html").exists():
            raise InputError(
                f"folder {str(folder)!r} already holds a report: choose another folder with --out, or pass --overwrite."
            )
        with told(folder):
            Store(folder).check_names(
                ["report.html", "findings.parquet", *(f"figures/{name}*" for name in Compare.drawn())]
            )
            for place in (folder / "runs", *(folder / "runs" / name for name in (*self.plan(), FLIPS))):
                if is_there(place) and (place.is_symlink() or not place.is_dir()):
                    raise InputError(
                        f"{str(place)!r}, where comparisons belong, is no folder: choose another with --out, or move it away."
                    )
        if self.picture is not None:
            check_target(self.picture, "--picture", ".png")


FLIPS = "a-token-that-flips"
"""The folder of that comparison."""

SMOKE = Demo(problems=1, rung_problems=1, max_new_tokens=5, flip_problems=1)


def result_of(comparisons: list[Any], folder: Path) -> Result:
    """Comparisons, of which the last is to show flips, as what the demo found."""
    summaries = {one.folder.name: one.written()[1] for one in comparisons}
    about = {name: summary["provenance"] for name, summary in summaries.items()}
    result = Result({}, {"comparisons": summaries, "provenance": about})
    result.members, result.folder, result.choices = comparisons, folder, Demo().chosen()
    return result


def _main(result: Result) -> list[Comparison]:
    """Those in the dtype of the first, in which there is a step."""
    first = result.members[0].provenance["dtype"]
    return [one for one in result.members[:-1] if one.provenance["dtype"] == first and not one.steps.empty]


def _rungs(result: Result) -> dict[str, list[Comparison]]:
    from kvinterp.study.findings.of_comparison import ladder_of

    comparisons = [one for one in result.members[:-1] if not one.steps.empty]
    return ladder_of(comparisons, result.members[0].provenance["dtype"])


def _available(kinds: tuple[str, ...]) -> list[str]:
    from kvinterp.models.convert import hooked_class

    try:
        hooked_class()
    except UnsupportedError as error:
        log.info("bridge stands in for hooked: %s", error)
        return list(dict.fromkeys("bridge" if kind == "hooked" else kind for kind in kinds))
    return list(kinds)
