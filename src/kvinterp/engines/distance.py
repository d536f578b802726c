"""How far one side's log-probs are from our float64: what was read, in units of our own rounding, and at which tokens.

A side is an engine, or the trainer beside it. Its tokens are read once; what stands for none is left out. The ladder of
precisions then says how far our own path, and the nulls, are from float64 on the same tokens, and so what rounding may
do there. ``cause_search.py`` looks on the tokens that are off for what gives the same numbers, and ``side.py`` puts the
two into a word.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvinterp.auditing.checks import Check
from kvinterp.common.numbers import listed
from kvinterp.engines.numbers import FEWEST, TINY, Tokens, alike, grid_of
from kvinterp.engines.ours import TRUTH, Ours, Row
from kvinterp.engines.ways import PRECISIONS, WEIGHTS, Way, nulls
from kvinterp.engines.where import Null, Where, falls_along, find_where
from kvinterp.errors import InputError
from kvinterp.recording.engine_path import ROUNDED, EnginePath, positive

log = logging.getLogger("kvinterp")

TRIED = 1024
"""The most tokens on which nulls and causes are tried."""
LOGITS = 2**25
"""The most logits of them, whatever the vocabulary."""
LIMITS = ("spread", "own", "null_mean", "null_max", "bit_fewer")
"""What :meth:`Distance.rounding` measures of a precision."""


@dataclasses.dataclass
class Distance:
    """How far one side's log-probs are from our float64 on the same tokens.

    Args:
        ours: Our own log-probs of the same texts.
        paths: What the side gave of each text.
        declared: The dtype that it was said to compute in; None where nobody said it.
        seed: Seeds the resampling.

    Attributes:
        checks: What was seen, a sentence each.
        table: The numbers behind it, for the verdict's ``given``.
        tokens: The tokens that have a log-prob.
        truth: ``[token]``, our float64 of them.
        gap: ``[token]``, their distance in nats.
        grid: How the file rounds what it writes; None where it does not.
        near: The precision that the rest is said of; set by :meth:`find_precision`, as are
            ``coarser``, the name of a coarser one than was declared that it stands on, and
            ``sensitivity``, the phrase of how small a difference would have shown.
        sample: The tokens on which nulls and causes are tried; ``sample_truth`` is our float64 of
            them.
        placed: Which tokens are off; None before :meth:`find_tokens`.
        begins: The first position that is off, or from which on there is more of it.
        where: The phrase of it.
        prefixed: Whether it is largest where the replies begin, and falls along them.
        unseen: Whether replies are off from their beginning behind prompts without log-probs.
    """

    ours: Ours
    paths: Sequence[EnginePath]
    declared: str | None
    seed: int

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self.table: dict[str, Any] = {
            "declared": self.declared or "not given",
            "rungs": [],
            "tried": [],
        }
        self.begins: int | None = None
        self.where = ""
        self.placed: Where | None = None
        self.prefixed = self.unseen = False
        self.limits: dict[str, dict[str, float] | None] = {}

    def measure(self) -> bool:
        """Measures how far the side is, and finds the tokens that are off; returns whether it lies
        within rounding of the precision that was declared.
        """
        facts = self.ours.adapter.facts
        truth = self.row(TRUTH, self.tokens)
        if truth is None:
            raise InputError(
                f"{facts.name} gives NaN or Inf in float64 on these tokens: give another model."
            )
        self.truth = truth
        self.sample_from(self.tokens)
        self.gap = np.abs(self.tokens.engine - self.truth)
        most = int(self.gap.argmax())
        log.info(
            "so far: %s log-probs lie %.2g nats from our float64 on average, at most %.2g (sequence %s, position %s); what "
            "rounding makes of them is measured next.",
            f"{len(self.gap):,}",
            self.gap.mean(),
            self.gap[most],
            self.tokens.sequence[most] + 1,
            self.tokens.position[most],
        )
        within = self.find_precision()
        if not within:
            self.find_tokens()
        return within

    def say(self, name: str, status: str, detail: str, error: float | None = None) -> None:
        """Adds a check to those that are shown."""
        self.checks.append(Check(name, status, detail, error))

    def read(self) -> str | None:
        """Reads the tokens that have a log-prob and says how many; returns why nothing can be judged, or None."""
        missing = sum((path.missing for path in self.paths), Counter[str]())
        zeros = self._settle_zeros(missing)
        self.tokens = Tokens.of(self.paths)
        engine = self.tokens.engine
        where = " ".join(filter(None, (self._counted(len(engine), missing), zeros)))
        self.table |= {
            "sequences": len(self.paths),
            "tokens": len(engine),
            "missing": dict(missing),
        }
        why = positive(engine) or self._all_zero()
        if why is None and (above := engine > 0).any():
            where += f" {int(above.sum()):,} above 0, by {engine.max():.1g} at most, are taken for 0, rounded."
            engine[above] = 0
        if self.grid is not None:
            where += (
                f" They are written {self.grid[0]}: so are ours, before their distance is taken."
            )
        if why is None and len(engine) < FEWEST:
            why = f"{len(engine)} tokens have a log-prob, and of fewer than {FEWEST} nothing is judged: ask the engine for more."
        self.say(
            "readable",
            "passed" if why is None else "cannot tell",
            where if why is None else f"{why} {where}",
        )
        return why

    def _all_zero(self) -> str | None:
        """Returns a sentence where every value is 0.0 where the model is not certain of every token; None
        otherwise.
        """
        engine, ours = self.tokens.engine, self.row(TRUTH, self.tokens)
        if not len(engine) or engine.any() or ours is None or (ours >= -ROUNDED).all():
            return None
        return (
            f"every value is exactly 0.0 ({len(engine):,} times), which says p = 1 of each token, and ours is "
            f"{ours.mean():.2g} on average: these are no log-probs, as an engine writes them where it drafts "
            "tokens; ask it without speculative decoding."
        )

    def _counted(self, given: int, missing: Counter[str]) -> str:
        """Says how many tokens have a log-prob, and what the others are."""
        total = sum(len(path.ids) for path in self.paths)
        prompts = sum(int(np.isnan(path.chosen[: len(path.prompt)]).sum()) for path in self.paths)
        kinds = [("of the prompts", prompts), ("of the replies", total - given - prompts)]
        whose = " and ".join(f"{count:,} {kind}" for kind, count in kinds if count > 0)
        # The first token of a text has no log-prob in any file.
        others = f"; the other {total - given:,} have none: {whose}." if whose else "."
        marks = listed(
            [
                f"{word} ({count:,} time{'s' * (count != 1)})"
                for word, count in missing.most_common()
                if word != "0.0"
            ]
        )
        sequences = f"{len(self.paths):,} sequence{'s' * (len(self.paths) != 1)}"
        said = (
            f"{given:,} of {total:,} tokens in {sequences} have a log-prob that is judged{others}"
        )
        return said + (f" In place of a log-prob the file holds {marks}." if marks else "")

    def _settle_zeros(self, missing: Counter[str]) -> str:
        """Takes out the exact zeros that a format writes where it has no log-prob; returns what
        they are, in a sentence.

        A zero stays where our own log-prob is 0 too, once it is written as the others are: its
        probability rounds to 1 in the declared precision (in float32 where none was declared), or
        it is 0 on the file's grid.
        """
        every = Tokens.of(self.paths)
        step = next((path.step for path in self.paths if path.step is not None), None)
        of_path = np.array([path.zeros == "doubtful" for path in self.paths], bool)
        doubtful = (every.engine == 0) & of_path[every.sequence]
        zero = every.engine == 0
        # A zero lies on every grid, so it says nothing of how the others are written.
        self.grid = grid_of(every.engine[~zero], step) if not zero.all() else None
        if not doubtful.any():
            return ""
        rows = {
            number: self.ours.row(TRUTH, number)
            for number in np.unique(every.sequence[doubtful]).tolist()
        }
        ours = np.nan_to_num(every.gathered(rows), nan=-np.inf)
        certain = ours >= -torch.finfo(getattr(torch, self.declared or "float32")).eps
        if self.grid is not None:
            certain |= self.grid[1](ours) == 0
        own, none = doubtful & certain, doubtful & ~certain
        for number, at in zip(every.sequence[none], every.position[none], strict=True):
            self.paths[number].chosen[at] = np.nan
        for path in self.paths:
            if path.zeros == "doubtful" and path.chosen[0] == 0:
                path.chosen[0] = np.nan
        self.table["zeros"] = {"kept": int(own.sum()), "left_out": int(none.sum())}
        said = (
            [f"{int(own.sum()):,} of those judged are exactly 0, and so is ours, rounded."]
            if own.any()
            else []
        )
        if none.any():
            missing["0.0"] += int(none.sum())
            said.append(
                f"In {int(none.sum()):,} places the file holds exactly 0 where ours is {np.median(ours[none]):.2g} (the median): "
                "that is no log-prob of this model but what such files write where they have none, and it is left out."
            )
        return " ".join(said)

    def row(self, way: Way, tokens: Tokens) -> Row | None:
        """Returns log-probs along one of our ways; None where this model has no such way, or it
        overflows.
        """
        rows = {
            number: self.ours.row(way, number) for number in np.unique(tokens.sequence).tolist()
        }
        if any(row is None for row in rows.values()):
            return None
        row = tokens.gathered(rows)
        # Some tokens have no other one in their place.
        return (
            row
            if np.isfinite(row).all() or way.word == "misaligned" or way.before is not None
            else None
        )

    def logits(self, way: Way, tokens: Tokens) -> tuple[torch.Tensor, np.ndarray] | None:
        """Returns ``[token, vocabulary]`` logits of a way and ``[token]`` ids; None where this
        model has no such way.
        """
        logits, ids = [], []
        for number in np.unique(tokens.sequence).tolist():
            path, at = self.paths[number], tokens.position[tokens.sequence == number]
            # What a shift leaves without a token is that of an end.
            at = (at + way.shift).clip(1, len(path.ids) - 1)
            row = self.ours.logits(way, number)
            if row is None:
                return None
            logits.append(row[torch.from_numpy(at - 1)].cpu())
            ids.append(np.array(path.ids)[at])
        return torch.cat(logits), np.concatenate(ids)

    def between(self, row: Row, beside: Row) -> Row:
        """Returns how far one of our rows is from another, once it is written as the side's are."""
        return np.abs((row if self.grid is None else self.grid[1](row)) - beside)

    def rounding(self, precision: Way) -> dict[str, float] | None:
        """Measures how far other ways to compute the same in a precision are from float64 here;
        None where it cannot be run.

        Returns:
            ``own``, the mean distance of our own path; in units of it ``null_mean``, of the
            furthest null on average, and ``bit_fewer``, of the furthest way that rounds to a bit
            fewer; in units of our largest ``null_max``, of any of them; ``spread``, the furthest of
            all on average in one sequence, in units of our own mean there.
        """
        if precision.name not in self.limits:
            gaps = [
                [
                    self.between(row, self.sample_truth)
                    for way in ways
                    if (row := self.row(way, self.sample)) is not None
                ]
                for ways in ([precision], *nulls(precision))
            ]
            own, others, fewer = (
                [(float(gap.mean()), float(gap.max())) for gap in each] for each in gaps
            )
            self.limits[precision.name] = None
            if own:
                mean, most = own[0]
                parts = [
                    self.sample.sequence == number for number in np.unique(self.sample.sequence)
                ]
                units = [max(float(gaps[0][0][at].mean()), mean, TINY) for at in parts]
                spread = max(
                    float(gap[at].mean()) / unit
                    for each in gaps
                    for gap in each
                    for at, unit in zip(parts, units, strict=True)
                )
                null_mean = max(own + others)[0] / max(mean, TINY)
                null_max = max(largest for _, largest in own + others + fewer) / max(most, TINY)
                bit_fewer = max(own + others + fewer)[0] / max(mean, TINY)
                measured = (spread, mean, null_mean, null_max, bit_fewer)
                self.limits[precision.name] = dict(zip(LIMITS, measured, strict=True))
        return self.limits[precision.name]

    def find_precision(self) -> bool:
        """Finds the precision that the rest is said of; returns whether the side lies within its
        rounding.
        """
        asked = next(
            (precision for precision in PRECISIONS if precision.name == self.declared),
            PRECISIONS[0],
        )
        stands = None
        # What is no rounding of a precision is none of a finer one.
        for precision in PRECISIONS[PRECISIONS.index(asked) :]:
            self.ours.tell(precision.name)
            # What was not declared is stood on only where its differences go with ours: two engines
            # in one precision round the same weights, and often more, alike.
            same = self._goes_with(precision)
            # Where that is settled some tokens are enough, and the nulls wait until they are asked
            # for.
            decides = precision is asked or same
            ratio = self._ratio(precision, *self._judged_on(decides))
            if ratio is None:
                continue
            limits = self.rounding(precision) if decides else None
            lies = (
                limits is not None
                and ratio["mean"] <= limits["null_mean"]
                and ratio["max"] <= limits["null_max"]
            )
            words = {"goes_with_ours": "yes" if same else "no", "within": "yes" if lies else "no"}
            row = {"precision": precision.name, **ratio, **(limits or dict.fromkeys(LIMITS))}
            self.table["rungs"].append(row | words)
            if lies:
                stands = precision
                break
        other = stands is not None and stands is not asked and self.declared is not None
        self.coarser = stands.name if stands is not None and other else ""
        self.near = asked if stands is None or other else stands
        self._say_precision(
            "none of ours" if stands is None else stands.name, stands is not None and not other
        )
        return stands is not None and not other

    def _judged_on(self, every: bool) -> tuple[Tokens, Row]:
        """Every judged token and our float64 of it; or those on which causes are tried."""
        return (self.tokens, self.truth) if every else (self.sample, self.sample_truth)

    def _ratio(self, precision: Way, tokens: Tokens, truth: Row) -> dict[str, float] | None:
        """How far the side is in units of our own distance in a precision; None where it cannot be
        run.
        """
        own = self.row(precision, tokens)
        if own is None:
            return None
        gap = np.abs(tokens.engine - truth)
        return {"n": len(gap), **tokens.ratio(gap, self.between(own, truth), self.seed)}

    def _goes_with(self, precision: Way) -> bool:
        """Whether the side's differences to float64 surely go with ours in a precision, or with
        those of its weights alone.
        """
        for way in (precision, WEIGHTS.get(precision.name)):
            # Some tokens first, which are enough to say no.
            for tokens, truth in map(self._judged_on, (False, True)):
                row = None if way is None else self.row(way, tokens)
                if row is None or not alike(tokens.engine - truth, row - truth):
                    break
            else:
                return True
        return False

    def measured_rungs(self) -> list[dict[str, Any]]:
        """Returns the precisions' distances on every token with the nulls of each, measured now
        where they were not yet.
        """
        rows: list[dict[str, Any]] = self.table["rungs"]
        for row in rows:
            if row["own"] is None:
                (precision,) = (one for one in PRECISIONS if one.name == row["precision"])
                row |= self._ratio(precision, *self._judged_on(True)) or {}
                row |= self.rounding(precision) or {}
        return rows

    def _say_precision(self, stands: str, within: bool) -> None:
        """Says how far the side is in units of our own rounding, from where on, and what would have
        shown.
        """
        near, own = self.near.name, self.row(self.near, self.tokens)
        row = next((row for row in self.table["rungs"] if row["precision"] == near), None)
        if row is None or own is None:
            name = self.ours.adapter.facts.name
            raise InputError(
                f"{name} gives NaN or Inf in {near} on these tokens: say another dtype, or give another model."
            )
        noise, n = self.between(own, self.truth), f"n = {len(self.gap):,}"
        self.say(
            "rung", "passed" if within else "cannot tell",
            f"{row['mean']:.3g} times our own mean distance to float64 in {near} ({row['low']:.3g} to {row['high']:.3g}), "
            f"where the furthest of our nulls is {row['null_mean']:.3g} times; {row['max']:.3g} times our largest, of the nulls "
            f"{row['null_max']:.3g}; stands on {stands} ({n}).",
            row["mean"],
        )  # fmt: skip
        if within:
            self.begins = at = self.tokens.onset(self.gap, noise)
            shape = (
                "no position was found at which it begins"
                if at is None
                else f"more of it from position {at} on"
            )
            self.say("shape", "passed", f"{shape}: a suspicion, no cause ({n}).")
        # Errors add as squares.
        mean, most = (
            np.sqrt(max(row["null_mean"] ** 2 - 1, 0)) * row["own"],
            row["null_max"] * noise.max(),
        )
        self.table |= {
            "beside": near,
            "our_mean_distance": row["own"],
            "smallest_mean_difference_that_shows": float(mean),
            "smallest_at_one_token_that_shows": float(most),
        }
        self.sensitivity = f"a mean difference of {mean:.2g} nats, or {most:.2g} at one token, would have shown ({n} in {near})"

    def sample_from(self, tokens: Tokens) -> None:
        """Takes the tokens on which nulls and causes are tried from some."""
        self.sample = tokens.some(
            min(TRIED, max(FEWEST, LOGITS // self.ours.adapter.facts.vocabulary))
        )
        truth = self.row(TRUTH, self.sample)
        assert truth is not None, "it was computed for all tokens"
        self.sample_truth = truth

    def find_tokens(self) -> None:
        """Finds which tokens are off, and takes those on which causes are tried from them."""
        own, limits = self.row(self.near, self.tokens), self.limits[self.near.name]
        if own is None or limits is None:
            return
        noise = self.between(own, self.truth)
        null = Null(noise, limits["spread"], limits["null_max"] * float(noise.max()))
        where = find_where(self.tokens, [len(path.prompt) for path in self.paths], self.gap, null)
        self.placed, self.begins, self.where = where, where.first, where.said
        prompts = np.array([len(path.prompt) for path in self.paths])
        cuts = prompts[self.tokens.sequence]
        # Replies that are off from their beginning behind prompts that nothing is known of.
        self.unseen = bool(
            (self.tokens.position >= cuts).all()
            and ((self.tokens.position - cuts)[where.off] <= 1).any()
        )
        self.prefixed = falls_along(self.tokens, cuts, self.gap, noise, where.off)
        self.table["where"] = {
            "said": where.said,
            "tokens": int(where.off.sum()),
            "sequences": where.rows,
        }
        self.say(
            "which tokens",
            "failed",
            f"{where.said} ({where.off.sum():,} of {len(self.gap):,} tokens).",
        )
        # What is left out has to be rounding: a cause of every token that shows in some alone is
        #     fitted on all.
        rest = ~where.off
        fine = not rest.any() or self.gap[rest].mean() <= limits["null_mean"] * noise[rest].mean()
        if fine and where.off.sum() >= FEWEST:
            self.sample_from(self.tokens.at(where.off))
