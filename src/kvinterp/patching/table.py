"""What a sweep found, as tidy tables."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from kvinterp import metrics
from kvinterp.common.numbers import counted, models_of
from kvinterp.common.result import Result, signed
from kvinterp.patching.side_by_side import Advanced, PlannedLane, Setting

LABELS = ["sweep", "site", "layer", "head", "positions"]
"""The columns that say which patch a row is about."""
OVER_EXAMPLES = ("mean", "median", "low_quartile", "high_quartile", "interval_low", "interval_high")
"""The columns of an aggregate; NaN where no example defines a recovery."""

ASKED = (
    *("site", "sweep", "direction", "protocol", "steps", "distance", "distances"),
    *("answers", "paths", "positions", "work"),
)
"""What of the provenance stands in front in ``summary.json``."""


@dataclasses.dataclass(repr=False)
class Sweep(Result):
    """Recovery of every patch of a sweep: ``1 - D(patched, donor) / D(unpatched, donor)``.

    Attributes:
        recovery: One row an example and patch: sweep, site, layer, head, positions (head and layer are -1 where they do
            not vary), step_set, direction, protocol, example (counted in the prompts given), recovery (a fraction, below 0
            where the patch made the paths differ more; NaN where there is nothing to recover, and then ``defined`` is
            False and ``why`` says so), d_before, d_after, equal (whether the unpatched logits are bitwise equal), unchanged
            (whether all that the patch wrote was there already), steps (counted in D), first_step. These are of the first
            distance asked for; of the others, and of L2 always, recovery_l2, d_before_l2, d_after_l2 and so on.
        steps: One row an example, patch and counted step: recovery, d_before, d_after, of each distance likewise.
        controls: One row an example and control: self (0), other-prompt, floor (the last residual, which leaves the
            unembedding's own), together (the site swept in all layers at once, which leaves what no patch of this kind
            reaches), all-positions; and one row a planted cause (on the first prompt, in float64: the share of the
            difference found, at the place found; looked for once a model, and of example -1 where that was on another
            sweep's prompt).
        provenance: What was swept, paths, protocol, distance (the first), distances, model and machine, and the work done:
            forwards and blocks of the recompute path.
        logits: For each example ``[step, path, vocab]``, where asked for: the donor, the unpatched path, then the patches
            in the order of the table. They are kept in no folder.
    """

    VERB: ClassVar = "patch"

    recovery: pd.DataFrame
    steps: pd.DataFrame
    controls: pd.DataFrame
    provenance: dict[str, Any]
    logits: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """What it is of, in one line; the tables are attributes."""
        provenance = self.provenance
        of = f"{provenance['sweep']} sweep of {provenance['site']} {provenance['direction']}"
        patches = self.recovery[LABELS].drop_duplicates() if len(self.recovery) else self.recovery
        examples = self.recovery["example"].nunique() if len(self.recovery) else 0
        said = (
            f"<Sweep of {models_of([provenance])}: {of}, {counted(len(patches), 'patch')} on {counted(examples, 'prompt')}"
        )
        equal = self.recovery.loc[self.recovery["equal"], "example"].nunique() if len(self.recovery) else 0
        return said + (f"; {equal} bitwise equal before any patch>" if equal else ">")

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its tables, each with what it was made with, and its summary."""
        tables = {"recovery": self.recovery, "steps": self.steps, "controls": self.controls}
        return signed(tables, self.provenance), self.summary()

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Sweep:
        """The sweep of its tables."""
        # Without controls there is a table without columns, whose labels Parquet does not keep.
        controls = tables["controls"] if tables["controls"].shape[1] else pd.DataFrame()
        return cls(tables["recovery"], tables["steps"], controls, tables["recovery"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a patch: recovery over the prompts."""
        return self.aggregate()

    def aggregate(self) -> pd.DataFrame:
        """Over examples, for each patch: mean, median, quartiles and the median's interval of the recovery.

        They are NaN where no example defines a recovery. Of the other distances the median, as median_kl and so on.
        """
        rows = []
        for labels, group in self.recovery.groupby(LABELS, sort=False):
            values = group.loc[group["defined"], "recovery"].to_numpy()
            row: dict[str, Any] = dict(zip(LABELS, labels, strict=True))
            row |= {"examples": len(group), "defined": len(values), **dict.fromkeys(OVER_EXAMPLES, float("nan"))}
            if len(values):
                interval = metrics.typical(values)
                quartiles = np.quantile(values, (0.25, 0.5, 0.75))
                row |= {"mean": values.mean(), "median": quartiles[1], "low_quartile": quartiles[0]}
                row |= {"high_quartile": quartiles[2], "interval_low": interval.low, "interval_high": interval.high}
            # Those over examples where the first distance is defined, so that the medians are of the same examples.
            others = group.loc[group["defined"]]
            row |= {
                f"median_{name}": others[f"recovery_{name}"].median() for name in self.provenance.get("distances", ())[1:]
            }
            rows.append(row)
        return pd.DataFrame(rows)

    def left(self, control: str = "together") -> dict[str, dict[str, float]]:
        """What a control leaves, for each distance: the mean, and the median share of the unpatched distance.

        Args:
            control: ``"together"`` leaves what no patch of the site swept reaches, ``"floor"`` the unembedding's own.

        Returns:
            By distance ``{"mean": ..., "share": ...}``; empty where the controls were not run or nothing is defined.
        """
        if "control" not in self.controls:
            return {}
        # A prompt that ended before any step that counts has no distance to average.
        rows = self.controls[(self.controls["control"] == control) & (self.controls["steps"] > 0)]
        found = {}
        for at, name in enumerate(self.provenance.get("distances", ())):
            behind = f"_{name}" if at else ""
            known = rows[rows[f"d_before{behind}"] > 0]
            if len(known):
                share = (known[f"d_after{behind}"] / known[f"d_before{behind}"]).median()
                found[str(name)] = {"mean": float(rows[f"d_after{behind}"].mean()), "share": float(share)}
        return found

    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``."""
        aggregate = self.aggregate()
        known = aggregate.dropna(subset=["median"])
        # By the median, as in the figures: one example whose paths hardly differ decides a mean of ratios.
        best = known.loc[known["median"].idxmax()].to_dict() if len(known) else None
        controls = self.controls.groupby("control")["recovery"].mean() if len(self.controls) else pd.Series(dtype=float)
        first = self.recovery.groupby("example")[["equal", "why"]].first()
        return {
            **{name: self.provenance[name] for name in ASKED if name in self.provenance},
            "examples": int(self.recovery["example"].nunique()),
            "examples_without_difference": int(first["equal"].sum()),
            "examples_undefined": {str(why): int(count) for why, count in first["why"].value_counts().items() if why},
            "best": best,
            "controls": {name: None if np.isnan(value) else float(value) for name, value in controls.items()},
            "floor": self.left("floor"),
            "together": self.left("together"),
            "provenance": self.provenance,
        }


class Tables:
    """The rows of a sweep's tables as its examples come in."""

    def __init__(self, setting: Setting, step_set: str) -> None:
        self.setting, self.step_set = setting, step_set
        self.recovery: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.controls: list[dict[str, Any]] = []
        self.logits: dict[int, Tensor] = {}
        self.work = Counter(forwards=0, blocks=0)

    def add(self, example: int, prompt_length: int, lanes: Sequence[PlannedLane], advanced: Advanced) -> None:
        """Adds one example."""
        self.work.update(advanced.work)
        names, protocol, distances = tuple(self.setting.distances), self.setting.protocol, advanced.distances
        steps, before, kept = range(distances.shape[1]), distances[:, :, 0], [0, 1]
        for column, (lane, unchanged) in enumerate(zip(lanes, advanced.unchanged, strict=True), 2):
            # The newest position of the last step that ran; a block beyond it, or that no step computes, was never there.
            if lane.patch.starts_at >= prompt_length + len(steps) - 1 or not self.setting.reaches(
                lane.patch, prompt_length
            ):
                continue
            after = distances[:, :, column - 1]
            counted = [step for step in steps if (step >= 1 if protocol == "free" else lane.patch.active(step))]
            # Where the end of the sequence came before any step that counts, there is nothing to recover.
            means = [(d[:, counted].mean(1) if counted else d.new_zeros(len(names))) for d in (before, after)]
            l2 = float(means[0][names.index("l2")])
            row = {
                **lane.labels,
                "step_set": self.step_set,
                "direction": self.setting.direction,
                "protocol": protocol,
                "example": example,
                **_columns(names, *means),
                "defined": bool(means[0][0] > 0),
                "equal": bool(counted) and l2 == 0,
                "unchanged": unchanged,
                "why": metrics.why_undefined(len(counted), l2, float(means[0][0])),
                "steps": len(counted),
                "first_step": counted[0] if counted else -1,
            }
            if lane.control:
                self.controls.append({**row, "control": lane.control})
                continue
            kept.append(column)
            self.recovery.append(row)
            self.steps += [
                {**lane.labels, "example": example, "step": step, **_columns(names, before[:, step], after[:, step])}
                for step in counted
            ]
        if advanced.logits is not None:
            self.logits[example] = advanced.logits[:, kept]


def _columns(
    names: Sequence[str], before: Float64[Tensor, " distance"], after: Float64[Tensor, " distance"]
) -> dict[str, float]:
    """Recovery and both distances: plain for the first distance, with its name behind for every other."""
    measures = {"recovery": metrics.recovery(before, after), "d_before": before, "d_after": after}
    return {
        f"{measure}_{name}" if at else measure: float(values[at])
        for at, name in enumerate(names)
        for measure, values in measures.items()
    }
