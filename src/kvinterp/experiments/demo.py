"""The main job, small: two trained models, two kinds, two protocols and a ladder of precisions, on generated problems."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.experiments.base import Experiment
from kvinterp.experiments.compare import Compare
from kvinterp.files import Record, is_there, told
from kvinterp.folders import check_names
from kvinterp.locks import Lock
from kvinterp.results import Result

__all__ = ["SMOKE", "Demo"]

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
    """

    models: tuple[str, ...] = ("zoo:mistral-mini", "zoo:gemma2-mini")
    kinds: tuple[str, ...] = ("hooked", "native")
    protocols: tuple[str, ...] = ("matched", "free")
    dtype: str = "float16"
    rungs: tuple[str, ...] = ("float32", "float64")
    problems: int = 6
    rung_problems: int = 2
    max_new_tokens: int = 48
    flip_problems: int = 40

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

    def run(self, out: str | Path, existing: str = "error", progress: str = "bar") -> list[Result]:
        """Makes every comparison that is not there yet, each in a folder of its own under ``runs``.

        Args:
            out: The folder.
            existing: What to do about what is already there. A demo is finished when its ``report.html`` is there; until
                then finished comparisons are read, not made again.
            progress: ``"bar"`` or ``"none"``.

        Raises:
            InputError: The folder holds a finished demo, or comparisons made with other settings.
        """
        report = Path(out) / "report.html"
        if existing == "error" and report.exists():
            raise InputError(
                f"folder {str(out)!r} already holds a report: choose another folder with --out, or pass --overwrite."
            )
        record, runs = Record(Path(out)), Path(out) / "runs"
        with told(Path(out)):
            check_names(Path(out), ["report.html"])
            for place in (runs, *(runs / name for name in (*self.plan(), FLIPS))):
                if is_there(place) and (place.is_symlink() or not place.is_dir()):
                    raise InputError(
                        f"{str(place)!r}, where comparisons belong, is no folder: choose another with --out, or move it away."
                    )
        lock = Lock(Path(out))
        try:
            record.open()
            results = self._runs(runs, existing, progress)
            if existing == "overwrite":
                # The old page and its figures go last, when what they showed is replaced.
                record.remove()
                record.open()
        finally:
            lock.release()
        return results

    def _runs(self, folder: Path, existing: str, progress: str) -> list[Result]:
        plan = self.plan()
        results: list[Result] = []
        for number, (name, run) in enumerate(plan.items(), start=1):
            log.info("%d of %d: %s, %s, %s, %s", number, len(plan), run.model, run.kind, run.dtype, run.protocol)
            kept = "overwrite" if existing == "overwrite" else "use"
            results += run.run(folder / name, kept, progress)
        return results

    def flips(self, out: str | Path, existing: str = "use", progress: str = "bar") -> Result:
        """A comparison in which tokens flip on any machine: a cache kept in eight bits beside the recomputation.

        What rounding does is the kernels' choice, and may be nothing; this is coarse enough to change a token in some of
        these problems whatever the kernels.

        Args:
            out: The demo's folder, after :meth:`run`.
            existing: ``"use"`` reads what is there already, ``"overwrite"`` makes it again.
            progress: ``"bar"`` or ``"none"``.
        """
        run = Compare(
            "zoo:mqa-mini", f"arithmetic:{self.flip_problems}", a="cached[cache=quantized(8,fp8)]", kind="native",
            protocol="free", dtype=self.dtype, max_new_tokens=self.max_new_tokens, record="",
        )  # fmt: skip
        log.info("and one in which tokens flip: %s, %s beside %s", run.model, run.a, run.b)
        (made,) = run.run(Path(out) / "runs" / FLIPS, existing, progress)
        return made


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
