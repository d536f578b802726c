"""One side's judgement: a word and why, of its distance (``distance.py``) and the cause that was found (``cause_search.py``).

Where no cause was found, what is left is said here: rounding, another precision than was declared, unexplained, or that it
cannot be told. ``judge.py`` reads the file, judges each side, and makes the verdict of the worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvinterp.auditing.verdict import CANNOT_TELL, VERDICTS
from kvinterp.engines.cause_search import CauseSearch
from kvinterp.engines.distance import Distance
from kvinterp.engines.logged import logged
from kvinterp.engines.numbers import FEWEST
from kvinterp.engines.ours import Ours
from kvinterp.engines.ways import PRECISIONS
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import EnginePath


@dataclasses.dataclass
class Side:
    """One side's log-probs and their judgement; :meth:`judge` sets ``word`` and ``why``."""

    ours: Ours
    name: str
    paths: Sequence[EnginePath]
    declared: str | None
    seed: int
    older: Adapter | None = None

    def __post_init__(self) -> None:
        self.distance = Distance(self.ours, self.paths, self.declared, self.seed)
        self.search = CauseSearch(self.distance, self.older)

    def judge(self) -> None:
        """Sets ``word`` and ``why``."""
        if (unreadable := self.distance.read()) is not None:
            self.word, self.why = CANNOT_TELL, unreadable
            return
        within = self.distance.measure()
        self.word, self.why = self.search.find(within) or (
            self._rounding() if within else self._unexplained()
        )

    def _rounding(self) -> tuple[str, str]:
        near = self.distance.near.name
        self.distance.say(
            "substitution",
            "not run",
            f"rounding in {near} is as large as what there is; {self.distance.sensitivity}.",
        )
        word = "rounding" if self.distance.gap.any() else "equal"
        return (
            word,
            f"{'no more than rounding in ' + near if self.distance.gap.any() else VERDICTS[word]}; {self.distance.sensitivity}.",
        )

    def _unexplained(self) -> tuple[str, str]:
        exhausted = self.search.exhausted + self._routed()
        if why := self._rounded_weights():
            return CANNOT_TELL, f"{why}; {exhausted}."
        if self.distance.coarser:
            return (
                "wrong-dtype",
                f"declared {self.declared}, stands on {self.distance.coarser}; {exhausted}.",
            )
        how = "" if self.declared == "float32" else "in float32 "
        after = f"Next: see that both have the same checkpoint; then the engine {how}with a plain cache, once cold and once warm."
        if self.distance.prefixed:
            tried = f"{exhausted}; it is largest where the replies begin and falls along them, as behind another prompt: "
            exhausted = f"{tried}other tokens before them than the file says, or a prefix from an older cache"
            after = "Next: ask the engine for the ids that it saw (vLLM: return_token_ids), and judge these."
        elif self.distance.unseen:
            after = (
                "Next: ask the engine for the ids that it saw (vLLM: return_token_ids) and the prompts' log-probs, which are not "
                "here: that it saw another prompt, other tokens before the replies, is not ruled out."
            )
        if said := self._raised():
            after = f"{said}: ask the engine for its log-probs before that."
        # Further off than with every result rounded to a bit fewer; or, at a token, than any way of
        # the next coarser precision. Where none was declared it may be the coarsest.
        rungs = self.distance.measured_rungs()
        precisions = rungs if self.declared is not None else rungs[-1:]
        first, coarser = precisions[0], precisions[:2][-1]
        far = ""
        if first["low"] > first["bit_fewer"]:
            far = f"{first['mean']:.3g} times our own distance in {first['precision']}, {first['bit_fewer']:.3g} with a bit fewer"
        elif coarser["max"] > coarser["null_max"]:
            far = f"at one token {coarser['max']:.3g} times our largest distance in {coarser['precision']}"
        if far:
            return "unexplained", f"{far}, which no rounding is; {exhausted}. {after}"
        after = (
            after
            if self.declared
            else "Next: say with --dtype what the engine computes in, or run it in float32."
        )
        return (
            CANNOT_TELL,
            f"more than rounding in {self.distance.near.name}, and {exhausted}; {self.distance.sensitivity}. {after}",
        )

    def _raised(self) -> str:
        """Says that the log-probs are above ours alone where they are off; empty where they are
        not.
        """
        own, limits = (
            self.distance.row(self.distance.near, self.distance.sample),
            self.distance.rounding(self.distance.near),
        )
        if own is None or limits is None:
            return ""
        apart = self.distance.sample.engine - self.distance.sample_truth
        far = np.abs(apart) > limits["null_max"] * float(
            self.distance.between(own, self.distance.sample_truth).max()
        )
        if far.sum() < FEWEST // 2 or (apart[far] < 0).any():
            return ""
        return (
            f"Where it is off (at {far.sum():,} tokens) it is above ours each time, as log-probs that are renormalised over "
            "allowed tokens are, by a grammar or a truncation of another size"
        )

    def _routed(self) -> str:
        """Says what of the distance is other experts; empty where the model has none, or they leave
        all of it.
        """
        rows = [
            row
            for row in self.distance.table["tried"]
            if row["cause"].startswith("the experts that our own")
        ]
        best = min(rows, key=lambda row: float(row["left"]), default=None)
        if best is None or best["left"] >= 1:
            return ""
        return f"; with {best['cause']} {best['left']:.2g} of it is left"

    def _rounded_weights(self) -> str:
        """Says that our weights were loaded coarser than the engine's were; empty where they were
        not.
        """
        ours = str(self.ours.adapter.dtype).removeprefix("torch.")
        names = [precision.name for precision in PRECISIONS]
        if ours not in names[1:] or self.declared == ours:
            return ""
        # No cause can be named for a difference that is no larger than that of rounded weights.
        rows = self.distance.measured_rungs()
        if not any(
            row["mean"] <= row["null_mean"]
            for row in rows
            if names.index(row["precision"]) >= names.index(ours)
        ):
            return ""
        return (
            f"the weights here were rounded to {ours} when this model was loaded, and the engine's may not have been: it is no "
            f"further off than that rounding; give the model in float32"
        )

    def statistics(self) -> dict[str, Any] | None:
        """Returns what a training run logs of these log-probs; None where nothing is given."""
        if "truth" not in vars(self.distance):
            return None
        ours = (
            self.distance.row(self.distance.near, self.distance.tokens)
            if "near" in vars(self.distance)
            else None
        )
        return logged(
            self.paths,
            self.distance.tokens,
            self.distance.truth,
            ours,
            self.distance.near.name if ours is not None else "",
            self.seed,
        )
