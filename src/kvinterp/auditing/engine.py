"""Another engine's log-probs, judged: rounding, or something else, and what; each step is said with its n.

No limit here is fitted. What rounding may do is measured in the same run, on the same tokens: our own path in the engine's
precision beside float64, from a cache, among more rows, and with every result of it rounded once more (the nulls). What is
further off than all of them is no rounding. An explanation is named where our own float64 with it gives what the engine gave: it
is surely nearer on tokens that it was not chosen by, and what it leaves is within the nulls.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvinterp.auditing.checks import Check
from kvinterp.auditing.engine_numbers import (
    CHANCE,
    FEWEST,
    Tokens,
    alike,
    fitted,
    grid_of,
    mean_gap,
    one_sided,
    processed,
)
from kvinterp.auditing.engine_ways import RUNGS, WEIGHTS, Way, causes, chosen_of, log_probs, nulls
from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, VERDICTS, Verdict, allowed
from kvinterp.common.checks import check_callable, check_seed
from kvinterp.common.numbers import listed
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.metrics.rollouts import rollout_statistics
from kvinterp.models import Adapter, wrap
from kvinterp.models.provenance import provenance
from kvinterp.recording import Trace
from kvinterp.recording.engine_path import EnginePath, positive
from kvinterp.recording.readers import read_engine
from kvinterp.recording.trace import path_of_trace

TRIED = 1024
"""The most tokens on which nulls, causes, alignments and semantics are tried."""
LOGITS = 2**25
"""The most logits that temperatures and truncations are tried on."""
CERTAIN = 1e-6
"""Rounding takes a token that is surer than this, in nats, one way: its probability ends at 1."""
TRUTH = Way("float64")

Row = np.ndarray
"""``[token]``, log-probs in nats; NaN where there is none."""


def audit_engine(
    model: Any,
    source: str | Path | Trace | Sequence[EnginePath],
    declared: str | None = None,
    format: str | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] = lambda doing: None,
) -> Verdict:
    """Judges log-probs that another engine gave of a model, and those of a trainer where they stand beside them.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it.
        source: The file that it wrote, see docs/engines.md; what :meth:`kvinterp.Trace.from_arrays` made; or what was read.
        declared: The dtype that the engine was said to compute in; what the file says unless given, or none.
        format: The file's format; known by the content unless given.
        allow: Words that shall not fail.
        seed: Seeds the resampling.
        tell: Told what is done next.

    Returns:
        The verdict, that of the worse side; its ``given`` has the distances, what was tried, and the statistics of reinforcement
        learning, its ``tokens`` both sides' log-probs. Of two sides ``given["sides"]`` has the word and reason of each.

    Raises:
        InputError: The file cannot be read, or a text cannot be one of this model's.
    """
    adapter = wrap(model)
    check_seed(seed)
    check_callable("tell", tell)
    allow = allowed(allow)
    paths = _read(adapter, source, format)
    dtype = _declared(paths, declared)
    ours = _Ours(adapter, paths, tell)
    with adapter.one_call(), torch.no_grad():
        sides = [_Side(ours, "the engine", paths, dtype, seed)]
        if any(path.trainer is not None for path in paths):
            # What is declared is the engine's; of a trainer nobody says anything.
            turned = [
                dataclasses.replace(path, chosen=_trainer(path), top={}, missing=Counter(), step=None) for path in paths
            ]
            sides.append(_Side(ours, "the trainer", turned, None, seed))
        for side in sides:
            side.judge()
        return _verdict(adapter, paths, sides, ours, allow)


# What is read ----------------------------------------------------------------------------------------------------------------


def _read(adapter: Adapter, source: Any, format: str | None) -> Sequence[EnginePath]:
    """The paths of a file, with the model's own ids of texts and its own beginning, or of what was read already.

    Raises:
        InputError: A text has a token outside the model's vocabulary, or is longer than its context.
    """
    facts, texts = adapter.facts, dict[str, int | None]()

    def token(text: str) -> int | None:
        if not texts and adapter.tokenizer is not None:
            for number, piece in enumerate(adapter.pieces(range(facts.vocabulary))):
                texts[piece] = None if piece in texts else number
        return texts.get(text)

    if isinstance(source, Trace):
        paths: Sequence[EnginePath] = [path_of_trace(source)]
    elif isinstance(source, list):
        paths = source
    else:
        bos = getattr(adapter.tokenizer, "bos_token_id", None)
        paths = read_engine(source, format, token, bos if bos is not None and adapter.encode("a")[0] == bos else None)
    for path in paths:
        ids = [*path.ids, *(max(0, int(top.max())) for top, _ in path.top.values() if len(top))]
        if wrong := [token for token in ids if not 0 <= token < facts.vocabulary]:
            raise InputError(
                f"{path.id} has the token {max(wrong)}, and {facts.name} has {facts.vocabulary:,}: it is of another one; "
                "give the model that the engine ran."
            )
        if len(path.ids) > facts.context:
            raise InputError(
                f"{path.id} has {len(path.ids):,} tokens, and the context of {facts.name} {facts.context:,}: leave it out."
            )
    return paths


def _declared(paths: Sequence[EnginePath], declared: str | None) -> str | None:
    if declared is None:
        dtypes = sorted({str(path.declared["dtype"]).removeprefix("torch.") for path in paths if "dtype" in path.declared})
        if len(dtypes) > 1:
            raise InputError(f"the sequences declare {listed(dtypes)}: expected one dtype; give it, or judge them apart.")
        declared = next(iter(dtypes), None)
    if declared not in (None, "float64", *(rung.name for rung in RUNGS)):
        raise InputError(f"dtype={declared!r} was declared: expected float64, float32, float16 or bfloat16; leave it out.")
    return "float32" if declared == "float64" else declared


def _trainer(path: EnginePath) -> np.ndarray:
    return np.full(len(path.ids), np.nan) if path.trainer is None else path.trainer.copy()


# What is said ----------------------------------------------------------------------------------------------------------------


def _verdict(
    adapter: Adapter, paths: Sequence[EnginePath], sides: Sequence[_Side], ours: _Ours, allow: Sequence[str]
) -> Verdict:
    """The verdict of the side that is worse; with two sides, every sentence names its side."""

    def code(side: _Side) -> int:
        return 0 if side.word in GOOD or side.word in allow else 1 if side.word == CANNOT_TELL else 2

    worst, two, dtype = max(sides, key=code), len(sides) > 1, sides[0].declared
    whose = f"{worst.name}'s" if two else "another engine's"
    if two and not code(worst):
        whose = "both the engine's and the trainer's"
    head = f"{('PASS', 'CANNOT TELL', 'FAIL')[code(worst)]}  {worst.word}  {whose} log-probs against {adapter.facts.name}"
    checks = []
    for side in sides:
        for check in side.checks:
            # In a report of tests the distance is what failed.
            failed = code(side) == 2 and check.name == "rung" and check.status != "passed"
            name = f"{side.name}: {check.name}" if two else check.name
            checks.append(dataclasses.replace(check, name=name, status="failed" if failed else check.status))
    why = [f"  {side.name}: {side.word}: {side.why}" for side in sorted(sides, key=code, reverse=True)]
    lines = [f"{head}, declared {dtype or 'no dtype'}", *(why if two else [f"  {worst.why}"])]
    lines += [f"  {check.name}: {check.detail}" for check in checks]
    table = {**worst.table, "begins": worst.begins}
    if two:
        words = [{"side": side.name, "verdict": side.word, "why": side.why} for side in sides]
        table |= {"side": worst.name, "sides": words}
    return Verdict(
        worst.word, None, None if worst.word in GOOD else worst.begins, "", "", {}, tuple(checks), (), "\n".join(lines),
        "yes" if not code(worst) and worst.word not in GOOD else "no",
        {**provenance(adapter), "dtype": dtype or "not given"}, given=table,
        tokens=None if "tokens" not in vars(worst) else _token_table(adapter, paths, ours.rows(TRUTH)),
    )  # fmt: skip


def _token_table(adapter: Adapter, paths: Sequence[EnginePath], rows: Sequence[np.ndarray]) -> pd.DataFrame:
    """Every token beside our log-prob of it, a row each; NaN where one of the two has none."""
    ids = np.concatenate([path.ids for path in paths])
    seen, place = np.unique(ids, return_inverse=True)
    texts, own = np.unique(adapter.pieces(seen.tolist()), return_inverse=True)
    lengths = [len(path.ids) for path in paths]
    engine, ours = np.concatenate([path.chosen for path in paths]), np.concatenate(rows)
    part = np.concatenate([np.arange(len(path.ids)) >= len(path.prompt) for path in paths]).astype(int)
    table = pd.DataFrame({
        "sequence": pd.Categorical(np.repeat([path.id for path in paths], lengths), [*dict.fromkeys(p.id for p in paths)]),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        "part": pd.Categorical.from_codes(part, ["prompt", "tokens"]),
        "token": ids,
        "text": pd.Categorical.from_codes(own[place], texts),
        "engine": engine,
        "ours": ours,
        "difference": engine - ours,
    })  # fmt: skip
    if any(path.trainer is not None for path in paths):
        table["trainer"] = np.concatenate([*map(_trainer, paths)])
        table["trainer_difference"] = table["trainer"] - ours
    return table


# What is computed ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Ours:
    """Our own log-probs of the same texts, along each way that was asked for, computed once."""

    adapter: Adapter
    paths: Sequence[EnginePath]
    tell: Callable[[str], None]
    known: dict[tuple[str, float, str, int], np.ndarray | None] = dataclasses.field(default_factory=dict)

    def rows(self, way: Way, numbers: Sequence[int] | None = None) -> list[Any]:
        """Log-probs by path, ``[position]`` each; None for paths not asked for, and for all where this model has no such way."""
        rows: list[Any] = [None] * len(self.paths)
        for number in range(len(self.paths)) if numbers is None else numbers:
            key = (way.name, way.size, way.dtype, number)
            if key not in self.known:
                self.tell(f"{way.name}, sequence {number + 1} of {len(self.paths)}")
                path = self.paths[number]
                self.known[key] = our_row(self.adapter, path.ids, len(path.prompt), way)
            if self.known[key] is None:
                return [None] * len(self.paths)
            rows[number] = self.known[key]
        return rows


def our_row(adapter: Adapter, ids: Sequence[int], prompt: int, way: Way) -> np.ndarray | None:
    """``[position]``, the log-probs of a text's own tokens; None where this model has no such way."""
    try:
        rows = log_probs(adapter, ids, prompt, way)
    except (InputError, UnsupportedError):
        # This model cannot be run so: heads too narrow for a policy's blocks, say.
        return None
    return None if rows is None else chosen_of(rows, ids)


@dataclasses.dataclass
class _Side:
    """One side's log-probs, and what is found of them."""

    ours: _Ours
    name: str
    paths: Sequence[EnginePath]
    declared: str | None
    seed: int

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self.table: dict[str, Any] = {"declared": self.declared or "not given", "rungs": [], "tried": []}
        self.begins: int | None = None
        self.spread: dict[str, dict[str, float] | None] = {}

    def judge(self) -> None:
        """Sets the word and why."""
        tokens = Tokens.of(self.paths)
        if (why := self._unreadable(tokens)) is not None:
            self.word, self.why = CANNOT_TELL, why
            return
        self.tokens = tokens
        self.some = tokens.some(TRIED)
        self.truth = tokens.gathered(self.ours.rows(TRUTH))
        if not np.isfinite(self.truth).all():
            name = self.ours.adapter.facts.name
            raise InputError(f"{name} gives NaN or Inf in float64 on these tokens: give another model.")
        self.seen = tokens.engine - self.truth
        self.gap = np.abs(self.seen)
        self._statistics()
        within = self._rung()
        self.word, self.why = self._explained(within) or (self._rounding() if within else self._unexplained())

    def _say(self, name: str, status: str, detail: str, error: float | None = None) -> None:
        self.checks.append(Check(name, status, detail, error))

    def _unreadable(self, tokens: Tokens) -> str | None:
        engine, total = tokens.engine, sum(len(path.ids) - 1 for path in self.paths)
        missing = sum((path.missing for path in self.paths), Counter[str]())
        instead = ", ".join(f"{word} {count:,} time{'s' * (count != 1)}" for word, count in missing.most_common())
        where = f"{len(engine):,} of {total:,} tokens in {len(self.paths):,} sequences have a log-prob" + (
            f"; instead of one (first tokens included) the file has: {instead}." if instead else "."
        )
        self.table |= {"sequences": len(self.paths), "tokens": len(engine), "missing": dict(missing)}
        why = positive(engine)
        if why is None and (above := engine > 0).any():
            where += f" {int(above.sum()):,} above 0, by {engine.max():.1g} at most, are taken for 0, rounded."
            engine[above] = 0
        step = next((path.step for path in self.paths if path.step is not None), None)
        self.grid = grid_of(engine, step)
        if self.grid is not None:
            where += f" They are written {self.grid[0]}: so are ours, before their distance is taken."
        if why is None and len(engine) < FEWEST:
            why = f"{len(engine)} tokens have a log-prob, and of fewer than {FEWEST} nothing is judged: ask the engine for more."
        self._say("readable", "passed" if why is None else "cannot tell", where if why is None else f"{why} {where}")
        return why

    def _row(self, way: Way, where: np.ndarray | None = None) -> Row | None:
        """Along one of our ways, at some tokens alone if told so; None where this model has no such way, or it overflows."""
        at = np.ones(len(self.gap), bool) if where is None else where
        row = self.tokens.gathered(self.ours.rows(way, np.unique(self.tokens.sequence[at]).tolist()))
        return np.where(at, row, np.nan) if np.isfinite(row[at]).all() else None

    def _distance(self, row: Row, beside: Row) -> Row:
        """How far one of our rows is from another, once it is written as the engine's are."""
        return np.abs((row if self.grid is None else self.grid[1](row)) - beside)

    # What rounding does ------------------------------------------------------------------------------------------------------

    def _null(self, rung: Way) -> dict[str, float] | None:
        """What rounding in a precision does here: the distance of our own path, and how much larger that of the furthest null is.

        Returns:
            ``own``, the mean distance; ``mean`` and ``max``, the limits in units of our own; None where it cannot be run.
        """
        if rung.name not in self.spread:
            rows = [self._row(way, self.some) for way in (rung, *nulls(rung))]
            gaps = [self._distance(row, self.truth)[self.some] for row in rows if row is not None]
            own = max(float(gaps[0].mean()), 1e-30) if rows[0] is not None else 0
            # The largest of some tokens hangs on chance: by as much as between the nulls themselves it may be larger still.
            largest = sorted(float(gap.max()) for gap in gaps)
            self.spread[rung.name] = None if rows[0] is None else {
                "own": own,
                "mean": max(float(gap.mean()) for gap in gaps) / own,
                "max": largest[-1] ** 2 / max(largest[0] * float(gaps[0].max()), 1e-30),
            }  # fmt: skip
        return self.spread[rung.name]

    def _rung(self) -> bool:
        """Whether the side lies within the rounding of the precision that the rest is said of."""
        asked = next((rung for rung in RUNGS if rung.name == self.declared), RUNGS[0])
        stands = None
        # What is no rounding of a precision is none of a finer one.
        for rung in RUNGS[RUNGS.index(asked) :]:
            self.ours.tell(rung.name)
            null, row = self._null(rung), self._row(rung)
            if null is None or row is None:
                continue
            ratio = self.tokens.ratio(self.gap, self._distance(row, self.truth), self.seed)
            lies = ratio["mean"] <= null["mean"] and ratio["max"] <= null["max"]
            # What was not declared is stood on only where its differences go with ours: two engines in one precision round the
            # same weights, and often more, alike.
            effects = [row, *(self._row(WEIGHTS[name]) for name in (rung.name,) if name in WEIGHTS)]
            same = any(alike(self.seen, each - self.truth) for each in effects if each is not None)
            lies = lies and (rung is asked or same)
            limits = {"null_mean": null["mean"], "null_max": null["max"]}
            words = {"goes_with_ours": "yes" if same else "no", "within": "yes" if lies else "no"}
            self.table["rungs"].append({"precision": rung.name, **ratio, **limits, **words})
            if lies:
                stands = rung
                break
        # Of a cache alone that is coarser the cause is asked for, as of any other.
        other = stands is not None and stands is not asked and self.declared is not None
        self.coarser = stands.name if stands is not None and other and not stands.path else ""
        self.near = asked if stands is None or other else stands
        self._say_rung("none of ours" if stands is None else stands.name, stands is not None and not other)
        return stands is not None and not other

    def _say_rung(self, stands: str, within: bool) -> None:
        """Says how far the side is in units of our own rounding, from where on, and what would have shown."""
        near, own = self.near.name, self._row(self.near)
        row = next((row for row in self.table["rungs"] if row["precision"] == near), None)
        null = self.spread[near]
        if row is None or own is None or null is None:
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
        self.begins = self.tokens.onset(self.gap, noise)
        at = self.begins
        shape = "no position was found at which it begins" if at is None else f"more of it from position {at} on"
        self._say("shape", "passed", f"{shape}: a suspicion, no cause ({n}).")
        # Errors add as squares.
        mean, most = np.sqrt(max(null["mean"] ** 2 - 1, 0)) * null["own"], row["null_max"] * noise.max()
        self.table |= {
            "beside": near,
            "our_mean_distance": null["own"],
            "smallest_mean_difference_that_shows": float(mean),
            "smallest_at_one_token_that_shows": float(most),
        }
        self.least = f"a mean difference of {mean:.2g} nats, or {most:.2g} at one token, would have shown ({n} in {near})"

    # What explains it --------------------------------------------------------------------------------------------------------

    def _explained(self, within: bool) -> tuple[str, str] | None:
        """The first explanation that gives what the side gave; of what is within rounding, only what moves it to one side."""
        unsure = self.truth < -CERTAIN
        above, chance = one_sided(self.seen[unsure])
        self.raised = above > 0.5 and chance < CHANCE
        sided = (
            f"the engine is above ours at {above:.0%} of the tokens (sign test p = {chance:.1g}, n = {int(unsure.sum()):,})"
        )
        n = f"n = {int((self.some & self.tokens.held).sum()):,} held-out tokens"
        steps: list[tuple[str, str, Callable[[], Mapping[str, Row]], str]] = [
            ("alignment", "misaligned", self._aligned, "as given; {tried} do not give it"),
            ("semantics", "processed", lambda: self._processed(within),
             f"no temperature and no truncation; {sided}. Penalties cannot be told"),
        ]  # fmt: skip
        for step, word, rows_of, none in steps[1 if within else 0 :]:
            rows = rows_of()
            name, left = self._reproduced(rows)
            if name:
                more = f"; {sided}" if step == "semantics" else ""
                why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference held out{more} ({n})."
                self._say(step, "failed", why, left)
                return word, why
            self._say(step, "passed", f"{none.format(tried=', '.join(rows))} ({n}).")
        return None if within else self._caused()

    def _reproduced(self, rows: Mapping[str, Row], cause: Way | None = None) -> tuple[str, float]:
        """The row that gives what the side gave, or "", and the share of the difference that it leaves held out.

        It is chosen on one half. On the other it is surely nearer than float64, and what it leaves is within rounding: of the
        precision that was declared, or of the finest that holds it where none was.
        """
        tokens, name = self.tokens, self._nearest(rows)
        if not name:
            return "", 1.0
        row = rows[name]
        held = tokens.held & np.isfinite(row)
        left = np.where(held, np.abs(tokens.engine - row), np.nan)
        share = mean_gap(tokens.engine, row, held) / max(mean_gap(tokens.engine, self.truth, held), 1e-30)
        if tokens.nearer(row, self.truth):
            for rung in [self.near] if self.declared is not None else [rung for rung in RUNGS if not rung.path]:
                null, own = self._null(rung), self._row(rung)
                if null is None or own is None:
                    continue
                # A rounding that moves a code of a quantised cache moves it by a whole step: so far is the cause from itself.
                moved = None if cause is None else self._row(dataclasses.replace(cause, dtype=rung.dtype), self.some)
                apart = 0.0 if moved is None else float(self._distance(moved, row)[self.some].mean())
                limit = null["mean"] * max(1.0, apart / null["own"])
                if tokens.ratio(left, self._distance(own, self.truth), self.seed)["low"] <= limit:
                    return name, share
        return "", share

    def _nearest(self, rows: Mapping[str, Row]) -> str:
        """The row that is nearest on the tokens that are not held out; "" of none."""
        fit = {name: mean_gap(self.tokens.engine, row, ~self.tokens.held) for name, row in rows.items()}
        best = min(fit, key=fit.__getitem__, default="")
        return best if best and np.isfinite(fit[best]) else ""

    def _aligned(self) -> dict[str, Row]:
        """Our float64 with other tokens in their places, or with another beginning."""
        tokens, adapter, paths = self.tokens, self.ours.adapter, self.paths
        truth = self.ours.rows(TRUTH)
        bos = getattr(adapter.tokenizer, "bos_token_id", None)
        cut: list[np.ndarray | None] = [None] * len(paths)
        put = list(cut)
        for number in np.unique(tokens.sequence[self.some]):
            ids = paths[number].ids
            row = our_row(adapter, ids[1:], 0, TRUTH) if len(ids) > 2 else None
            cut[number] = None if row is None else np.concatenate([[np.nan], row])
            if bos is not None and ids[0] != bos and len(ids) < adapter.facts.context:
                row = our_row(adapter, (bos, *ids), 0, TRUTH)
                put[number] = None if row is None else row[1:]
        beginnings = {"computed without the first token (BOS)": cut, "computed with a BOS in front": put}
        rows = {f"shifted by {by:+d}": tokens.gathered(truth, by) for by in (1, -1)}
        rows |= {name: tokens.gathered(each) for name, each in beginnings.items()}
        return {name: row for name, row in rows.items() if np.isfinite(row).any()}

    def _processed(self, within: bool) -> dict[str, Row]:
        """Our float64 after a temperature or a truncation, or in another base of logarithms."""
        tokens, adapter = self.tokens, self.ours.adapter
        if within and not self.raised:
            return {}
        kept = self.some & tokens.some(max(64, LOGITS // adapter.facts.vocabulary))
        logits, ids = [], []
        at = np.concatenate([np.flatnonzero(kept & (tokens.sequence == number)) for number in np.unique(tokens.sequence)])
        for number in np.unique(tokens.sequence[at]):
            path, places = self.paths[number], tokens.position[at[tokens.sequence[at] == number]]
            row = log_probs(adapter, path.ids, len(path.prompt), TRUTH)
            assert row is not None
            logits.append(row[torch.from_numpy(places - 1)].cpu())
            ids.append(np.array(path.ids)[places])
        rows: dict[str, Row] = {}
        for name, values in processed(tokens.engine[at], torch.cat(logits), np.concatenate(ids), tokens.held[at]).items():
            rows[name] = np.full(len(self.truth), np.nan)
            rows[name][at] = values
            # A truncation raises what it leaves; where what is left is one-sided too, something else does.
            left = one_sided((tokens.engine - rows[name])[self.truth < -CERTAIN])[1]
            fits = not within if "temperature" in name else self.raised and left >= CHANCE
            if not fits:
                del rows[name]
        return rows if within else rows | {f"in base {base}, not in nats": self.truth / np.log(base) for base in (2, 10)}

    def _caused(self) -> tuple[str, str] | None:
        """The cause of ours that gives what the side gave."""
        fit, held = self.some & ~self.tokens.held, self.some & self.tokens.held
        ways, rows = {way.name: way for way in causes()}, {}
        for way in ways.values():
            row = self._row(way, fit)
            if row is not None and (row - self.truth)[fit].any():
                rows[way.name] = row
                left = mean_gap(self.tokens.engine, row, fit) / max(float(self.gap[fit].mean()), 1e-30)
                self.table["tried"].append({"cause": way.name, "left": left, "n": int(fit.sum())})
        n, best = f"n = {int(held.sum()):,} held-out tokens", self._nearest(rows)
        self.tried = f"none of {len(rows)} causes of ours reproduces it held out"
        # A listed size that is as near is the simpler one.
        for way in filter(None, (ways[best], self._sized(ways[best])) if best else ()):
            if (row := self._row(way, self.some)) is None:
                continue
            name, left = self._reproduced({way.name: row}, way if way.word in ("policy", "kernel") else None)
            if name:
                why = f"{name} reproduces it token by token: {left:.2g} of it is left ({n})."
                self._say("substitution", "passed" if way.word in GOOD else "failed", why, left)
                self.table["named"] = name
                return way.word, why
        self._say("substitution", "cannot tell", f"{self.tried} ({n}).")
        return None

    def _sized(self, way: Way) -> Way | None:
        """The same cause of the size that is nearest on the tokens that are not held out; None of what has no size."""
        if way.resized is None:
            return None
        resized, fit = way.resized, self.some & ~self.tokens.held

        def loss(size: float) -> float:
            row = self._row(resized(size), fit)
            return float("inf") if row is None else mean_gap(self.tokens.engine, row, fit)

        return resized(fitted(loss, way.size, 0.8 * abs(np.log(way.size))))

    # What is left ------------------------------------------------------------------------------------------------------------

    def _rounding(self) -> tuple[str, str]:
        near = self.near.name
        self._say("substitution", "not run", f"rounding in {near} is as large as what there is; {self.least}.")
        word = "rounding" if self.gap.any() else "equal"
        return word, f"{'no more than rounding in ' + near if self.gap.any() else VERDICTS[word]}; {self.least}."

    def _unexplained(self) -> tuple[str, str]:
        if self.coarser:
            return "wrong-dtype", f"declared {self.declared}, stands on {self.coarser}; {self.tried}."
        how = "" if self.declared == "float32" else "in float32 "
        after = f"Next: see that both have the same checkpoint; then the engine {how}with a plain cache, once cold and once warm."
        # Our nulls are apart by as much as we are unsure what rounding elsewhere may do, on average and at one token; and what
        # is further off at a token than any null of the coarsest precision is rounding of none.
        first, last = self.table["rungs"][0], self.table["rungs"][-1]
        far = ""
        if first["low"] > first["null_mean"] ** 2:
            far = f"{first['mean']:.3g} times our own distance in {first['precision']}"
        elif self.declared is not None and first["max"] > first["null_max"] ** 2:
            far = f"at one token {first['max']:.3g} times our largest distance in {first['precision']}"
        elif last["max"] > last["null_max"]:
            far = f"at one token {last['max']:.3g} times our largest distance in {last['precision']}"
        if far:
            return "unexplained", f"{far}, which no rounding is; {self.tried}. {after}"
        after = after if self.declared else "Next: say with --dtype what the engine computes in, or run it in float32."
        return CANNOT_TELL, f"more than rounding in {self.near.name}, and {self.tried}; {self.least}. {after}"

    def _statistics(self) -> None:
        """Trainer against rollout: the file's own trainer where it has one, or our float64."""
        tokens, own = self.tokens, any(path.trainer is not None for path in self.paths)
        trainer = tokens.gathered([path.trainer for path in self.paths]) if own else self.truth
        ok = np.isfinite(trainer)
        if not ok.any():
            return
        trainer, rollout, sequence = trainer[ok], tokens.engine[ok], tokens.sequence[ok]
        rows = []
        for number in np.unique(sequence):
            at = sequence == number
            rows.append({"sequence": self.paths[number].id, **rollout_statistics(trainer[at], rollout[at], sequence[at])})
        self.table["statistics"] = {
            "trainer": "the file's" if own else "our float64",
            "all": rollout_statistics(trainer, rollout, sequence),
            "by_sequence": rows,
        }
