"""One side's log-probs and their judgement: readable, how far off, which tokens, and what gives the same."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvinterp.auditing.checks import Check
from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, VERDICTS
from kvinterp.common.numbers import listed
from kvinterp.engines.numbers import (
    CHANCE,
    FEWEST,
    TINY,
    Tokens,
    alike,
    fitted,
    grid_of,
    mean_gap,
    nearer,
    truncated,
    warmed,
)
from kvinterp.engines.ways import RUNGS, WEIGHTS, Way, causes, log_probs, nulls, own_row
from kvinterp.engines.where import Null, place
from kvinterp.errors import InputError
from kvinterp.metrics.rollouts import rollout_intervals, rollout_statistics
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import ROUNDED, EnginePath, positive

TRIED = 1024
"""The most tokens on which nulls and causes are tried."""
LOGITS = 2**25
"""The most logits of them, whatever the vocabulary."""
TRUTH = Way("float64")

Row = np.ndarray
"""``[token]``, log-probs in nats; NaN where there is none."""


@dataclasses.dataclass
class Ours:
    """Our own log-probs of the same texts, along each way that was asked for, computed once."""

    adapter: Adapter
    paths: Sequence[EnginePath]
    tell: Callable[[str], None]
    known: dict[tuple[str, float, str, int], Row | None] = dataclasses.field(default_factory=dict)

    def row(self, way: Way, number: int) -> Row | None:
        """``[position]``, the log-probs of one path; None where this model has no such way."""
        key = (way.name, way.size, way.dtype, number)
        if key not in self.known:
            self.tell(f"{way.name}, sequence {number + 1} of {len(self.paths)}")
            path = self.paths[number]
            self.known[key] = own_row(self.adapter, path.ids, len(path.prompt), way)
        return self.known[key]


@dataclasses.dataclass
class Side:
    """One side's log-probs and their judgement."""

    ours: Ours
    name: str
    paths: Sequence[EnginePath]
    declared: str | None
    seed: int

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self.table: dict[str, Any] = {"declared": self.declared or "not given", "rungs": [], "tried": []}
        self.begins: int | None = None
        self.where = ""
        self.limits: dict[str, dict[str, float] | None] = {}

    def judge(self) -> None:
        """Sets ``word`` and ``why``."""
        facts = self.ours.adapter.facts
        if (why := self._unreadable()) is not None:
            self.word, self.why = CANNOT_TELL, why
            return
        truth = self._row(TRUTH, self.tokens)
        if truth is None:
            raise InputError(f"{facts.name} gives NaN or Inf in float64 on these tokens: give another model.")
        self.truth = truth
        self._sampled(self.tokens)
        self.gap = np.abs(self.tokens.engine - self.truth)
        within = self._rung()
        if not within:
            self._place()
        self.word, self.why = self._explanation(within) or (self._rounding() if within else self._unexplained())

    def _say(self, name: str, status: str, detail: str, error: float | None = None) -> None:
        self.checks.append(Check(name, status, detail, error))

    def _unreadable(self) -> str | None:
        """Says what was read; returns why nothing can be judged, or None."""
        missing = sum((path.missing for path in self.paths), Counter[str]())
        zeros = self._settle_zeros(missing)
        self.tokens = Tokens.of(self.paths)
        engine = self.tokens.engine
        where = " ".join(filter(None, (self._counted(len(engine), missing), zeros)))
        self.table |= {"sequences": len(self.paths), "tokens": len(engine), "missing": dict(missing)}
        why = positive(engine) or self._all_zero()
        if why is None and (above := engine > 0).any():
            where += f" {int(above.sum()):,} above 0, by {engine.max():.1g} at most, are taken for 0, rounded."
            engine[above] = 0
        if self.grid is not None:
            where += f" They are written {self.grid[0]}: so are ours, before their distance is taken."
        if why is None and len(engine) < FEWEST:
            why = f"{len(engine)} tokens have a log-prob, and of fewer than {FEWEST} nothing is judged: ask the engine for more."
        self._say("readable", "passed" if why is None else "cannot tell", where if why is None else f"{why} {where}")
        return why

    def _all_zero(self) -> str | None:
        """Says that every value is 0.0 where the model is not certain of every token; None otherwise."""
        engine, ours = self.tokens.engine, self._row(TRUTH, self.tokens)
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
            [f"{word} ({count:,} time{'s' * (count != 1)})" for word, count in missing.most_common() if word != "0.0"]
        )
        sequences = f"{len(self.paths):,} sequence{'s' * (len(self.paths) != 1)}"
        said = f"{given:,} of {total:,} tokens in {sequences} have a log-prob that is judged{others}"
        return said + (f" In place of a log-prob the file holds {marks}." if marks else "")

    def _settle_zeros(self, missing: Counter[str]) -> str:
        """Takes out the exact zeros that a format writes where it has no log-prob; returns what they are, in a sentence.

        A zero stays where our own log-prob is 0 too, once it is written as the others are: its probability rounds to 1 in the
        declared precision (in float32 where none was declared), or it is 0 on the file's grid.
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
        rows = {number: self.ours.row(TRUTH, number) for number in np.unique(every.sequence[doubtful]).tolist()}
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
        said = [f"{int(own.sum()):,} of those judged are exactly 0, and so is ours, rounded."] if own.any() else []
        if none.any():
            missing["0.0"] += int(none.sum())
            said.append(
                f"In {int(none.sum()):,} places the file holds exactly 0 where ours is {np.median(ours[none]):.2g} (the median): "
                "that is no log-prob of this model but what such files write where they have none, and it is left out."
            )
        return " ".join(said)

    def _row(self, way: Way, tokens: Tokens) -> Row | None:
        """Returns log-probs along one of our ways; None where this model has no such way, or it overflows."""
        rows = {number: self.ours.row(way, number) for number in np.unique(tokens.sequence).tolist()}
        if any(row is None for row in rows.values()):
            return None
        row = tokens.gathered(rows)
        # Some tokens have no other one in their place.
        return row if np.isfinite(row).all() or way.word == "misaligned" else None

    def _distance(self, row: Row, beside: Row) -> Row:
        """Returns how far one of our rows is from another, once it is written as the side's are."""
        return np.abs((row if self.grid is None else self.grid[1](row)) - beside)

    # What rounding does ------------------------------------------------------------------------------------------------------

    def _limits(self, rung: Way) -> dict[str, float] | None:
        """Measures how far other ways to compute the same in a precision are from float64 here; None where it cannot be run.

        Returns:
            ``own``, the mean distance of our own path; in units of it ``null_mean``, of the furthest null on average, and
            ``bit_fewer``, of the furthest way that rounds to a bit fewer; in units of our largest ``null_max``, of any of them;
            ``spread``, the furthest of all on average in one sequence, in units of our own mean there.
        """
        if rung.name not in self.limits:
            gaps = [
                [self._distance(row, self.sample_truth) for way in ways if (row := self._row(way, self.sample)) is not None]
                for ways in ([rung], *nulls(rung))
            ]
            own, others, fewer = ([(float(gap.mean()), float(gap.max())) for gap in each] for each in gaps)
            self.limits[rung.name] = None
            if own:
                mean, most = own[0]
                parts = [self.sample.sequence == number for number in np.unique(self.sample.sequence)]
                units = [max(float(gaps[0][0][at].mean()), TINY) for at in parts]
                self.limits[rung.name] = {
                    "spread": max(
                        float(gap[at].mean()) / unit
                        for each in gaps
                        for gap in each
                        for at, unit in zip(parts, units, strict=True)
                    ),
                    "own": mean,
                    "null_mean": max(own + others)[0] / max(mean, TINY),
                    "null_max": max(largest for _, largest in own + others + fewer) / max(most, TINY),
                    "bit_fewer": max(own + others + fewer)[0] / max(mean, TINY),
                }
        return self.limits[rung.name]

    def _rung(self) -> bool:
        """Finds the precision that the rest is said of; returns whether the side lies within its rounding."""
        asked = next((rung for rung in RUNGS if rung.name == self.declared), RUNGS[0])
        stands = None
        # What is no rounding of a precision is none of a finer one.
        for rung in RUNGS[RUNGS.index(asked) :]:
            self.ours.tell(rung.name)
            limits, own = self._limits(rung), self._row(rung, self.tokens)
            if limits is None or own is None:
                continue
            ratio = self.tokens.ratio(self.gap, self._distance(own, self.truth), self.seed)
            # What was not declared is stood on only where its differences go with ours: two engines in one precision round the
            # same weights, and often more, alike.
            effects = [own, *(self._row(WEIGHTS[name], self.tokens) for name in (rung.name,) if name in WEIGHTS)]
            seen = self.tokens.engine - self.truth
            same = any(alike(seen, each - self.truth) for each in effects if each is not None)
            lies = ratio["mean"] <= limits["null_mean"] and ratio["max"] <= limits["null_max"] and (rung is asked or same)
            words = {"goes_with_ours": "yes" if same else "no", "within": "yes" if lies else "no"}
            self.table["rungs"].append({"precision": rung.name, **ratio, **limits, **words})
            if lies:
                stands = rung
                break
        other = stands is not None and stands is not asked and self.declared is not None
        self.coarser = stands.name if stands is not None and other else ""
        self.near = asked if stands is None or other else stands
        self._say_rung("none of ours" if stands is None else stands.name, stands is not None and not other)
        return stands is not None and not other

    def _say_rung(self, stands: str, within: bool) -> None:
        """Says how far the side is in units of our own rounding, from where on, and what would have shown."""
        near, own = self.near.name, self._row(self.near, self.tokens)
        row = next((row for row in self.table["rungs"] if row["precision"] == near), None)
        if row is None or own is None:
            name = self.ours.adapter.facts.name
            raise InputError(
                f"{name} gives NaN or Inf in {near} on these tokens: say another dtype, or give another model."
            )
        noise, n = self._distance(own, self.truth), f"n = {len(self.gap):,}"
        self._say(
            "rung", "passed" if within else "cannot tell",
            f"{row['mean']:.3g} times our own mean distance to float64 in {near} ({row['low']:.3g} to {row['high']:.3g}), "
            f"where the furthest of our nulls is {row['null_mean']:.3g} times; {row['max']:.3g} times our largest, of the nulls "
            f"{row['null_max']:.3g}; stands on {stands} ({n}).",
            row["mean"],
        )  # fmt: skip
        self.begins = at = self.tokens.onset(self.gap, noise)
        shape = "no position was found at which it begins" if at is None else f"more of it from position {at} on"
        self._say("shape", "passed", f"{shape}: a suspicion, no cause ({n}).")
        # Errors add as squares.
        mean, most = np.sqrt(max(row["null_mean"] ** 2 - 1, 0)) * row["own"], row["null_max"] * noise.max()
        self.table |= {
            "beside": near,
            "our_mean_distance": row["own"],
            "smallest_mean_difference_that_shows": float(mean),
            "smallest_at_one_token_that_shows": float(most),
        }
        self.least = f"a mean difference of {mean:.2g} nats, or {most:.2g} at one token, would have shown ({n} in {near})"

    def _sampled(self, tokens: Tokens) -> None:
        """Takes the tokens on which nulls and causes are tried from some."""
        self.sample = tokens.some(min(TRIED, max(FEWEST, LOGITS // self.ours.adapter.facts.vocabulary)))
        truth = self._row(TRUTH, self.sample)
        assert truth is not None, "it was computed for all tokens"
        self.sample_truth = truth

    def _place(self) -> None:
        """Finds which tokens are off, and takes those on which causes are tried from them."""
        own, limits = self._row(self.near, self.tokens), self.limits[self.near.name]
        if own is None or limits is None:
            return
        noise = self._distance(own, self.truth)
        null = Null(noise, limits["spread"], limits["null_max"] * float(noise.max()))
        where = place(self.tokens, [len(path.prompt) for path in self.paths], self.gap, null)
        self.begins = where.first
        self.where = where.said
        self.table["where"] = {"said": where.said, "tokens": int(where.off.sum()), "sequences": where.rows}
        self._say("which tokens", "failed", f"{where.said} ({where.off.sum():,} of {len(self.gap):,} tokens).")
        if where.off.sum() >= FEWEST:
            self._sampled(self.tokens.at(where.off))

    # What explains it --------------------------------------------------------------------------------------------------------

    def _explanation(self, within: bool) -> tuple[str, str] | None:
        """Returns word and why of the first cause that gives what the side gave; within rounding only truncations are tried."""
        n = f"n = {int(self.sample.held_out.sum()):,} held-out tokens"
        ways = {way.name: way for way in causes()}
        for step in ("semantics",) if within else ("alignment", "semantics", "substitution"):
            rows = self._processed(within) if step == "semantics" else self._computed(
                [way for way in ways.values() if (way.word == "misaligned") == (step == "alignment")]
            )  # fmt: skip
            name, left = self._remaining(rows, ways)
            if step == "substitution":
                self.tried = f"none of {len(rows)} causes of ours reproduces it held out"
                best = self._nearest(rows)
                if not name and best and (sized := self._best_size(ways[best])) is not None:
                    ways[sized.name] = sized
                    row = self._row(sized, self.sample)
                    name, left = self._remaining({} if row is None else {sized.name: row}, ways)
            if name:
                word = ways[name].word if name in ways else "processed"
                if step == "substitution":
                    why = f"{name} reproduces it token by token: {left:.2g} of it is left ({n})."
                    self.table["named"] = name
                else:
                    why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference held out ({n})."
                self._say(step, "passed" if word in GOOD else "failed", why, left)
                return word, why
            none = self.tried if step == "substitution" else f"as given; {', '.join(rows)} do not give it"
            self._say(step, "cannot tell" if step == "substitution" else "passed", f"{none} ({n}).")
        return None

    def _nearest(self, rows: Mapping[str, Row]) -> str:
        """Returns the row that is nearest on the tokens that are not held out; "" of none."""
        fit = {name: mean_gap(self.sample.engine, row, ~self.sample.held_out) for name, row in rows.items()}
        best = min(fit, key=fit.__getitem__, default="")
        return best if best and np.isfinite(fit[best]) else ""

    def _remaining(self, rows: Mapping[str, Row], ways: Mapping[str, Way]) -> tuple[str, float]:
        """Takes the nearest of some causes away: its name and the share of the difference that it leaves; "" if it is none.

        It is chosen on a third of the tokens. On the others our float64 with it is surely nearer to the side than without it,
        but no nearer to our own path, and what it leaves is within rounding: of the precision that was declared, or of the
        finest that holds it where none was.
        """
        if not (name := self._nearest(rows)):
            return "", 1.0
        row, truth, side = rows[name], self.sample_truth, self.sample.engine
        held = self.sample.held_out & np.isfinite(row)
        left = np.where(held, np.abs(side - row), np.nan)
        share = mean_gap(side, row, held) / max(mean_gap(side, truth, held), TINY)
        plain = self._row(self.near, self.sample)
        if not nearer(side, row, truth, held) or (plain is not None and nearer(plain, row, truth, held)):
            return "", share
        for rung in (self.near,) if self.declared is not None else RUNGS:
            limits, own = self._limits(rung), self._row(rung, self.sample)
            if limits is None or own is None:
                continue
            # A rounding that moves a code of a quantised cache moves it by a whole step: so far is the cause from itself.
            moved = self._row(dataclasses.replace(ways[name], dtype=rung.dtype), self.sample) if name in ways else None
            units = [self._distance(each, of) for each, of in ((own, truth), (moved, row)) if each is not None]
            if self.sample.ratio(left, max(units, key=np.mean), self.seed)["low"] <= limits["null_mean"]:
                return name, share
        return "", share

    def _processed(self, within: bool) -> dict[str, Row]:
        """Returns our float64 after each truncation; beyond rounding also after a temperature, or in another base."""
        logits, ids = [], []
        for number in np.unique(self.sample.sequence):
            path, at = self.paths[number], self.sample.position[self.sample.sequence == number]
            row = log_probs(self.ours.adapter, path.ids, len(path.prompt), TRUTH)
            assert row is not None
            logits.append(row[torch.from_numpy(at - 1)].cpu())
            ids.append(np.array(path.ids)[at])
        about = torch.cat(logits), np.concatenate(ids)
        if within:
            return dict(truncated(*about))
        bases = {f"in base {base}, not in nats": self.sample_truth / np.log(base) for base in (2, 10)}
        return {**truncated(*about), **warmed(self.sample.engine, *about, ~self.sample.held_out), **bases}

    def _computed(self, ways: Sequence[Way]) -> dict[str, Row]:
        """Returns our float64 with each cause that changes something here."""
        rows, side, fit = dict[str, Row](), self.sample.engine, ~self.sample.held_out
        for way in ways:
            row = self._row(way, self.sample)
            if row is not None and np.nan_to_num(row - self.sample_truth).any():
                rows[way.name] = row
                share = mean_gap(side, row, fit) / max(mean_gap(side, self.sample_truth, fit), TINY)
                self.table["tried"].append({"cause": way.name, "left": share, "n": int(fit.sum())})
        return rows

    def _best_size(self, way: Way) -> Way | None:
        """Returns a cause with the size that is nearest on the tokens that are not held out; None where it has no size."""
        if way.resized is None:
            return None
        resized = way.resized

        def loss(size: float) -> float:
            row = self._row(resized(size), self.sample)
            return float("inf") if row is None else mean_gap(self.sample.engine, row, ~self.sample.held_out)

        # As far as to a size in the middle between it and none, and as far beyond.
        return resized(fitted(loss, way.size, 0.8 * abs(np.log(way.size))))

    # What is left ------------------------------------------------------------------------------------------------------------

    def _rounding(self) -> tuple[str, str]:
        near = self.near.name
        self._say("substitution", "not run", f"rounding in {near} is as large as what there is; {self.least}.")
        word = "rounding" if self.gap.any() else "equal"
        return word, f"{'no more than rounding in ' + near if self.gap.any() else VERDICTS[word]}; {self.least}."

    def _unexplained(self) -> tuple[str, str]:
        if why := self._rounded_weights():
            return CANNOT_TELL, f"{why}; {self.tried}."
        if self.coarser:
            return "wrong-dtype", f"declared {self.declared}, stands on {self.coarser}; {self.tried}."
        how = "" if self.declared == "float32" else "in float32 "
        after = f"Next: see that both have the same checkpoint; then the engine {how}with a plain cache, once cold and once warm."
        # Further off than with every result rounded to a bit fewer; or, at a token, than any way of the next coarser precision.
        # Where none was declared it may be the coarsest.
        rungs = self.table["rungs"] if self.declared is not None else self.table["rungs"][-1:]
        first, coarser = rungs[0], rungs[:2][-1]
        far = ""
        if first["low"] > first["bit_fewer"]:
            far = f"{first['mean']:.3g} times our own distance in {first['precision']}, {first['bit_fewer']:.3g} with a bit fewer"
        elif coarser["max"] > coarser["null_max"]:
            far = f"at one token {coarser['max']:.3g} times our largest distance in {coarser['precision']}"
        if far:
            return "unexplained", f"{far}, which no rounding is; {self.tried}. {after}"
        after = after if self.declared else "Next: say with --dtype what the engine computes in, or run it in float32."
        return CANNOT_TELL, f"more than rounding in {self.near.name}, and {self.tried}; {self.least}. {after}"

    def _rounded_weights(self) -> str:
        """Says that our weights were loaded coarser than the engine's were; empty where they were not."""
        ours = str(self.ours.adapter.dtype).removeprefix("torch.")
        names = [rung.name for rung in RUNGS]
        if ours not in names[1:] or self.declared == ours:
            return ""
        # Of what differs by no more than the rounding of weights does nothing else can be said.
        rows = self.table["rungs"]
        if not any(row["mean"] <= row["null_mean"] for row in rows if names.index(row["precision"]) >= names.index(ours)):
            return ""
        return (
            f"the weights here were rounded to {ours} when this model was loaded, and the engine's may not have been: it is no "
            f"further off than that rounding; give the model in float32"
        )

    def statistics(self) -> dict[str, Any] | None:
        """Compares trainer and rollout: the file's own trainer where it has one, or our float64; None where nothing is given."""
        own = any(path.trainer is not None for path in self.paths)
        if "truth" not in vars(self):
            return None
        trainer = self.tokens.gathered(dict(enumerate(path.trainer for path in self.paths))) if own else self.truth
        known = np.isfinite(trainer)
        if not known.any():
            return None
        trainer, rollout, sequence = trainer[known], self.tokens.engine[known], self.tokens.sequence[known]
        rows = []
        for number in np.unique(sequence):
            at = sequence == number
            rows.append({"sequence": self.paths[number].id, **rollout_statistics(trainer[at], rollout[at], sequence[at])})
        every = rollout_statistics(trainer, rollout, sequence)
        found: dict[str, Any] = {
            "trainer": "the file's trainer" if own else "our float64",
            "all": every,
            "by_sequence": rows,
        }
        found["intervals"] = rollout_intervals(trainer, rollout, sequence, CHANCE, self.seed)
        ours = self._row(self.near, self.tokens) if "near" in vars(self) else None
        if ours is not None:
            # What a faultless engine in this precision would log.
            found["null"] = rollout_statistics(self.truth[known], ours[known], sequence)
            apart = (self.truth - ours)[known]
            means = [float(apart[sequence == number].mean()) for number in np.unique(sequence)]
            floor = {"token": np.median(np.abs(np.expm1(apart))), "sequence": np.median(np.abs(np.expm1(means)))}
            found["floor"] = {name: float(value) for name, value in floor.items()} | {"precision": self.near.name}
        return found
