"""The result of a sweep: tidy tables."""

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
from kvinterp.common.result import Contents, Result, Row, signed
from kvinterp.patching.findings import charts_of_sweep, headline_of_sweep, rows_of_sweep
from kvinterp.patching.side_by_side import Advanced, PlannedPatch, Setting

LABELS = ["sweep", "site", "layer", "head", "positions"]
"""The columns that name a row's patch."""
OVER_EXAMPLES = ("mean", "median", "low_quartile", "high_quartile", "interval_low", "interval_high")
"""The columns of an aggregate; NaN if no example defines a recovery."""

SETTINGS = (
    "site",
    "sweep",
    "direction",
    "protocol",
    "steps",
    "distance",
    "distances",
    "answers",
    "paths",
    "positions",
    "work",
)
"""The settings of the provenance that come first in ``summary.json``."""


@dataclasses.dataclass(repr=False)
class Sweep(Result):
    """Recovery of every patch of a sweep: ``1 - D(patched, donor) / D(unpatched, donor)``.

    Attributes:
        recovery: One row an example and patch: sweep, site, layer, head, positions (head and layer
            are -1 if they do not vary), step_set, direction, protocol, example (the prompt's
            number), recovery (a fraction, below 0 if the patch made the paths differ more; NaN if
            there is nothing to recover, and then ``defined`` is False and ``why`` says so),
            d_before, d_after, equal (whether the unpatched logits are bitwise equal), unchanged
            (whether every value that the patch wrote was there already), steps (counted in D),
            first_step. These are for the first distance; for the others, and always for L2, there
            are recovery_l2, d_before_l2, d_after_l2 and so on.
        steps: One row an example, patch and counted step: recovery, d_before, d_after, of each
            distance likewise.
        controls: One row an example and control: self (0), other-prompt, floor (the last residual,
            which leaves the unembedding's own difference), together (the site swept in all layers
            at once, which leaves the difference that no patch of this kind reaches), all-positions;
            and one row a planted cause (on the first prompt, in float64: the place and share that
            :func:`kvinterp.localise` found; made once a model, with example -1 if another sweep's
            prompt was used).
        provenance: Settings, paths, model and machine, and the work done: forwards and blocks of
            the recompute path.
        logits: With ``logits="keep"`` for each example ``[step, path, vocab]``: the donor, the
            unpatched path, then the patches in the order of the table. They are not saved.
    """

    VERB: ClassVar = "patch"
    headline, rows, charts = headline_of_sweep, rows_of_sweep, charts_of_sweep

    recovery: pd.DataFrame
    steps: pd.DataFrame
    controls: pd.DataFrame
    provenance: dict[str, Any]
    logits: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """Names the model, the sweep and the size in one line."""
        provenance = self.provenance
        name = f"{provenance['sweep']} sweep of {provenance['site']} {provenance['direction']}"
        patches, examples = self.recovery[LABELS].drop_duplicates(), self.recovery["example"]
        size = f"{counted(len(patches), 'patch')} on {counted(examples.nunique(), 'prompt')}"
        equal = examples[self.recovery["equal"]].nunique()
        note = f"; {equal} bitwise equal before any patch" if equal else ""
        return f"<Sweep of {models_of([provenance])}: {name}, {size}{note}>"

    def written(self) -> Contents:
        """Returns the tables, each with the provenance, and the summary."""
        tables = {"recovery": self.recovery, "steps": self.steps, "controls": self.controls}
        return signed(tables, self.provenance), self.summary()

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Sweep:
        """Makes a sweep of its tables."""
        # Without controls the table has no columns, which Parquet does not keep.
        controls = tables["controls"] if tables["controls"].shape[1] else pd.DataFrame()
        return cls(tables["recovery"], tables["steps"], controls, tables["recovery"].attrs)

    def overview(self) -> pd.DataFrame:
        """One row a patch: its recovery over the prompts."""
        return self.aggregate()

    def aggregate(self) -> pd.DataFrame:
        """For each patch the mean, median, quartiles and the median's interval of the recovery over
        examples.

        They are NaN if no example defines a recovery. For the other distances there is the median
        (median_recovery_kl).
        """
        rows = []
        for labels, group in self.recovery.groupby(LABELS, sort=False):
            values = group.loc[group["defined"], "recovery"].to_numpy()
            row: Row = dict(zip(LABELS, labels, strict=True))
            row |= {
                "examples": len(group),
                "defined": len(values),
                **dict.fromkeys(OVER_EXAMPLES, float("nan")),
            }
            if len(values):
                low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
                numbers = values.mean(), median, low, high, *metrics.typical(values).interval
                row |= zip(OVER_EXAMPLES, numbers, strict=True)
            # All medians are over the examples that define the first distance.
            defined = group.loc[group["defined"]]
            for name in self.provenance.get("distances", ())[1:]:
                row[f"median_recovery_{name}"] = defined[f"recovery_{name}"].median()
            rows.append(row)
        return pd.DataFrame(rows)

    def left(self, control: str = "together") -> dict[str, dict[str, float]]:
        """The distance that a control leaves: its mean, and its median share of the unpatched
        distance.

        Args:
            control: ``"together"``, the difference that no patch of the site reaches, or
                ``"floor"``, the unembedding's own.

        Returns:
            By distance ``{"mean": ..., "share": ...}``; empty if the controls did not run or
            nothing is defined.
        """
        if "control" not in self.controls:
            return {}
        # A prompt that ended before any step that counts has no distance to average.
        rows = self.controls[(self.controls["control"] == control) & (self.controls["steps"] > 0)]
        left = {}
        for at, name in enumerate(self.provenance.get("distances", ())):
            suffix = f"_{name}" if at else ""
            defined = rows[rows[f"d_before{suffix}"] > 0]
            if len(defined):
                share = (defined[f"d_after{suffix}"] / defined[f"d_before{suffix}"]).median()
                left[str(name)] = {
                    "mean": float(rows[f"d_after{suffix}"].mean()),
                    "share": float(share),
                }
        return left

    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``."""
        aggregate = self.aggregate()
        defined = aggregate.dropna(subset=["median"])
        # By the median, as in the figures: one example whose paths hardly differ can decide a mean
        #     of ratios.
        best = defined.loc[defined["median"].idxmax()].to_dict() if len(defined) else None
        controls = (
            self.controls.groupby("control")["recovery"].mean()
            if len(self.controls)
            else pd.Series(dtype=float)
        )
        first = self.recovery.groupby("example")[["equal", "why"]].first()
        return {
            **{name: self.provenance[name] for name in SETTINGS if name in self.provenance},
            "examples": int(self.recovery["example"].nunique()),
            "examples_without_difference": int(first["equal"].sum()),
            "examples_undefined": {
                str(why): int(count) for why, count in first["why"].value_counts().items() if why
            },
            "best": best,
            "controls": {
                name: None if np.isnan(value) else float(value) for name, value in controls.items()
            },
            "floor": self.left("floor"),
            "together": self.left("together"),
            "provenance": self.provenance,
        }


class Tables:
    """Collects the rows of a sweep's tables, example by example."""

    def __init__(self, setting: Setting, step_set: str) -> None:
        self.setting, self.step_set = setting, step_set
        self.recovery: list[Row] = []
        self.steps: list[Row] = []
        self.controls: list[Row] = []
        self.logits: dict[int, Tensor] = {}
        self.work = Counter(forwards=0, blocks=0)

    def add(
        self, example: int, prompt_length: int, planned: Sequence[PlannedPatch], advanced: Advanced
    ) -> None:
        """Adds the distances of one example, before and after each patch."""
        self.work.update(advanced.work)
        names, protocol, distances = (
            tuple(self.setting.distances),
            self.setting.protocol,
            advanced.distances,
        )
        steps, before, logit_columns = range(distances.shape[1]), distances[:, :, 0], [0, 1]
        for column, (plan, unchanged) in enumerate(
            zip(planned, advanced.unchanged, strict=True), 2
        ):
            # A block after the newest position of the last step, or one that no step computes,
            # never existed.
            if plan.patch.starts_at >= prompt_length + len(steps) - 1 or not self.setting.reaches(
                plan.patch, prompt_length
            ):
                continue
            after = distances[:, :, column - 1]
            counted = [
                step
                for step in steps
                if (step >= 1 if protocol == "free" else plan.patch.active(step))
            ]
            # If the sequence ended before any step that counts, there is nothing to recover.
            means = [
                (d[:, counted].mean(1) if counted else d.new_zeros(len(names)))
                for d in (before, after)
            ]
            l2 = float(means[0][names.index("l2")])
            row = {
                **plan.labels,
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
            if plan.control:
                self.controls.append({**row, "control": plan.control})
                continue
            logit_columns.append(column)
            self.recovery.append(row)
            self.steps += [
                {
                    **plan.labels,
                    "example": example,
                    "step": step,
                    **_columns(names, before[:, step], after[:, step]),
                }
                for step in counted
            ]
        if advanced.logits is not None:
            self.logits[example] = advanced.logits[:, logit_columns]


def _columns(
    names: Sequence[str], before: Float64[Tensor, " distance"], after: Float64[Tensor, " distance"]
) -> dict[str, float]:
    """The columns of recovery and both distances: plain names for the first distance, its name as
    suffix for every other.
    """
    measures = {"recovery": metrics.recovery(before, after), "d_before": before, "d_after": after}
    return {
        f"{measure}_{name}" if at else measure: float(values[at])
        for at, name in enumerate(names)
        for measure, values in measures.items()
    }
