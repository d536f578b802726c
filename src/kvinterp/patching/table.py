"""What a sweep found, as tidy tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from kvinterp import metrics
from kvinterp.patching.side_by_side import Advanced, PlannedLane, Setting

__all__ = ["Sweep", "Tables"]

LABELS = ["sweep", "site", "layer", "head", "positions"]
"""The columns that say which patch a row is about."""
OVER_EXAMPLES = ("mean", "median", "low_quartile", "high_quartile", "interval_low", "interval_high")
"""The columns of an aggregate; NaN where no example defines a recovery."""


@dataclasses.dataclass
class Sweep:
    """Recovery of every patch of a sweep: ``1 - D(patched, donor) / D(unpatched, donor)``.

    Attributes:
        recovery: One row an example and patch: sweep, site, layer, head, positions (head and layer are -1 where they do
            not vary), step_set, direction, protocol, example (counted in the prompts given), recovery (a fraction, below 0
            where the patch made the paths differ more; NaN where the unpatched paths are bitwise equal, and then
            ``defined`` is False), d_before, d_after, steps (counted in D), first_step.
        steps: One row an example, patch and counted step: recovery, d_before, d_after.
        controls: One row an example and control: self (0), other-prompt, floor, all-positions; and one row a planted cause
            (on the first prompt, in float64: the share of the difference found, at the place found).
        about: Paths, protocol, distance, provenance, and the work done: forwards and blocks of the recompute path.
        logits: For each example ``[step, path, vocab]``, where asked for: the donor, the unpatched path, then the patches
            in the order of the table.
    """

    recovery: pd.DataFrame
    steps: pd.DataFrame
    controls: pd.DataFrame
    about: dict[str, Any]
    logits: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def aggregate(self) -> pd.DataFrame:
        """Over examples, for each patch: mean, median, quartiles and a bootstrap interval of the mean recovery.

        They are NaN where no example defines a recovery.
        """
        rows = []
        for labels, group in self.recovery.groupby(LABELS, sort=False):
            values = group.loc[group["defined"], "recovery"].to_numpy()
            row: dict[str, Any] = dict(zip(LABELS, labels, strict=True))
            row |= {"examples": len(group), "defined": len(values), **dict.fromkeys(OVER_EXAMPLES, float("nan"))}
            if len(values):
                interval = metrics.bootstrap_interval(values)
                quartiles = np.quantile(values, (0.25, 0.5, 0.75))
                row |= {"mean": values.mean(), "median": quartiles[1], "low_quartile": quartiles[0]}
                row |= {"high_quartile": quartiles[2], "interval_low": interval.low, "interval_high": interval.high}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``."""
        aggregate = self.aggregate()
        known = aggregate.dropna(subset=["median"])
        # By the median, as in the figures: one example whose paths hardly differ decides a mean of ratios.
        best = known.loc[known["median"].idxmax()].to_dict() if len(known) else None
        controls = self.controls.groupby("control")["recovery"].mean() if len(self.controls) else pd.Series(dtype=float)
        floor = self.controls[self.controls["control"] == "floor"] if len(self.controls) else self.controls
        # A prompt that ended before any step that counts has no distance to average.
        floor = floor[floor["steps"] > 0] if len(floor) else floor
        return {
            **{k: v for k, v in self.about.items() if k != "provenance"},
            "examples": int(self.recovery["example"].nunique()),
            "examples_without_difference": int((~self.recovery.groupby("example")["defined"].first()).sum()),
            "best": best,
            "controls": {name: None if np.isnan(value) else float(value) for name, value in controls.items()},
            "floor": None if floor.empty else float(floor["d_after"].mean()),
            "provenance": self.about["provenance"],
        }


class Tables:
    """The rows of a sweep's tables as its examples come in."""

    def __init__(self, setting: Setting, step_set: str) -> None:
        self.setting, self.step_set = setting, step_set
        self.recovery: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.controls: list[dict[str, Any]] = []
        self.logits: dict[int, Tensor] = {}
        self.work = {"forwards": 0, "blocks": 0}

    def add(self, example: int, prompt_length: int, lanes: Sequence[PlannedLane], advanced: Advanced) -> None:
        """Adds one example."""
        self.work = {"forwards": self.work["forwards"] + advanced.forwards, "blocks": self.work["blocks"] + advanced.blocks}
        # The newest position of the last step that ran; a block beyond it, or that no step computes, was never there.
        held = prompt_length + len(advanced.distances) - 1
        there = [
            column
            for column, lane in enumerate(lanes)
            if lane.starts_at < held and self.setting.reaches(lane, prompt_length)
        ]
        if advanced.logits is not None:
            kept = [column for column in there if not lanes[column].control]
            self.logits[example] = advanced.logits[:, [0, 1, *(2 + column for column in kept)]]
        for column in there:
            self._add_lane(example, lanes[column], advanced.distances[:, 0], advanced.distances[:, 1 + column])

    def _add_lane(
        self, example: int, lane: PlannedLane, before: Float64[Tensor, " step"], after: Float64[Tensor, " step"]
    ) -> None:
        steps = range(len(before))
        free = self.setting.protocol == "free"
        counted = [step for step in steps if (step >= 1 if free else lane.active(step))]
        # Where the end of the sequence came before any step that counts, there is nothing to recover.
        d_before, d_after = (d[counted].mean() if counted else d.new_zeros(()) for d in (before, after))
        row = {
            **lane.labels,
            "step_set": self.step_set,
            "direction": self.setting.direction,
            "protocol": self.setting.protocol,
            "example": example,
            "recovery": float(metrics.recovery(d_before, d_after)),
            "d_before": float(d_before),
            "d_after": float(d_after),
            "defined": bool(d_before > 0),
            "steps": len(counted),
            "first_step": counted[0] if counted else -1,
        }
        if lane.control:
            self.controls.append({**row, "control": lane.control})
            return
        self.recovery.append(row)
        by_step = metrics.recovery(before, after)
        self.steps += [
            {
                **lane.labels,
                "example": example,
                "step": step,
                "recovery": float(by_step[step]),
                "d_before": float(before[step]),
                "d_after": float(after[step]),
            }
            for step in counted
        ]
