"""Score detectors of cache bugs on planted bugs and clean models (KVBugBench).

Every detector is given models with one bug planted in their cached path, and clean models. The score counts the bugs it
finds, its false alarms on clean models, the places it names correctly, and seconds. The seed draws the models and the
kinds of bug that are held out: tune a detector on the kinds that are shown, and judge it by the others. The bugs are in
kvinterp's repository.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from kvinterp.common.checks import check_known, check_seed
from kvinterp.common.result import Result
from kvinterp.errors import InputError
from kvinterp.study.cells import Cell, joined
from kvinterp.study.experiments.base import Experiment, Parts, Rows, Tables
from kvinterp.study.experiments.options import option
from kvinterp.study.findings import finding

BANK = Path(__file__).parents[4] / "benchmarks" / "bugs"
"""Where the bugs are: in a checkout; a wheel does not carry them, as they are twenty thousand tokens of tests."""
SHOWN, HELD_OUT, CLEAN = "shown", "held out", "clean"


@dataclasses.dataclass(frozen=True)
class BenchBugs(Experiment):
    """Which detectors find planted bugs of a cache, and how often do they cry wolf?"""

    OUT: ClassVar = "out/bench-bugs"
    TABLES: ClassVar = ("cases", "scores")
    FILES: ClassVar = ("seconds.csv",)
    UNIT: ClassVar = "verdicts"
    PARTIAL: ClassVar = "yes"

    detectors: tuple[str, ...] = option(
        ("transformers-tests", "allclose-assert", "top1"),
        "A detector to score: audit, audit-calls, transformers-tests, allclose-default, allclose-assert, allclose-loose, "
        "top1, or all; may be given several times.",
        flag="--detector",
    )
    only: tuple[str, ...] = option(
        (), "Only bugs with this text in their name or kind, and all clean models; may be given several times."
    )
    most: int = option(20, "The most bugs, and the most clean models, to draw.", min=1)
    seed: int = option(0, "Seed that draws the models and the kinds of bug that are held out.")

    def check(self) -> None:
        """Names too, as the bank has them."""
        super().check()
        check_seed(self.seed)
        self._detectors()
        if not self._drawn()[0]:
            raise InputError(
                f"no planted bug's name or kind holds {' or '.join(map(repr, self.only))}: leave --only out for all."
            )

    def asked(self) -> dict[str, Any]:
        """The choices, and what the bank's files hold."""
        return {**super().asked(), "bank": digest()}

    def _detectors(self) -> list[str]:
        from_bank = bank().DETECTORS
        if not self.detectors:
            raise InputError("no detector was given: give one with --detector, or all.")
        for name in self.detectors:
            if name != "all":
                check_known("detector", name, from_bank)
        return list(from_bank if "all" in self.detectors else dict.fromkeys(self.detectors))

    def _drawn(self) -> tuple[list[Any], list[Any]]:
        """The bugs and the clean models that are looked at, as the seed draws them."""
        found = list(bank().subjects().values())
        bugs = [one for one in found if one.kind != CLEAN]
        if self.only:
            bugs = [one for one in bugs if any(text in one.name or text in one.kind for text in self.only)]
        draw = random.Random(self.seed)
        drawn = [draw.sample(group, min(self.most, len(group))) for group in (bugs, [o for o in found if o.kind == CLEAN])]
        return drawn[0], drawn[1]

    def cells(self) -> list[Cell]:
        """A cell a detector and model; bugs and clean models by turns, so that a run that is cut off has as many of both."""
        by_turns = filter(None, (one for pair in itertools.zip_longest(*self._drawn()) for one in pair))
        pairs = [(number, one.name, detector) for number, one in enumerate(by_turns) for detector in self._detectors()]
        return [
            Cell(f"{by}-{number}", f"{__name__}:tried", {"detector": by, "subject": name}, f"{by} on {name}")
            for number, name, by in pairs
        ]

    def reduce(self, made: Parts) -> Result:
        """All verdicts, and the scores by split."""
        from kvinterp.models.provenance import machine

        held = held_out(self.seed)
        found = joined(made)["table"]
        # Apart, since they are others each time.
        seconds, cases = found[["detector", "subject", "seconds"]], found.drop(columns="seconds")
        cases.insert(
            2, "split", [CLEAN if kind == CLEAN else HELD_OUT if kind in held else SHOWN for kind in cases["kind"]]
        )
        tables = {"cases": cases, "scores": scores_of(cases)}
        kinds = {kind: name for kind, name in zip(cases["kind"], cases["split"], strict=True) if kind != CLEAN}
        split = {name: sorted(kind for kind, given in kinds.items() if given == name) for name in (SHOWN, HELD_OUT)}
        texts = {"seconds.csv": seconds.to_csv(index=False, float_format="%.3f")}
        return Result(tables, {"split": split, "provenance": machine()}, texts)

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """What each detector found, and the split."""
        whole = result.tables["scores"]
        lines = [
            f"{row['detector']}: {row['found']} of {row['bugs']} planted bugs found, {row['false_alarms']} false alarms on "
            f"{row['clean']} clean models."
            for row in whole[whole["split"] == "all"].to_dict("records")
        ]
        split = result.summary["split"]
        return [*lines, *(f"Kinds {name}: {', '.join(kinds) or 'none'}." for name, kinds in split.items())]

    def rows(self, tables: Tables) -> Rows:
        """The rates of every detector, with their exact intervals."""
        rows = []
        for row in tables["scores"].to_dict("records"):
            of = {"detector": row["detector"], "split": row["split"]}
            for what, count, n, unit in (
                ("planted bugs found", row["found"], row["bugs"], "bugs"),
                ("places right, of those found", row["placed"], row["placeable"], "bugs"),
                ("false alarms", row["false_alarms"], row["clean"], "clean models"),
                ("cannot tell", row["cannot_tell"], row["bugs"] + row["clean"], "models"),
            ):
                if n and (what != "places right, of those found" or row["names_places"]):
                    rows.append(finding(what, count / n, exact(count, n), n, unit, "%", **of))
        return rows


def scores_of(cases: pd.DataFrame) -> pd.DataFrame:
    """What each detector found, by split and in all.

    Returns:
        One row a detector and split: bugs, found, clean, false_alarms, placeable (bugs found whose place is known), placed,
        names_places (whether the detector names any), cannot_tell.
    """
    rows = []
    for detector, whole in cases.groupby("detector", sort=False):
        for split in ("all", SHOWN, HELD_OUT):
            part = whole if split == "all" else whole[whole["split"] == split]
            bugs, clean = part[part["kind"] != CLEAN], part[part["kind"] == CLEAN]
            found = bugs[bugs["alarm"] == "yes"]
            counts = {
                "bugs": len(bugs), "found": len(found), "clean": len(clean), "false_alarms": int((clean["alarm"] == "yes").sum()),
                "placeable": int((found["placed"] != "").sum()), "placed": int((found["placed"] == "yes").sum()),
                "names_places": bool((whole["tensor"] != "").any() or whole["layer"].notna().any()),
                "cannot_tell": int((part["alarm"] == "cannot tell").sum()),
            }  # fmt: skip
            if len(part):
                rows.append({"detector": detector, "split": split, **counts})
    return pd.DataFrame(rows)


def exact(count: int, of: int) -> tuple[float, float]:
    """Clopper and Pearson's 95% interval of a share."""
    from scipy import stats

    found = stats.binomtest(count, of).proportion_ci()
    return float(found.low), float(found.high)


def tried(detector: str, subject: str) -> pd.DataFrame:
    """What a detector says of one model, a row."""
    import torch

    from_bank = bank()
    one = from_bank.subjects()[subject]
    with from_bank.Patches() as patches, torch.random.fork_rng():
        torch.manual_seed(0)
        model = one.make(patches)
        began = time.process_time()
        try:
            found = from_bank.DETECTORS[detector].detect(one, model)
        # A bug may break a model: that is seen by whoever runs it.
        except Exception as error:
            found = from_bank.Found("yes", f"it raised {type(error).__name__}: {str(error)[:120]}")
        seconds = time.process_time() - began
    placed = "" if not one.layers else "yes" if one.placed(found.layer, found.tensor) else "no"
    row = {"detector": detector, "subject": subject, "kind": one.kind, "alarm": found.alarm, "layer": found.layer}
    row |= {"tensor": found.tensor, "placed": placed, "seconds": seconds, "said": found.said}
    return pd.DataFrame([row]).astype({"layer": "Int64"})


def clean_models() -> Mapping[str, Any]:
    """The clean models of the bank, by name."""
    bank()
    from bank.clean import CLEAN as FOUND  # type: ignore[import-not-found]

    return FOUND  # type: ignore[no-any-return]


# The bank ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Bank:
    """What the benchmark takes of the bank's modules."""

    DETECTORS: Mapping[str, Any]
    subjects: Any
    Patches: Any
    Found: Any


def bank() -> _Bank:
    """The bank's modules.

    Raises:
        InputError: They are not here.
    """
    _check_bank()
    if str(BANK) not in sys.path:
        sys.path.append(str(BANK))
    from bank.detector import Found  # type: ignore[import-not-found]
    from bank.detectors import DETECTORS  # type: ignore[import-not-found]
    from bank.subjects import Patches, subjects  # type: ignore[import-not-found]

    return _Bank(DETECTORS, subjects, Patches, Found)


def _check_bank() -> None:
    if not (BANK / "bank" / "subjects.py").is_file():
        raise InputError(
            "the planted bugs are not part of an installed kvinterp: clone its repository, install that with pip install -e, "
            "and run bench-bugs there."
        )


def digest() -> str:
    """A digest of all files of the bank."""
    import hashlib

    _check_bank()
    found = hashlib.sha256()
    for file in sorted(BANK.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def held_out(seed: int) -> set[str]:
    """The kinds of bug that a seed holds out: half of all that there are."""
    kinds = sorted({one.kind for one in bank().subjects().values()} - {CLEAN})
    return set(random.Random(f"kinds {seed}").sample(kinds, len(kinds) // 2))
