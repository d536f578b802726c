"""Another engine's log-probs, judged: rounding, or something else, and what; each step is said with its n.

No limit here is fitted. What rounding may do is measured in the same run, on the same tokens: our own path in the engine's
precision beside float64, from a cache, among more rows, and with every result of it rounded once more (the nulls). What is
further off than all of them is no rounding. A cause is named where one of our own paths with it gives what the engine gave: it
is surely nearer on tokens that it was not chosen by, and what it leaves is within the nulls.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch

from kvinterp.auditing import given_steps as steps
from kvinterp.auditing.checks import Check
from kvinterp.auditing.given_paths import FLASH, FLASH_ROW, FLOAT16, RUNGS, WEIGHTS, Way, candidates, log_probs, nulls
from kvinterp.auditing.given_steps import CHANCE, FEWEST, Tokens
from kvinterp.auditing.given_tokens import check_paths, chosen_of, read_paths, token_table
from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, VERDICTS, Verdict, allowed
from kvinterp.common.checks import check_callable, check_seed
from kvinterp.common.numbers import listed
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.metrics.rollouts import rollout_statistics
from kvinterp.models import Adapter, wrap
from kvinterp.models.provenance import provenance
from kvinterp.recording import Trace
from kvinterp.recording.given import GivenPath, positive
from kvinterp.recording.trace import path_of_trace

TRIED = 1024
"""The most tokens on which nulls, causes, alignments and semantics are tried."""
LOGITS = 2**25
"""The most logits that are held for semantics."""
CERTAIN = 1e-6
"""Of a token that is surer than this, in nats, rounding goes one way: its probability ends at 1."""
ENGINE, TRAINER = "the engine", "the trainer"


def judge_given(
    model: Any,
    paths: Sequence[GivenPath],
    declared: str | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] = lambda said: None,
) -> Verdict:
    """Judges log-probs that another engine gave of a model, and those of a trainer where they stand beside them.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it.
        paths: What the engine gave, of :func:`kvinterp.recording.readers.read_given`.
        declared: The dtype that the engine was said to compute in; what the file says unless given, or none.
        allow: Words that shall not fail.
        seed: Seeds the resampling.
        tell: Told what is done next.

    Returns:
        The verdict, that of the worse side; its ``given`` has the distances, what was tried, and the statistics of reinforcement
        learning, its ``tokens`` both sides' log-probs. Of two sides ``given["sides"]`` has the word and reason of each.

    Raises:
        InputError: A text cannot be one of this model's.
    """
    adapter = wrap(model)
    check_seed(seed)
    check_callable("tell", tell)
    allow = allowed(allow)
    check_paths(adapter, paths)
    said = _declared(paths, declared)
    ours = _Ours(adapter, paths, tell)
    with adapter.one_call(), torch.no_grad():
        sides = [_Side(ours, ENGINE, paths, said, seed)]
        if any(path.trainer is not None for path in paths):
            row = [np.full(len(path.ids), np.nan) if path.trainer is None else path.trainer for path in paths]
            turned = [dataclasses.replace(p, chosen=r.copy(), top={}, missing=Counter(), step=None)
                      for p, r in zip(paths, row, strict=True)]  # fmt: skip
            # What is declared is the engine's; of a trainer nobody says anything.
            sides.append(_Side(ours, TRAINER, turned, None, seed))
        for side in sides:
            side.judge()
        return _verdict(adapter, paths, sides, ours, allow)


def audit_given(
    model: Any,
    file: str | Path | Trace,
    format: str | None = None,
    declared: str | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] = lambda said: None,
) -> Verdict:
    """Reads what another engine wrote and judges it.

    Args:
        model: As for :func:`judge_given`.
        file: What it wrote, see docs/engines.md; or what :meth:`kvinterp.Trace.from_arrays` made.
        format: The format's name; known by the content unless given.
        declared: As for :func:`judge_given`.
        allow: As for :func:`judge_given`.
        seed: As for :func:`judge_given`.
        tell: As for :func:`judge_given`.

    Raises:
        InputError: The file cannot be read.
    """
    adapter = wrap(model)
    paths = [path_of_trace(file)] if isinstance(file, Trace) else read_paths(adapter, file, format)
    return judge_given(adapter, paths, declared, allow, seed, tell)


def _declared(paths: Sequence[GivenPath], declared: str | None) -> str | None:
    if declared is None:
        said = sorted({str(path.declared["dtype"]).removeprefix("torch.") for path in paths if "dtype" in path.declared})
        if len(said) > 1:
            raise InputError(f"the sequences declare {listed(said)}: expected one dtype; give it, or judge them apart.")
        declared = said[0] if said else None
    if declared not in (None, "float64", *(rung.name for rung in RUNGS)):
        raise InputError(f"dtype={declared!r} was declared: expected float64, float32, float16 or bfloat16; leave it out.")
    return "float32" if declared == "float64" else declared


def _verdict(
    adapter: Adapter, paths: Sequence[GivenPath], sides: Sequence[_Side], ours: _Ours, allow: Sequence[str]
) -> Verdict:
    """The verdict of the side that is worse; with two sides, every sentence names its side."""

    def code(side: _Side) -> int:
        return 0 if side.word in GOOD or side.word in allow else 2 if side.word == CANNOT_TELL else 3

    worst = max(sides, key=code)
    two, name = len(sides) > 1, adapter.facts.name
    passes, unsure = not code(worst), code(worst) == 2
    begun = "PASS" if passes else "CANNOT TELL" if unsure else "FAIL"
    dtype = sides[0].declared or "no dtype"
    who = ("both the engine's and the trainer's" if passes else f"{worst.name}'s") if two else "another engine's"
    head = f"{begun}  {worst.word}  {who} log-probs against {name}, declared {dtype}"
    # In a report of tests the distance is what failed.
    checks = [
        dataclasses.replace(
            check,
            name=f"{side.name}: {check.name}" if two else check.name,
            status="failed" if code(side) == 3 and check.name == "rung" and check.status != "passed" else check.status,
        )
        for side in sides for check in side.checks
    ]  # fmt: skip
    why = [f"  {side.name}: {side.word}: {side.why}" for side in sorted(sides, key=code, reverse=True)]
    lines = [*(why if two else [f"  {worst.why}"]), *(f"  {check.name}: {check.detail}" for check in checks)]
    found = {**worst.found, "begins": worst.begins}
    if two:
        found["side"] = worst.name
        found["sides"] = [{"side": side.name, "verdict": side.word, "why": side.why} for side in sides]
    return Verdict(
        worst.word, None, None if worst.word in GOOD else worst.begins, "", "", {}, tuple(checks), (),
        "\n".join([head, *lines]), "yes" if passes and worst.word not in GOOD else "no",
        {**provenance(adapter), "dtype": sides[0].declared or "not given"}, given=found,
        tokens=token_table(adapter, paths, ours.rows(Way("float64"))) if worst.tokens is not None else None,
    )  # fmt: skip


@dataclasses.dataclass
class _Ours:
    """Our own log-probs of the same texts, along each way that was asked for, computed once."""

    adapter: Adapter
    paths: Sequence[GivenPath]
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self._made: dict[tuple[str, float, str, int], np.ndarray | None] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def rows(self, way: Way, numbers: Sequence[int] | None = None) -> list[Any]:
        """Log-probs by path, ``[position]`` each; None for paths not asked for, and for all where this model has no such way."""
        none: list[Any] = [None] * len(self.paths)
        if way.path and not self.adapter.attention_only:
            return none
        found = list(none)
        for number in range(len(self.paths)) if numbers is None else numbers:
            key = (way.name, way.size, way.dtype, number)
            if key not in self._made:
                self.tell(f"{way.name}, sequence {number + 1} of {len(self.paths)}")
                self._made[key] = self._row(way, number)
            if self._made[key] is None:
                return none
            found[number] = self._made[key]
        return found

    def _row(self, way: Way, number: int) -> np.ndarray | None:
        path = self.paths[number]
        try:
            rows = log_probs(self.adapter, path.ids, len(path.prompt), way)
        except (InputError, UnsupportedError):
            # This model cannot be run so: heads too narrow for a policy's blocks, say.
            return None
        if rows is None:
            return None
        if way == Way("float64") and len(rows) * rows.shape[1] <= LOGITS:
            self._logits = {number: rows.cpu()}
        return chosen_of(rows, path.ids)

    def logits(self, number: int) -> torch.Tensor:
        """``[position, vocabulary]``, log-probs in float64; those of the last text alone are held."""
        if number not in self._logits:
            rows = log_probs(self.adapter, self.paths[number].ids, len(self.paths[number].prompt), Way("float64"))
            assert rows is not None
            self._logits = {number: rows.cpu()}
        return self._logits[number]


@dataclasses.dataclass
class _Side:
    """One side's log-probs, and what is found of them."""

    ours: _Ours
    name: str
    paths: Sequence[GivenPath]
    declared: str | None
    seed: int

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self.found: dict[str, Any] = {"declared": self.declared or "not given", "rungs": [], "tried": []}
        self.begins: int | None = None
        self.tokens = Tokens.of(self.paths) if self.paths else None
        self.spread: dict[str, dict[str, float]] = {}

    def judge(self) -> None:
        """Sets the word and why."""
        self.word, self.why = self._judged()

    def _judged(self) -> tuple[str, str]:
        if (why := self._readable()) is not None:
            self.tokens = None
            return CANNOT_TELL, why
        tokens = self.tokens
        assert tokens is not None
        self.first = tokens.some(TRIED)
        self.numbers = sorted(set(tokens.sequence[self.first].tolist()))
        self.truth = tokens.gathered(self.ours.rows(Way("float64")))
        if not np.isfinite(self.truth).all():
            name = self.ours.adapter.facts.name
            raise InputError(f"{name} gives NaN or Inf in float64 on these tokens: give another model.")
        self.seen = tokens.engine - self.truth
        self.gap = np.abs(self.seen)
        self._statistics()
        near, within = self._rung()
        for step in (self._alignment, self._semantics) if not within else (self._semantics,):
            if (named := step(near, within)) is not None:
                return named
        return self._cause(near, within)

    def _say(self, name: str, status: str, detail: str, error: float | None = None) -> None:
        self.checks.append(Check(name, status, detail, error))

    # What can be read -----------------------------------------------------------------------------------------------------

    def _readable(self) -> str | None:
        tokens, total = self.tokens, sum(len(path.ids) - 1 for path in self.paths)
        missing = sum((path.missing for path in self.paths), Counter[str]())
        said = ", ".join(f"{word} {count:,} time{'s' * (count != 1)}" for word, count in missing.most_common())
        given = 0 if tokens is None else len(tokens.engine)
        where = f"{given:,} of {total:,} tokens in {len(self.paths):,} sequences have a log-prob" + (
            f"; instead of one (first tokens included) the file has: {said}." if said else "."
        )
        self.found |= {"sequences": len(self.paths), "tokens": given, "missing": dict(missing)}
        engine = np.array([]) if tokens is None else tokens.engine
        why = positive(engine)
        if why is None and (above := engine > 0).any():
            where += f" {int(above.sum()):,} above 0, by {engine.max():.1g} at most, are taken for 0, rounded."
            engine[above] = 0
        step = next((path.step for path in self.paths if path.step is not None), None)
        self.written = steps.written(engine, step) if given else None
        if self.written is not None:
            where += f" They are written {self.written[0]}: so are ours, before their distance is taken."
        if why is None and given < FEWEST:
            why = f"{given} tokens have a log-prob, and of fewer than {FEWEST} nothing is judged: ask the engine for more."
        self._say("readable", "passed" if why is None else "cannot tell", where if why is None else f"{why} {where}")
        return why

    def _of(self, way: Way, some: bool = False) -> np.ndarray | None:
        """``[token]`` along one of our ways, of the first tokens alone with ``some``; None where this model has no such way."""
        assert self.tokens is not None
        rows = self.ours.rows(way, self.numbers if some else None)
        if all(row is None for row in rows):
            return None
        found = self.tokens.gathered(rows)
        return np.where(self.first, found, np.nan) if some else found

    def _distance(self, row: np.ndarray, beside: np.ndarray) -> np.ndarray:
        """How far one of our rows is from another, once it is written as the engine's are."""
        return np.abs((row if self.written is None else self.written[1](row)) - beside)

    # What rounding does ---------------------------------------------------------------------------------------------------

    def _null(self, rung: Way, cause: Way | None = None) -> dict[str, float] | None:
        """What rounding in a precision does here: the distance of our own path, and how much larger that of the furthest null is.

        Args:
            rung: The precision.
            cause: A cause that the path has besides: how far it then is from itself in float64.

        Returns:
            ``own``, the mean distance; ``mean`` and ``max``, the limits in units of our own; None where there is no such way.
        """
        if cause is None and rung.name in self.spread:
            return self.spread[rung.name]
        beside = self.truth if cause is None else self._of(cause, some=True)
        plain = rung if cause is None else dataclasses.replace(cause, dtype=rung.dtype)
        every = []
        for way in (plain, *(nulls(rung) if cause is None else ())):
            row = self._of(way, some=True)
            if row is not None and beside is not None and np.isfinite(row[self.first]).all():
                every.append(self._distance(row, beside)[self.first])
        if not every or not np.isfinite(every[0]).all():
            return None
        own = max(float(every[0].mean()), 1e-30)
        # The largest of some tokens hangs on chance: by as much as between the nulls themselves it may be larger still.
        largest = sorted(float(each.max()) for each in every)
        found = {
            "own": own,
            "mean": max(float(each.mean()) for each in every) / own,
            "max": largest[-1] * largest[-1] / max(largest[0] * float(every[0].max()), 1e-30),
        }
        if cause is None:
            self.spread[rung.name] = found
        return found

    def _within(self, rung: Way, gap: np.ndarray) -> tuple[bool, dict[str, float]]:
        """Whether a distance is no more than the nulls of a precision, and what it is in units of our own."""
        tokens, null, row = self.tokens, self._null(rung), self._of(rung)
        assert tokens is not None
        if null is None or row is None:
            return False, {}
        found = steps.ratio(tokens, gap, self._distance(row, self.truth), self.seed)
        return found["mean"] <= null["mean"] and found["max"] <= null["max"], {
            **found, "null_mean": null["mean"], "null_max": null["max"]
        }  # fmt: skip

    def _rung(self) -> tuple[Way, bool]:
        """The precision that the rest is said of, and whether the engine lies within its rounding."""
        tokens = self.tokens
        assert tokens is not None
        asked = next((rung for rung in RUNGS if rung.name == self.declared), RUNGS[0])
        stands, self.coarser, self.row = None, None, {}
        for rung in (asked, *(r for r in RUNGS if r.name != asked.name)):
            self.ours.tell(rung.name)
            lies, found = self._within(rung, self.gap)
            if not found:
                continue
            # What was not declared is stood on only where its differences go with ours: two engines in one precision round the
            # same weights, and often more, alike.
            effects = [self._of(each) for each in (rung, WEIGHTS.get(rung.name)) if each is not None]
            same = any(steps.alike(self.seen, row - self.truth) for row in effects if row is not None)
            lies = lies and (rung is asked or same)
            self.found["rungs"].append(
                {
                    "precision": rung.name,
                    **found,
                    "goes_with_ours": "yes" if same else "no",
                    "within": "yes" if lies else "no",
                }
            )
            if rung is asked:
                self.row = found
            if lies:
                stands = rung
                break
        # Of a cache alone that is coarser the cause is asked for, as of any other.
        if stands is not None and stands is not asked and self.declared is not None and not stands.path:
            self.coarser = stands
        within = stands is not None and (stands is asked or self.declared is None)
        near = stands if stands is not None and within else asked
        row = next((r for r in self.found["rungs"] if r["precision"] == near.name), None)
        if row is None:
            name = self.ours.adapter.facts.name
            raise InputError(
                f"{name} gives NaN or Inf in {near.name} on these tokens: say another dtype, or give another model."
            )
        self.found |= {"beside": near.name, "our_mean_distance": self.spread[near.name]["own"]}
        where = stands.name if stands is not None else "none of ours"
        said = (
            f"{row['mean']:.3g} times our own mean distance to float64 in {near.name} ({row['low']:.3g} to {row['high']:.3g}), "
            f"where the furthest of our nulls is {row['null_mean']:.3g} times; {row['max']:.3g} times our largest, of the nulls "
            f"{row['null_max']:.3g}; stands on {where} (n = {len(tokens.engine):,})."
        )
        self._say("rung", "passed" if within else "cannot tell", said, row["mean"])
        own = self._of(near)
        assert own is not None
        self.begins = steps.onset(tokens, self.gap, self._distance(own, self.truth))
        shape = (
            "no position was found at which it begins"
            if self.begins is None
            else f"more of it from position {self.begins} on"
        )
        self._say("shape", "passed", f"{shape}: a suspicion, no cause (n = {len(self.gap):,}).")
        null = self.spread[near.name]
        # Errors add as squares.
        mean = np.sqrt(max(null["mean"] ** 2 - 1, 0)) * null["own"]
        most = row["null_max"] * np.nanmax(self._distance(own, self.truth))
        self.found |= {"smallest_mean_difference_that_shows": float(mean), "smallest_at_one_token_that_shows": float(most)}
        n = f"n = {len(tokens.engine):,} in {near.name}"
        self.least = f"a mean difference of {mean:.2g} nats, or {most:.2g} at one token, would have shown ({n})"
        return near, within

    # What reproduces it ---------------------------------------------------------------------------------------------------

    def _reproduced(self, rows: Mapping[str, np.ndarray], near: Way, cause: Way | None = None) -> tuple[str, float]:
        """The alternative to float64 that gives what the engine gave, and the share of the difference that it leaves held out.

        It is chosen on one half. On the other it is surely nearer than float64, and what it leaves is within rounding: of the
        precision that was declared, or of the finest that holds it where none was.
        """
        tokens = self.tokens
        assert tokens is not None
        name = steps.nearest(tokens, rows)
        if not name:
            return "", 1.0
        row = rows[name]
        left = np.abs(tokens.engine - row)
        share = steps.mean_gap(tokens.engine, row, tokens.held) / max(
            steps.mean_gap(tokens.engine, self.truth, tokens.held & np.isfinite(row)), 1e-30
        )
        if not steps.nearer(tokens, row, self.truth):
            return "", share
        rungs = [near] if self.declared is not None else [rung for rung in RUNGS if not rung.path]
        for rung in rungs:
            null, own = self._null(rung), self._of(rung)
            if null is None or own is None:
                continue
            limit = null["mean"]
            # A rounding that moves a code of a quantised cache moves it by a whole step: how far the cause then is from itself.
            moved = None if cause is None else self._null(rung, cause)
            if moved is not None:
                limit = max(limit, limit * moved["own"] / null["own"])
            where = tokens.held & np.isfinite(left)
            found = steps.ratio(tokens, np.where(where, left, np.nan), self._distance(own, self.truth), self.seed)
            if found["low"] <= limit:
                return name, share
        return "", share

    def _alignment(self, near: Way, within: bool) -> tuple[str, str] | None:
        tokens = self.tokens
        assert tokens is not None
        truth = self.ours.rows(Way("float64"))
        others = {f"shifted by {by:+d}": tokens.gathered(truth, by) for by in (1, -1)} | self._beginnings()
        name, left = self._reproduced(others, near)
        n = f"n = {int(tokens.held.sum()):,} held-out tokens"
        if not name:
            self._say("alignment", "passed", f"as given; {', '.join(others)} do not give it ({n}).")
            return None
        why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference ({n})."
        self._say("alignment", "failed", why, left)
        return "misaligned", why

    def _beginnings(self) -> dict[str, np.ndarray]:
        """What the engine would give with another beginning."""
        assert self.tokens is not None
        adapter = self.ours.adapter
        bos = getattr(adapter.tokenizer, "bos_token_id", None)
        cut: list[np.ndarray | None] = [None] * len(self.paths)
        put = list(cut)
        for number in self.numbers:
            ids = self.paths[number].ids
            if len(ids) < 3:
                continue
            rows = log_probs(adapter, ids[1:], 0, Way("float64"))
            assert rows is not None
            cut[number] = np.concatenate([[np.nan], chosen_of(rows, ids[1:])])
            if bos is not None and ids[0] != bos and len(ids) < adapter.facts.context:
                rows = log_probs(adapter, (bos, *ids), 0, Way("float64"))
                assert rows is not None
                put[number] = chosen_of(rows, (bos, *ids))[1:]
        found = {"computed without the first token (BOS)": cut, "computed with a BOS in front": put}
        return {name: self.tokens.gathered(rows) for name, rows in found.items() if any(row is not None for row in rows)}

    def _semantics(self, near: Way, within: bool) -> tuple[str, str] | None:
        tokens, adapter = self.tokens, self.ours.adapter
        assert tokens is not None
        unsure = self.truth < -CERTAIN
        above, chance = steps.one_sided(self.seen[unsure])
        sided = (
            f"the engine is above ours at {above:.0%} of the tokens (sign test p = {chance:.1g}, n = {int(unsure.sum()):,})"
        )
        cuts = above > 0.5 and chance < CHANCE
        nothing = f"no temperature and no truncation; {sided}. Penalties cannot be told."
        if within and not cuts:
            self._say("semantics", "passed", nothing)
            return None
        kept = self.first & tokens.some(max(64, LOGITS // adapter.facts.vocabulary))
        if tokens.held[kept].all() or not tokens.held[kept].any():
            said = f"not tried: of {int(kept.sum()):,} tokens none can be held out; {sided}."
            self._say("semantics", "cannot tell", said)
            return None
        parts = [
            (at, self.ours.logits(number)[torch.from_numpy(tokens.position[at] - 1)])
            for number in np.unique(tokens.sequence[kept]) for at in [np.flatnonzero(kept & (tokens.sequence == number))]
        ]  # fmt: skip
        at, logits = np.concatenate([at for at, _ in parts]), torch.cat([rows for _, rows in parts])
        ids = np.array([self.paths[s].ids[p] for s, p in zip(tokens.sequence[at], tokens.position[at], strict=True)])
        rows: dict[str, np.ndarray] = {}
        if not within:
            value, row = steps.temperature(tokens.engine[at], logits, ids, tokens.held[at])
            rows[f"after temperature {value:.3g}"] = self._put(at, row)
            rows |= {f"in base {base}, not in nats": self.truth / np.log(base) for base in (2, 10)}
        if cuts:
            for name, effect in steps.truncations(logits).items():
                rows[f"after {name}"] = self._put(at, self.truth[at] + effect)
        name, left = self._reproduced(rows, near)
        if name.startswith("after top"):
            left_over = (tokens.engine - rows[name])[unsure & np.isfinite(rows[name])]
            # Where what is left is one-sided too, something else raises the engine's.
            name = "" if steps.one_sided(left_over)[1] < CHANCE else name
        if name:
            why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference held out; {sided}."
            self._say("semantics", "failed", why, left)
            return "processed", why
        self._say("semantics", "passed", nothing)
        return None

    def _put(self, at: np.ndarray, row: np.ndarray) -> np.ndarray:
        found = np.full(len(self.truth), np.nan)
        found[at] = row
        return found

    def _cause(self, near: Way, within: bool) -> tuple[str, str]:
        tokens, row = self.tokens, self.found["rungs"][0]
        assert tokens is not None
        n = f"n = {len(tokens.engine):,}"
        if within:
            self._say("substitution", "not run", f"rounding in {near.name} is as large as what there is; {self.least}.")
            word = "equal" if not self.gap.any() else "rounding"
            return word, f"{VERDICTS[word] if word == 'equal' else 'no more than rounding in ' + near.name}; {self.least}."
        way, left = self._substituted(near)
        if way is not None:
            why = f"{way.name} reproduces it token by token: {left:.2g} of it is left held out ({n})."
            self._say("substitution", "passed" if way.word in GOOD else "failed", why, left)
            self.found["named"] = way.name
            return way.word, why
        tried = f"none of {len(self.found['tried'])} causes of ours reproduces it held out"
        held = int((self.first & tokens.held).sum())
        self._say("substitution", "cannot tell", f"{tried} (n = {held:,} held-out tokens).")
        if self.coarser is not None:
            return "wrong-dtype", f"declared {self.declared}, stands on {self.coarser.name}; {tried}."
        how = "with a plain cache, once cold and once warm"
        how = how if self.declared == "float32" else f"in float32 {how}"
        after = f"Next: see that both have the same checkpoint; then the engine {how}."
        # Our nulls are apart by as much as we are unsure what rounding elsewhere may do, on average and at one token; and what
        # is further off at a token than any null of the coarsest precision is rounding of none.
        if row["low"] > row["null_mean"] ** 2:
            said = f"{row['mean']:.3g} times our own distance in {row['precision']}, which no rounding is"
            return "unexplained", f"{said}; {tried}. {after}"
        last = next(r for r in self.found["rungs"][::-1] if r["precision"] in ("bfloat16", row["precision"]))
        declared = self.declared is not None and row["max"] > row["null_max"] ** 2
        if declared or last["max"] > last["null_max"]:
            far = row if declared else last
            said = f"at one token {far['max']:.3g} times our largest distance in {far['precision']}, which no rounding is"
            return "unexplained", f"{said}; {tried}. {after}"
        after = after if self.declared else "Next: say with --dtype what the engine computes in, or run it in float32."
        return CANNOT_TELL, f"more than rounding in {near.name}, and {tried}; {self.least}. {after}"

    def _substituted(self, near: Way) -> tuple[Way | None, float]:
        assert self.tokens is not None
        rows, ways = {}, {way.name: way for way in candidates()}
        for way in ways.values():
            found = self._of(way, some=True)
            if found is not None and np.isfinite(found[self.first]).all() and (found - self.truth)[self.first].any():
                rows[way.name] = found
        if {FLASH_ROW, FLOAT16} <= rows.keys():
            # Of a request a position: a prompt of 64 rows on is computed in tiles, which are added up in float32.
            rows[FLASH] = np.where(self.tokens.position < 64, rows[FLASH_ROW], rows[FLOAT16])
            ways[FLASH] = dataclasses.replace(ways[FLASH_ROW], name=FLASH)
        for name, row in rows.items():
            ok = np.isfinite(row)
            left = steps.mean_gap(self.tokens.engine, row, ok) / max(float(self.gap[ok].mean()), 1e-30)
            self.found["tried"].append({"cause": name, "left": left, "n": int(ok.sum())})
        best = steps.nearest(self.tokens, rows)
        if not best:
            return None, 1.0
        way = ways[best]
        if way.family is not None and steps.nearer(self.tokens, rows[best], self.truth):
            way = self._sized(way)
            sized = self._of(way, some=True)
            assert sized is not None
            rows[way.name] = sized
            # A listed size that is as near is the simpler one.
            if self._reproduced({best: rows[best]}, near)[0]:
                way = ways[best]
        cause = way if way.word in ("policy", "kernel") and way.name != FLASH else None
        name, left = self._reproduced({way.name: rows[way.name]}, near, cause)
        return (way if name else None), left

    def _sized(self, way: Way) -> Way:
        """The same cause of the size that is nearest to the engine, on the positions that are not held out."""
        tokens, family = self.tokens, way.family
        assert tokens is not None
        assert family is not None

        def loss(size: float) -> float:
            row = self._of(family(float(np.exp(size))), some=True)
            return float("inf") if row is None else steps.mean_gap(tokens.engine, row, ~tokens.held)

        at, reach = np.log(way.size), 0.8 * abs(np.log(way.size))
        # As exactly as float32 has to be reproduced.
        options = {"xatol": 1e-8, "maxiter": 40}
        found = scipy.optimize.minimize_scalar(loss, bounds=(at - reach, at + reach), method="bounded", options=options)
        return family(float(np.exp(found.x)))

    # Statistics of others -------------------------------------------------------------------------------------------------

    def _statistics(self) -> None:
        """Trainer against rollout: the file's own trainer where it has one, or our float64."""
        tokens, sides = self.tokens, [path.trainer for path in self.paths]
        assert tokens is not None
        own = any(side is not None for side in sides)
        trainer = tokens.gathered(sides) if own else self.truth
        ok = np.isfinite(trainer)
        if not ok.any():
            return
        rollout, sequence = tokens.engine[ok], tokens.sequence[ok]
        rows = [
            {"sequence": self.paths[s].id, **rollout_statistics(trainer[ok][at], rollout[at], sequence[at])}
            for s in np.unique(sequence) for at in [sequence == s]
        ]  # fmt: skip
        self.found["statistics"] = {
            "trainer": "the file's" if own else "our float64",
            "all": rollout_statistics(trainer[ok], rollout, sequence),
            "by_sequence": rows,
        }
