"""One side's log-probs and their judgement: readable, how far off, which tokens, and what gives the
same.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvinterp.auditing.checks import Check
from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, VERDICTS
from kvinterp.common.numbers import listed
from kvinterp.engines.allowed import renormalised
from kvinterp.engines.logged import logged
from kvinterp.engines.numbers import (
    FEWEST,
    TINY,
    Tokens,
    alike,
    fitted,
    grid_of,
    masked,
    mean_gap,
    nearer,
    penalised,
    truncated,
    warm,
    warmed,
    warmed_and_truncated,
    warmth,
)
from kvinterp.engines.ours import TRUTH, Ours, Row
from kvinterp.engines.prefixes import nearest_edit
from kvinterp.engines.ways import RUNGS, WEIGHTS, Way, again, both, causes, halves, nulls
from kvinterp.engines.where import Null, Where, acting, falls_along, place
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import ROUNDED, EnginePath, positive

TRIED = 1024
"""The most tokens on which nulls and causes are tried."""
SCREENED, PAIRED = 8, 3
"""The most causes that are tried on all sampled tokens, of those that were nearest in one sequence;
and as parts of a pair.
"""
EDITED = 3e12
"""The most products of a weight and a token that prompts with a token more or less take."""
LOGITS = 2**25
"""The most logits of them, whatever the vocabulary."""


def _kind(name: str) -> str:
    """The name of a cause without its sizes."""
    return re.sub(r"\d+(\.\d+)?", "", name)


@dataclasses.dataclass
class Side:
    """One side's log-probs and their judgement."""

    ours: Ours
    name: str
    paths: Sequence[EnginePath]
    declared: str | None
    seed: int
    older: Adapter | None = None

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
        self.count = 0
        self.limits: dict[str, dict[str, float] | None] = {}

    def judge(self) -> None:
        """Sets ``word`` and ``why``."""
        facts = self.ours.adapter.facts
        if (why := self._unreadable()) is not None:
            self.word, self.why = CANNOT_TELL, why
            return
        truth = self._row(TRUTH, self.tokens)
        if truth is None:
            raise InputError(
                f"{facts.name} gives NaN or Inf in float64 on these tokens: give another model."
            )
        self.truth = truth
        self._sampled(self.tokens)
        self.gap = np.abs(self.tokens.engine - self.truth)
        within = self._rung()
        if not within:
            self._place()
        self.word, self.why = self._explanation(within) or (
            self._rounding() if within else self._unexplained()
        )

    def _say(self, name: str, status: str, detail: str, error: float | None = None) -> None:
        self.checks.append(Check(name, status, detail, error))

    def _unreadable(self) -> str | None:
        """Says what was read; returns why nothing can be judged, or None."""
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
        self._say(
            "readable",
            "passed" if why is None else "cannot tell",
            where if why is None else f"{why} {where}",
        )
        return why

    def _all_zero(self) -> str | None:
        """Says that every value is 0.0 where the model is not certain of every token; None
        otherwise.
        """
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

    def _row(self, way: Way, tokens: Tokens) -> Row | None:
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

    def _distance(self, row: Row, beside: Row) -> Row:
        """Returns how far one of our rows is from another, once it is written as the side's are."""
        return np.abs((row if self.grid is None else self.grid[1](row)) - beside)

    # What rounding does ---------------------------------------------------------------------------

    def _limits(self, rung: Way) -> dict[str, float] | None:
        """Measures how far other ways to compute the same in a precision are from float64 here;
        None where it cannot be run.

        Returns:
            ``own``, the mean distance of our own path; in units of it ``null_mean``, of the
            furthest null on average, and ``bit_fewer``, of the furthest way that rounds to a bit
            fewer; in units of our largest ``null_max``, of any of them; ``spread``, the furthest of
            all on average in one sequence, in units of our own mean there.
        """
        if rung.name not in self.limits:
            gaps = [
                [
                    self._distance(row, self.sample_truth)
                    for way in ways
                    if (row := self._row(way, self.sample)) is not None
                ]
                for ways in ([rung], *nulls(rung))
            ]
            own, others, fewer = (
                [(float(gap.mean()), float(gap.max())) for gap in each] for each in gaps
            )
            self.limits[rung.name] = None
            if own:
                mean, most = own[0]
                parts = [
                    self.sample.sequence == number for number in np.unique(self.sample.sequence)
                ]
                units = [max(float(gaps[0][0][at].mean()), mean, TINY) for at in parts]
                self.limits[rung.name] = {
                    "spread": max(
                        float(gap[at].mean()) / unit
                        for each in gaps
                        for gap in each
                        for at, unit in zip(parts, units, strict=True)
                    ),
                    "own": mean,
                    "null_mean": max(own + others)[0] / max(mean, TINY),
                    "null_max": max(largest for _, largest in own + others + fewer)
                    / max(most, TINY),
                    "bit_fewer": max(own + others + fewer)[0] / max(mean, TINY),
                }
        return self.limits[rung.name]

    def _rung(self) -> bool:
        """Finds the precision that the rest is said of; returns whether the side lies within its
        rounding.
        """
        asked = next((rung for rung in RUNGS if rung.name == self.declared), RUNGS[0])
        stands = None
        # What is no rounding of a precision is none of a finer one.
        for rung in RUNGS[RUNGS.index(asked) :]:
            self.ours.tell(rung.name)
            limits, own = self._limits(rung), self._row(rung, self.tokens)
            if limits is None or own is None:
                continue
            ratio = self.tokens.ratio(self.gap, self._distance(own, self.truth), self.seed)
            # What was not declared is stood on only where its differences go with ours: two engines
            # in one precision round the same weights, and often more, alike.
            effects = [
                own,
                *(
                    self._row(WEIGHTS[name], self.tokens)
                    for name in (rung.name,)
                    if name in WEIGHTS
                ),
            ]
            seen = self.tokens.engine - self.truth
            same = any(alike(seen, each - self.truth) for each in effects if each is not None)
            lies = (
                ratio["mean"] <= limits["null_mean"]
                and ratio["max"] <= limits["null_max"]
                and (rung is asked or same)
            )
            words = {"goes_with_ours": "yes" if same else "no", "within": "yes" if lies else "no"}
            self.table["rungs"].append({"precision": rung.name, **ratio, **limits, **words})
            if lies:
                stands = rung
                break
        other = stands is not None and stands is not asked and self.declared is not None
        self.coarser = stands.name if stands is not None and other else ""
        self.near = asked if stands is None or other else stands
        self._say_rung(
            "none of ours" if stands is None else stands.name, stands is not None and not other
        )
        return stands is not None and not other

    def _say_rung(self, stands: str, within: bool) -> None:
        """Says how far the side is in units of our own rounding, from where on, and what would have
        shown.
        """
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
        if within:
            self.begins = at = self.tokens.onset(self.gap, noise)
            shape = (
                "no position was found at which it begins"
                if at is None
                else f"more of it from position {at} on"
            )
            self._say("shape", "passed", f"{shape}: a suspicion, no cause ({n}).")
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
        self.least = f"a mean difference of {mean:.2g} nats, or {most:.2g} at one token, would have shown ({n} in {near})"

    def _sampled(self, tokens: Tokens) -> None:
        """Takes the tokens on which nulls and causes are tried from some."""
        self.sample = tokens.some(
            min(TRIED, max(FEWEST, LOGITS // self.ours.adapter.facts.vocabulary))
        )
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
        self._say(
            "which tokens",
            "failed",
            f"{where.said} ({where.off.sum():,} of {len(self.gap):,} tokens).",
        )
        # What is left out has to be rounding: a cause of every token that shows in some alone is
        #     fitted on all.
        rest = ~where.off
        fine = not rest.any() or self.gap[rest].mean() <= limits["null_mean"] * noise[rest].mean()
        if fine and where.off.sum() >= FEWEST:
            self._sampled(self.tokens.at(where.off))

    # What explains it -----------------------------------------------------------------------------

    def _explanation(self, within: bool) -> tuple[str, str] | None:
        """Returns word and why of the first cause that gives what the side gave; within rounding
        only truncations are tried.
        """
        n = f"n = {int(self.sample.held_out.sum()):,} held-out tokens"
        longest = max(len(path.ids) for path in self.paths)
        ways = {
            way.name: way
            for way in causes(self.ours.adapter, self.begins, longest, self.older, self.near.name)
        }
        if self.near.name != "float32":
            # A quantised cache turns a rounding into a step of its own, so that it is tried in the
            # precision of the side.
            ways |= {
                name: dataclasses.replace(way, dtype=self.near.dtype)
                for name, way in ways.items()
                if way.word == "policy"
            }
        every = dict[str, Row]()
        for step in ("semantics",) if within else ("alignment", "semantics", "substitution"):
            rows = self._processed(within) if step == "semantics" else self._computed(
                [way for way in ways.values() if (way.word == "misaligned") == (step == "alignment")]
            )  # fmt: skip
            every |= rows
            name, left = self._remaining(rows, ways)
            if step == "semantics" and not within and not name:
                about = self._logits(TRUTH, self.sample)
                more = (
                    {}
                    if about is None
                    else renormalised(self.ours.adapter, self.paths, self.sample, *about)
                )
                name, left = self._remaining(more, {})
            if step == "substitution":
                best = self._nearest(rows)
                if not name:
                    half = {way.name: way for way in self._halves(rows, ways)}
                    ways, more = ways | half, self._computed([*half.values()])
                    name, left = self._remaining(more, ways)
                    every |= more
                self.tried = f"none of {self.count} causes of ours reproduces it held out"
                if not name and best and (sized := self._best_size(ways[best])) is not None:
                    ways[sized.name] = sized
                    row = self._row(sized, self.sample)
                    name, left = self._remaining({} if row is None else {sized.name: row}, ways)
                    every |= {} if row is None else {sized.name: row}
            if name:
                self._act(name, ways.get(name))
                return self._named(
                    step, name, ways[name].word if name in ways else "processed", left, n
                )
            none = f"as given; {', '.join(rows)} do not give it"
            if step == "substitution":
                if (found := self._pair(ways, every)) is not None:
                    return self._named(step, *found, n)
                if (found := self._other_prompt()) is not None:
                    return self._named("alignment", *found, n)
                none = self.tried
            self._say(step, "cannot tell" if step == "substitution" else "passed", f"{none} ({n}).")
        return None

    def _act(self, name: str, way: Way | None) -> None:
        """Says anew which tokens are off, now that the cause is known: it may be too small
        elsewhere to show without it.
        """
        if self.placed is None:
            return
        fine = np.isin(
            self.tokens.sequence,
            [n for n, row in enumerate(self.placed.rows) if row["off"] == "no"],
        )
        more = bool(fine.any()) and self._also(name, way, self.tokens.at(fine))
        # In float64, where nothing but the cause moves a log-prob. What is done to logits is done
        # to all of them.
        exact = (
            None
            if way is None
            else self._row(dataclasses.replace(way, dtype="float64"), self.tokens)
        )
        effect = np.ones(len(self.tokens.engine)) if exact is None else np.abs(exact - self.truth)
        where = acting(
            self.tokens, [len(path.prompt) for path in self.paths], self.placed, effect, more
        )
        if where.said != self.where:
            detail = f"with {name} known: {where.said} ({where.off.sum():,} of {len(self.gap):,} tokens)."
            self._say("which tokens", "failed", detail)
            self.placed, self.begins, self.where = where, where.first, where.said
            self.table["where"] |= {"said": where.said, "tokens": int(where.off.sum())}

    def _also(self, name: str, way: Way | None, tokens: Tokens) -> bool:
        """Whether a cause gives what the side gave at other tokens, too, surely more than our
        float64 does.
        """
        tokens = tokens.some(TRIED)
        truth = self._row(TRUTH, tokens)
        if way is not None:
            row = self._row(way, tokens)
        else:
            sample, self.sample, own = self.sample, tokens, self.sample_truth
            self.sample_truth = own if truth is None else truth
            # The same kind, of the size that is nearest there.
            rows = {_kind(each): row for each, row in self._processed(False).items()}
            self.sample, self.sample_truth, row = sample, own, rows.get(_kind(name))
        return (
            row is not None
            and truth is not None
            and nearer(tokens.engine, row, truth, tokens.held_out)
        )

    def _named(self, step: str, name: str, word: str, left: float, n: str) -> tuple[str, str]:
        """Says a cause that was accepted, with the distance before and after; returns its word and
        the sentence.
        """
        before = mean_gap(self.sample.engine, self.sample_truth, self.sample.held_out)
        fall = f"{before:.2g} nats fall to {before * left:.2g}, {n}"
        if step == "substitution":
            why = f"{name} reproduces it token by token: {left:.2g} of it is left ({fall})."
            self.table["named"] = name
        else:
            why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference held out ({fall})."
        self._say(step, "passed" if word in GOOD else "failed", why, left)
        return word, why

    def _pair(
        self, ways: Mapping[str, Way], rows: Mapping[str, Row]
    ) -> tuple[str, str, float] | None:
        """Returns name, word and share of two causes that together give what the side gave, one of
        them surely nearer alone.
        """
        side, truth, held = self.sample.engine, self.sample_truth, self.sample.held_out
        fit = {name: mean_gap(side, row, ~held) for name, row in rows.items()}
        order = sorted(fit, key=fit.__getitem__)
        best = next(iter(order), "")
        if not best or not nearer(side, rows[best], truth, held):
            return None
        made, words = dict[str, Way](), dict[str, str]()
        found = dict[str, Row]()
        for way in [ways[name] for name in order[:PAIRED] if name in ways]:
            if way.name == best:
                for other in [ways[name] for name in order[1 : 2 * PAIRED] if name in ways]:
                    if (pair := both(way, other)) is not None and (
                        row := self._row(pair, self.sample)
                    ) is not None:
                        made[pair.name], words[pair.name], found[pair.name] = pair, way.word, row
            for name, row in self._processed(False, way).items():
                words[f"{name} with {way.name}"], found[f"{name} with {way.name}"] = way.word, row
        if (about := self._logits(TRUTH, self.sample)) is not None:
            cut = warmed_and_truncated(*about)
            words, found = words | dict.fromkeys(cut, "processed"), found | cut
        name, left = self._remaining(found, made)
        if not name and best not in ways:
            return self._pair_processed(best, ways)
        return (name, words[name], left) if name else None

    def _pair_processed(self, best: str, ways: Mapping[str, Way]) -> tuple[str, str, float] | None:
        """As :meth:`_pair` where the better of the two is a temperature: every cause is screened
        behind it.
        """
        number = self._screening()
        few = self.sample.at(self.sample.sequence == number)
        fit = ~self.sample.held_out[self.sample.sequence == number]
        gaps = dict[str, float]()
        if (value := warmth(best)) is None:
            return None
        for name, way in ways.items():
            if (about := self._logits(way, few)) is not None:
                gaps[name] = mean_gap(few.engine, warm(value, *about), fit)
        words, found = dict[str, str](), dict[str, Row]()
        for way in [ways[name] for name in sorted(gaps, key=gaps.__getitem__)[:PAIRED]]:
            for name, row in self._processed(False, way).items():
                words[f"{name} with {way.name}"], found[f"{name} with {way.name}"] = way.word, row
        name, left = self._remaining(found, {})
        return (name, words[name], left) if name else None

    def _screening(self) -> int:
        """Returns the sequence with the most of the distance on the tokens that causes are chosen
        on.
        """
        gap = np.where(self.sample.held_out, 0.0, np.abs(self.sample.engine - self.sample_truth))
        return int(np.bincount(self.sample.sequence, gap).argmax())

    def _other_prompt(self) -> tuple[str, str, float] | None:
        """Looks for a token more or less in the prompts; returns what was found, as :meth:`_pair`
        does.
        """
        found = dict[int, tuple[tuple[int, ...], str]]()
        adapter = self.ours.adapter
        size = sum(parameter.numel() for parameter in adapter.model.parameters())
        numbers = np.unique(self.sample.sequence).tolist()
        for number in numbers:
            path, at = self.paths[number], self.sample.sequence == number
            own = self.sample.at(
                at & ~self.sample.held_out & (self.sample.position >= len(path.prompt))
            )
            most = int(EDITED / size / max(1, len(path.ids) * len(numbers)))
            if (
                not len(own.engine)
                or not path.prompt
                or (edited := nearest_edit(adapter, path, own, most)) is None
            ):
                continue
            found[number] = edited
        if not found:
            return None
        way = Way(
            "of another prompt",
            "misaligned",
            before=lambda paths, n: found[n][0] if n in found else None,
        )
        row = self._row(way, self.sample)
        name, left = self._remaining({} if row is None else {way.name: row}, {way.name: way})
        shown = "; ".join(
            f"sequence {number + 1}: {said}" for number, (_, said) in sorted(found.items())[:2]
        )
        return (
            (f"those behind another prompt than the file's ({shown})", way.word, left)
            if name
            else None
        )

    def _nearest(self, rows: Mapping[str, Row]) -> str:
        """Returns the row that is nearest on the tokens that are not held out; "" of none."""
        fit = {
            name: mean_gap(self.sample.engine, row, ~self.sample.held_out)
            for name, row in rows.items()
        }
        best = min(fit, key=fit.__getitem__, default="")
        return best if best and np.isfinite(fit[best]) else ""

    def _remaining(self, rows: Mapping[str, Row], ways: Mapping[str, Way]) -> tuple[str, float]:
        """Takes the nearest of some causes away: its name and the share of the difference that it
        leaves; "" if it is none.

        It is chosen on a third of the tokens. On the others our float64 with it is surely nearer to
        the side than without it, but no nearer to our own path, and what it leaves is within
        rounding: of the precision that was declared, or of the finest that holds it where none was.
        """
        if not (name := self._nearest(rows)):
            return "", 1.0
        row, truth, side = rows[name], self.sample_truth, self.sample.engine
        held = self.sample.held_out & np.isfinite(row)
        left = np.where(held, np.abs(side - row), np.nan)
        share = mean_gap(side, row, held) / max(mean_gap(side, truth, held), TINY)
        plain = self._row(self.near, self.sample)
        if not nearer(side, row, truth, held) or (
            plain is not None and nearer(plain, row, truth, held)
        ):
            return "", share
        for rung in (self.near,) if self.declared is not None else RUNGS:
            limits, own = self._limits(rung), self._row(rung, self.sample)
            if limits is None or own is None:
                continue
            # A rounding that moves a code of a quantised cache moves it by a whole step: so far is
            # the cause from itself.
            moved = None
            if name in ways:
                way = ways[name]
                beside = (
                    again(way)
                    if way.dtype == rung.dtype
                    else dataclasses.replace(way, dtype=rung.dtype)
                )
                moved = self._row(beside, self.sample)
            units = [
                self._distance(each, of)
                for each, of in ((own, truth), (moved, row))
                if each is not None
            ]
            if (
                self.sample.ratio(left, max(units, key=np.mean), self.seed)["low"]
                <= limits["null_mean"]
            ):
                return name, share
        return "", share

    def _logits(self, way: Way, tokens: Tokens) -> tuple[torch.Tensor, np.ndarray] | None:
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

    def _processed(self, within: bool, way: Way = TRUTH) -> dict[str, Row]:
        """Returns our float64 after each truncation; beyond rounding also after a temperature,
        penalties, or in another base.
        """
        about = self._logits(way, self.sample)
        if about is None:
            return {}
        if within:
            return dict(truncated(*about))
        side, fit = self.sample.engine, ~self.sample.held_out
        if way is not TRUTH:
            return dict(warmed(side, *about, fit))
        bases = {
            f"in base {base}, not in nats": self.sample_truth / np.log(base) for base in (2, 10)
        }
        rows = {**truncated(*about), **warmed(side, *about, fit), **bases}
        seen = [
            self.paths[n].ids[:at]
            for n, at in zip(self.sample.sequence, self.sample.position, strict=True)
        ]
        cuts = np.array([len(self.paths[n].prompt) for n in self.sample.sequence])
        return {**rows, **penalised(side, *about, seen, cuts, fit), **masked(side, *about, fit)}

    def _computed(self, ways: Sequence[Way]) -> dict[str, Row]:
        """Returns our float64 with each cause that changes something here; of many those that are
        nearest in one sequence.
        """
        rows, side, fit = dict[str, Row](), self.sample.engine, ~self.sample.held_out
        if len(ways) > 2 * SCREENED and len(np.unique(self.sample.sequence)) > 1:
            ways = self._screened(ways)
        for way in ways:
            row = self._row(way, self.sample)
            if row is not None and np.nan_to_num(row - self.sample_truth).any():
                rows[way.name] = row
                share = mean_gap(side, row, fit) / max(mean_gap(side, self.sample_truth, fit), TINY)
                self._tried(way.name, share, int(fit.sum()))
        return rows

    def _tried(self, name: str, share: float, n: int) -> None:
        others = [row for row in self.table["tried"] if row["cause"] != name]
        self.table["tried"] = [*others, {"cause": name, "left": share, "n": n}]
        self.count = len(self.table["tried"])

    def _screened(self, ways: Sequence[Way]) -> list[Way]:
        """Returns the causes that are nearest in the sequence that is furthest off."""
        at = self.sample.sequence == self._screening()
        few, fit, truth = self.sample.at(at), ~self.sample.held_out[at], self.sample_truth[at]
        gaps = dict[str, float]()
        # In float32, at less than half of the cost, where its rounding is small beside what is
        # looked for: which are nearest is asked, and those that are kept are computed as exactly as
        #     they are named.
        quick = self._row(RUNGS[0], few) if self.near is not RUNGS[0] else None
        plain = truth if quick is None else quick
        for way in ways:
            row = self._row(
                way if quick is None else dataclasses.replace(way, dtype="float32"), few
            )
            # A text that stands first in a row has none before it, and is as it was.
            if row is not None and (way.before is not None or np.nan_to_num(row - plain).any()):
                gaps[way.name] = mean_gap(few.engine, row, fit)
                self._tried(
                    way.name,
                    gaps[way.name] / max(mean_gap(few.engine, truth, fit), TINY),
                    int(fit.sum()),
                )
        kept = sorted(gaps, key=gaps.__getitem__)[:SCREENED]
        return [way for way in ways if way.name in kept]

    def _halves(self, rows: Mapping[str, Row], ways: Mapping[str, Way]) -> list[Way]:
        """Returns the quantised caches that are nearest, of keys or values alone, and in float64,
        as engines may add them up.
        """
        fit = {
            name: mean_gap(self.sample.engine, row, ~self.sample.held_out)
            for name, row in rows.items()
        }
        near = sorted((name for name in fit if ways[name].word == "policy"), key=fit.__getitem__)[
            :PAIRED
        ]
        exact = [
            dataclasses.replace(ways[name], dtype="float64")
            for name in near
            if ways[name].dtype != "float64"
        ]
        return [*exact, *(half for name in near for half in halves(ways[name]))]

    def _best_size(self, way: Way) -> Way | None:
        """Returns a cause with the size that is nearest on the tokens that are not held out; None
        where it has no size.
        """
        if way.resized is None:
            return None
        resized = way.resized

        def loss(size: float) -> float:
            row = self._row(resized(size), self.sample)
            return (
                float("inf")
                if row is None
                else mean_gap(self.sample.engine, row, ~self.sample.held_out)
            )

        # As far as to a size in the middle between it and none, and as far beyond.
        return resized(fitted(loss, way.size, 0.8 * abs(np.log(way.size))))

    # What is left ---------------------------------------------------------------------------------

    def _rounding(self) -> tuple[str, str]:
        near = self.near.name
        self._say(
            "substitution",
            "not run",
            f"rounding in {near} is as large as what there is; {self.least}.",
        )
        word = "rounding" if self.gap.any() else "equal"
        return (
            word,
            f"{'no more than rounding in ' + near if self.gap.any() else VERDICTS[word]}; {self.least}.",
        )

    def _unexplained(self) -> tuple[str, str]:
        self.tried += self._routed()
        if why := self._rounded_weights():
            return CANNOT_TELL, f"{why}; {self.tried}."
        if self.coarser:
            return (
                "wrong-dtype",
                f"declared {self.declared}, stands on {self.coarser}; {self.tried}.",
            )
        how = "" if self.declared == "float32" else "in float32 "
        after = f"Next: see that both have the same checkpoint; then the engine {how}with a plain cache, once cold and once warm."
        if self.prefixed:
            tried = f"{self.tried}; it is largest where the replies begin and falls along them, as behind another prompt: "
            self.tried = f"{tried}other tokens before them than the file says, or a prefix from an older cache"
            after = "Next: ask the engine for the ids that it saw (vLLM: return_token_ids), and judge these."
        elif self.unseen:
            after = (
                "Next: ask the engine for the ids that it saw (vLLM: return_token_ids) and the prompts' log-probs, which are not "
                "here: that it saw another prompt, other tokens before the replies, is not ruled out."
            )
        if said := self._raised():
            after = f"{said}: ask the engine for its log-probs before that."
        # Further off than with every result rounded to a bit fewer; or, at a token, than any way of
        # the next coarser precision. Where none was declared it may be the coarsest.
        rungs = self.table["rungs"] if self.declared is not None else self.table["rungs"][-1:]
        first, coarser = rungs[0], rungs[:2][-1]
        far = ""
        if first["low"] > first["bit_fewer"]:
            far = f"{first['mean']:.3g} times our own distance in {first['precision']}, {first['bit_fewer']:.3g} with a bit fewer"
        elif coarser["max"] > coarser["null_max"]:
            far = f"at one token {coarser['max']:.3g} times our largest distance in {coarser['precision']}"
        if far:
            return "unexplained", f"{far}, which no rounding is; {self.tried}. {after}"
        after = (
            after
            if self.declared
            else "Next: say with --dtype what the engine computes in, or run it in float32."
        )
        return (
            CANNOT_TELL,
            f"more than rounding in {self.near.name}, and {self.tried}; {self.least}. {after}",
        )

    def _raised(self) -> str:
        """Says that the log-probs are above ours alone where they are off; empty where they are
        not.
        """
        own, limits = self._row(self.near, self.sample), self.limits[self.near.name]
        if own is None or limits is None:
            return ""
        apart = self.sample.engine - self.sample_truth
        far = np.abs(apart) > limits["null_max"] * float(
            self._distance(own, self.sample_truth).max()
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
            for row in self.table["tried"]
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
        names = [rung.name for rung in RUNGS]
        if ours not in names[1:] or self.declared == ours:
            return ""
        # No cause can be named for a difference that is no larger than that of rounded weights.
        rows = self.table["rungs"]
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
        if "truth" not in vars(self):
            return None
        ours = self._row(self.near, self.tokens) if "near" in vars(self) else None
        return logged(
            self.paths,
            self.tokens,
            self.truth,
            ours,
            self.near.name if ours is not None else "",
            self.seed,
        )
