"""The search for what gives the same numbers as a side: first what is done to positions, then to logits, then to the arithmetic.

A cause is one of our own ways (``ways.py``) or something done to our float64 logits (``numbers.py``). It is chosen on a
third of the tokens that ``distance.py`` found off, and named only where on the others our float64 with it is surely nearer
to the side and what it leaves is within rounding. ``side.py`` says what is left where none is named.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from kvinterp.auditing.verdict import GOOD
from kvinterp.engines.allowed import renormalised
from kvinterp.engines.distance import TRIED, Distance
from kvinterp.engines.numbers import (
    TINY,
    Tokens,
    fitted,
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
from kvinterp.engines.ours import TRUTH, Row
from kvinterp.engines.prefixes import nearest_edit
from kvinterp.engines.ways import PRECISIONS, Way, again, both, causes, halves
from kvinterp.engines.where import acting
from kvinterp.models import Adapter

SCREENED, PAIRED = 8, 3
"""The most causes that are tried on all sampled tokens, of those that were nearest in one sequence;
and as parts of a pair.
"""
TOLD = 0.01
"""The least share of a distance that is said of what rounding makes of its cause."""
SMALL = 100
"""A side that is so many times further off than float32 rounds is screened in float32."""
EDITED = 3e12
"""The most products of a weight and a token that prompts with a token more or less take."""


def _kind(name: str) -> str:
    """The name of a cause without its sizes."""
    return re.sub(r"\d+(\.\d+)?", "", name)


@dataclasses.dataclass
class CauseSearch:
    """Looks for a cause that gives what a side gave.

    Args:
        distance: The side's distance, measured; the search adds its checks, and what it tried, to
            its tables, and says anew which tokens are off once the cause is known.
        older: The model with weights of an earlier time, which an engine or its cache may still
            have.

    Attributes:
        exhausted: The phrase of how many causes were tried in vain; empty within rounding, where
            only truncations are tried.
    """

    distance: Distance
    older: Adapter | None = None

    def __post_init__(self) -> None:
        self.count = 0
        self.exhausted = ""
        # How far rounding moves what the cause that was named gives, in nats, where that is more
        # than our own path is off.
        self.stepped = 0.0

    def find(self, within: bool) -> tuple[str, str] | None:
        """Returns word and why of the first cause that gives what the side gave; within rounding
        only truncations are tried.
        """
        n = f"n = {int(self.distance.sample.held_out.sum()):,} held-out tokens"
        longest = max(len(path.ids) for path in self.distance.paths)
        ways = {
            way.name: way
            for way in causes(
                self.distance.ours.adapter,
                self.distance.begins,
                longest,
                self.older,
                self.distance.near.name,
            )
        }
        # A quantised cache turns a rounding into a step of its own, so that it is tried in the
        # precision of the side.
        ways |= {
            name: dataclasses.replace(way, dtype=self.distance.near.dtype)
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
                about = self.distance.logits(TRUTH, self.distance.sample)
                more = (
                    {}
                    if about is None
                    else renormalised(
                        self.distance.ours.adapter,
                        self.distance.paths,
                        self.distance.sample,
                        *about,
                    )
                )
                name, left = self._remaining(more, {})
            if step == "substitution":
                best = self._nearest(rows)
                if not name:
                    half = {way.name: way for way in self._halves(rows, ways)}
                    ways, more = ways | half, self._computed([*half.values()])
                    name, left = self._remaining(more, ways)
                    every |= more
                self.exhausted = f"none of {self.count} causes of ours reproduces it held out"
                if not name and best and (sized := self._best_size(ways[best])) is not None:
                    ways[sized.name] = sized
                    row = self.distance.row(sized, self.distance.sample)
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
                none = self.exhausted
            self.distance.say(
                step, "cannot tell" if step == "substitution" else "passed", f"{none} ({n})."
            )
        return None

    def _act(self, name: str, way: Way | None) -> None:
        """Says anew which tokens are off, now that the cause is known: it may be too small
        elsewhere to show without it.
        """
        if self.distance.placed is None:
            return
        fine = np.isin(
            self.distance.tokens.sequence,
            [n for n, row in enumerate(self.distance.placed.rows) if row["off"] == "no"],
        )
        more = bool(fine.any()) and self._also(name, way, self.distance.tokens.at(fine))
        # In float64, or where rounding is nothing beside it in float32: nothing but the cause moves a
        # log-prob there. What is done to logits is done to all of them.
        exact = PRECISIONS[0] if self._far() else TRUTH
        plain = self.distance.row(exact, self.distance.tokens)
        row = (
            None
            if way is None
            else self.distance.row(
                dataclasses.replace(way, dtype=exact.dtype), self.distance.tokens
            )
        )
        effect = (
            np.ones(len(self.distance.tokens.engine))
            if row is None or plain is None
            else np.abs(row - plain)
        )
        where = acting(
            self.distance.tokens,
            [len(path.prompt) for path in self.distance.paths],
            self.distance.placed,
            effect,
            more,
        )
        if where.said != self.distance.where:
            detail = f"with {name} known: {where.said} ({where.off.sum():,} of {len(self.distance.gap):,} tokens)."
            self.distance.say("which tokens", "failed", detail)
            self.distance.placed, self.distance.begins, self.distance.where = (
                where,
                where.first,
                where.said,
            )
            self.distance.table["where"] |= {"said": where.said, "tokens": int(where.off.sum())}

    def _also(self, name: str, way: Way | None, tokens: Tokens) -> bool:
        """Whether a cause gives what the side gave at other tokens, too, surely more than our
        float64 does.
        """
        tokens = tokens.some(TRIED)
        truth = self.distance.row(TRUTH, tokens)
        if way is not None:
            row = self.distance.row(way, tokens)
        else:
            sample, self.distance.sample, own = (
                self.distance.sample,
                tokens,
                self.distance.sample_truth,
            )
            self.distance.sample_truth = own if truth is None else truth
            # The same kind, of the size that is nearest there.
            rows = {_kind(each): row for each, row in self._processed(False).items()}
            self.distance.sample, self.distance.sample_truth, row = (
                sample,
                own,
                rows.get(_kind(name)),
            )
        return (
            row is not None
            and truth is not None
            and nearer(tokens.engine, row, truth, tokens.held_out)
        )

    def _named(self, step: str, name: str, word: str, left: float, n: str) -> tuple[str, str]:
        """Says a cause that was accepted, with the distance before and after; returns its word and
        the sentence.
        """
        before = mean_gap(
            self.distance.sample.engine, self.distance.sample_truth, self.distance.sample.held_out
        )
        fall = f"{before:.2g} nats fall to {before * left:.2g}, {n}"
        if step == "substitution":
            moves = (
                f", and rounding anew before it moves what it gives by {self.stepped:.2g}"
                if self.stepped > TOLD * before
                else ""
            )
            why = f"{name} reproduces it token by token: {left:.2g} of it is left ({fall}{moves})."
            self.distance.table["named"] = name
        else:
            why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference held out ({fall})."
        self.distance.say(step, "passed" if word in GOOD else "failed", why, left)
        return word, why

    def _pair(
        self, ways: Mapping[str, Way], rows: Mapping[str, Row]
    ) -> tuple[str, str, float] | None:
        """Returns name, word and share of two causes that together give what the side gave, one of
        them surely nearer alone.
        """
        side, truth, held = (
            self.distance.sample.engine,
            self.distance.sample_truth,
            self.distance.sample.held_out,
        )
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
                        row := self.distance.row(pair, self.distance.sample)
                    ) is not None:
                        made[pair.name], words[pair.name], found[pair.name] = pair, way.word, row
            for name, row in self._processed(False, way).items():
                words[f"{name} with {way.name}"], found[f"{name} with {way.name}"] = way.word, row
        if (about := self.distance.logits(TRUTH, self.distance.sample)) is not None:
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
        few = self.distance.sample.at(self.distance.sample.sequence == number)
        fit = ~self.distance.sample.held_out[self.distance.sample.sequence == number]
        gaps = dict[str, float]()
        if (value := warmth(best)) is None:
            return None
        for name, way in ways.items():
            if (about := self.distance.logits(way, few)) is not None:
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
        gap = np.where(
            self.distance.sample.held_out,
            0.0,
            np.abs(self.distance.sample.engine - self.distance.sample_truth),
        )
        return int(np.bincount(self.distance.sample.sequence, gap).argmax())

    def _other_prompt(self) -> tuple[str, str, float] | None:
        """Looks for a token more or less in the prompts; returns what was found, as :meth:`_pair`
        does.
        """
        found = dict[int, tuple[tuple[int, ...], str]]()
        adapter = self.distance.ours.adapter
        size = sum(parameter.numel() for parameter in adapter.model.parameters())
        numbers = np.unique(self.distance.sample.sequence).tolist()
        for number in numbers:
            path, at = self.distance.paths[number], self.distance.sample.sequence == number
            own = self.distance.sample.at(
                at
                & ~self.distance.sample.held_out
                & (self.distance.sample.position >= len(path.prompt))
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
        row = self.distance.row(way, self.distance.sample)
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
            name: mean_gap(self.distance.sample.engine, row, ~self.distance.sample.held_out)
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
        row, truth, side = rows[name], self.distance.sample_truth, self.distance.sample.engine
        held = self.distance.sample.held_out & np.isfinite(row)
        left = np.where(held, np.abs(side - row), np.nan)
        share = mean_gap(side, row, held) / max(mean_gap(side, truth, held), TINY)
        plain = self.distance.row(self.distance.near, self.distance.sample)
        if not nearer(side, row, truth, held) or (
            plain is not None and nearer(plain, row, truth, held)
        ):
            return "", share
        for precision in (
            (self.distance.near,) if self.distance.declared is not None else PRECISIONS
        ):
            limits, own = (
                self.distance.rounding(precision),
                self.distance.row(precision, self.distance.sample),
            )
            if limits is None or own is None:
                continue
            # A rounding that moves a code of a quantised cache moves it by a whole step: so far is
            # the cause from itself.
            moved = None
            if name in ways:
                way = ways[name]
                beside = (
                    again(way)
                    if way.dtype == precision.dtype
                    else dataclasses.replace(way, dtype=precision.dtype)
                )
                moved = self.distance.row(beside, self.distance.sample)
            units = [
                self.distance.between(each, of)
                for each, of in ((own, truth), (moved, row))
                if each is not None
            ]
            unit = max(units, key=np.mean)
            if (
                self.distance.sample.ratio(left, unit, self.distance.seed)["low"]
                <= limits["null_mean"]
            ):
                self.stepped = float(np.nanmean(unit[held])) if unit is not units[0] else 0.0
                return name, share
        return "", share

    def _processed(self, within: bool, way: Way = TRUTH) -> dict[str, Row]:
        """Returns our float64 after each truncation; beyond rounding also after a temperature,
        penalties, or in another base.
        """
        about = self.distance.logits(way, self.distance.sample)
        if about is None:
            return {}
        if within:
            return dict(truncated(*about))
        side, fit = self.distance.sample.engine, ~self.distance.sample.held_out
        if way is not TRUTH:
            return dict(warmed(side, *about, fit))
        bases = {
            f"in base {base}, not in nats": self.distance.sample_truth / np.log(base)
            for base in (2, 10)
        }
        rows = {**truncated(*about), **warmed(side, *about, fit), **bases}
        seen = [
            self.distance.paths[n].ids[:at]
            for n, at in zip(
                self.distance.sample.sequence, self.distance.sample.position, strict=True
            )
        ]
        cuts = np.array([len(self.distance.paths[n].prompt) for n in self.distance.sample.sequence])
        return {**rows, **penalised(side, *about, seen, cuts, fit), **masked(side, *about, fit)}

    def _computed(self, ways: Sequence[Way]) -> dict[str, Row]:
        """Returns our float64 with each cause that changes something here; of many those that are
        nearest in one sequence.
        """
        rows, side, fit = (
            dict[str, Row](),
            self.distance.sample.engine,
            ~self.distance.sample.held_out,
        )
        if len(ways) > 2 * SCREENED and len(np.unique(self.distance.sample.sequence)) > 1:
            ways = self._screened(ways)
        for way in ways:
            row = self.distance.row(way, self.distance.sample)
            if row is not None and np.nan_to_num(row - self.distance.sample_truth).any():
                rows[way.name] = row
                share = mean_gap(side, row, fit) / max(
                    mean_gap(side, self.distance.sample_truth, fit), TINY
                )
                self._note(way.name, share, int(fit.sum()))
        return rows

    def _note(self, name: str, share: float, n: int) -> None:
        others = [row for row in self.distance.table["tried"] if row["cause"] != name]
        self.distance.table["tried"] = [*others, {"cause": name, "left": share, "n": n}]
        self.count = len(self.distance.table["tried"])

    def _screened(self, ways: Sequence[Way]) -> list[Way]:
        """Returns the causes that are nearest in the sequence that is furthest off."""
        at = self.distance.sample.sequence == self._screening()
        few, fit, truth = (
            self.distance.sample.at(at),
            ~self.distance.sample.held_out[at],
            self.distance.sample_truth[at],
        )
        gaps, elsewhere = dict[str, float](), list[Way]()
        # In float32, at less than half of the cost, where its rounding is small beside what is
        # looked for: which are nearest is asked, and those that are kept are computed as exactly as
        #     they are named.
        quick, far = self.distance.row(PRECISIONS[0], few), self._far()
        if self.distance.near is PRECISIONS[0] and not far:
            quick = None
        plain = truth if quick is None else quick
        for way in ways:
            row = self.distance.row(
                way if quick is None else dataclasses.replace(way, dtype="float32"), few
            )
            if row is None:
                continue
            moves = np.nan_to_num(row - plain).any()
            # A text that stands first in a row has none before it, and is as it was.
            if way.before is not None and not moves:
                elsewhere.append(way)
            if moves or way.before is not None:
                gaps[way.name] = mean_gap(few.engine, row, fit)
                self._note(
                    way.name,
                    gaps[way.name] / max(mean_gap(few.engine, truth, fit), TINY),
                    int(fit.sum()),
                )
        # Where rounding is nothing beside the distance, a cause is nearer than none.
        most = mean_gap(few.engine, truth, fit) if far else np.inf
        kept = [name for name in sorted(gaps, key=gaps.__getitem__) if gaps[name] < most]
        return [way for way in ways if way.name in kept[:SCREENED] or way in elsewhere]

    def _far(self) -> bool:
        """Whether the side is so much further off than float32 rounds that what it gives can be
        looked for in float32.
        """
        own = self.distance.row(PRECISIONS[0], self.distance.sample)
        side, truth = self.distance.sample.engine, self.distance.sample_truth
        if own is None or self.distance.near is not PRECISIONS[0]:
            return False
        return SMALL * float(np.abs(own - truth).mean()) < float(np.abs(side - truth).mean())

    def _halves(self, rows: Mapping[str, Row], ways: Mapping[str, Way]) -> list[Way]:
        """Returns the quantised caches that are nearest, of keys or values alone, and in float64,
        as engines may add them up.
        """
        fit = {
            name: mean_gap(self.distance.sample.engine, row, ~self.distance.sample.held_out)
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
            row = self.distance.row(resized(size), self.distance.sample)
            return (
                float("inf")
                if row is None
                else mean_gap(self.distance.sample.engine, row, ~self.distance.sample.held_out)
            )

        # As far as to a size in the middle between it and none, and as far beyond.
        return resized(fitted(loss, way.size, 0.8 * abs(np.log(way.size))))
