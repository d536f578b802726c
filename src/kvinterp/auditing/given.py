"""Another engine's log-probs, judged: rounding, or something else, and what; each step is said with its n.

A threshold on a mean says little: signed errors cancel, and a clean 16-bit run is as far off as a fault in 32 bits. The unit here
is our own distance to float64 in each precision, and a cause is named only where one of our own paths reproduces what the engine
gave token by token, on positions that it was not chosen by.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch

from kvinterp.auditing import given_steps as steps
from kvinterp.auditing.bench import Check
from kvinterp.auditing.given_paths import FLASH, FLASH_ROW, FLOAT16, RUNGS, WEIGHTS, Way, candidates, log_probs
from kvinterp.auditing.given_steps import FEWEST, REPRODUCES, WINS, Tokens
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
"""The most tokens on which causes, alignments and semantics are tried."""
LOGITS = 2**25
"""The most logits that are held for semantics."""
BEYOND = 4.0
"""So many times bfloat16's own distance is no rounding of anything."""
CERTAIN = 1e-6
"""Of a token that is surer than this, in nats, rounding goes one way: its probability ends at 1."""


def judge_given(
    model: Any,
    paths: Sequence[GivenPath],
    declared: str | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] = lambda said: None,
) -> Verdict:
    """Judges log-probs that another engine gave of a model.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it.
        paths: What the engine gave, of :func:`kvinterp.recording.readers.read_given`.
        declared: The dtype that the engine was said to compute in; what the file says unless given, or none.
        allow: Words that shall not fail.
        seed: Seeds the resampling.
        tell: Told what is done next.

    Returns:
        The verdict; its ``given`` has the distances, what was tried, and the statistics of reinforcement learning, its ``tokens``
        both sides' log-probs.

    Raises:
        InputError: A text cannot be one of this model's.
    """
    adapter = wrap(model)
    check_seed(seed)
    check_callable("tell", tell)
    allow = allowed(allow)
    check_paths(adapter, paths)
    with adapter.one_call(), torch.no_grad():
        return _Judge(adapter, paths, _declared(paths, declared), seed, tell).verdict(allow)


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
    if isinstance(file, Trace):
        return judge_given(adapter, [path_of_trace(file)], declared, allow, seed, tell)
    return judge_given(adapter, read_paths(adapter, file, format), declared, allow, seed, tell)


def _declared(paths: Sequence[GivenPath], declared: str | None) -> str | None:
    if declared is None:
        said = sorted({str(path.declared["dtype"]).removeprefix("torch.") for path in paths if "dtype" in path.declared})
        if len(said) > 1:
            raise InputError(f"the sequences declare {listed(said)}: expected one dtype; give it, or judge them apart.")
        declared = said[0] if said else None
    if declared not in (None, "float64", *(rung.name for rung in RUNGS)):
        raise InputError(f"dtype={declared!r} was declared: expected float64, float32, float16 or bfloat16; leave it out.")
    return "float32" if declared == "float64" else declared


@dataclasses.dataclass
class _Judge:
    adapter: Adapter
    paths: Sequence[GivenPath]
    declared: str | None
    seed: int
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self.found: dict[str, Any] = {"declared": self.declared or "not given", "rungs": [], "tried": []}
        self.begins: int | None = None
        self.rows: list[np.ndarray] = []

    def verdict(self, allow: Sequence[str]) -> Verdict:
        word, why = self._judged()
        self.found["begins"] = self.begins
        passes = word in GOOD or word in allow
        if not passes and word != CANNOT_TELL:
            # In a report of tests the distance is what failed.
            self.checks = [
                dataclasses.replace(check, status="failed") if check.name == "rung" and check.status != "passed" else check
                for check in self.checks
            ]
        code = "PASS" if passes else "CANNOT TELL" if word == CANNOT_TELL else "FAIL"
        about = provenance(self.adapter)
        name, dtype = self.adapter.facts.name, self.declared or "no dtype"
        head = f"{code}  {word}  another engine's log-probs against {name}, declared {dtype}"
        lines = [f"{check.name}: {check.detail}" for check in self.checks]
        return Verdict(
            word, None, self.begins if word not in GOOD else None, "", "", {}, tuple(self.checks), (),
            "\n".join([head, f"  {why}", *(f"  {line}" for line in lines)]), "yes" if word in allow else "no",
            {**about, "dtype": self.declared or "not given"}, given=self.found,
            tokens=token_table(self.adapter, self.paths, self.rows) if self.rows else None,
        )  # fmt: skip

    def _judged(self) -> tuple[str, str]:
        self.tokens = Tokens.of(self.paths) if self.paths else None
        if (why := self._readable()) is not None:
            return CANNOT_TELL, why
        self._computed()
        self._statistics()
        for step in (self._alignment, self._semantics):
            if (named := step()) is not None:
                return named
        stands, near = self._rung()
        self._shape(near)
        return self._cause(stands, near)

    def _say(self, name: str, status: str, detail: str, error: float | None = None) -> None:
        self.checks.append(Check(name, status, detail, error))

    # (a) ------------------------------------------------------------------------------------------------------------------

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
        trainers = [path.trainer for path in self.paths if path.trainer is not None]
        why = positive(engine) or (positive(np.concatenate(trainers)) if trainers else None)
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

    def _computed(self) -> None:
        """Our own distances: of all tokens in each precision, and what is kept for the steps behind."""
        assert self.tokens is not None
        rows, self.logits = self.rows, []
        self.first = self.tokens.some(TRIED)
        self.kept = self.first & self.tokens.some(max(64, LOGITS // self.adapter.facts.vocabulary))
        for number, path in enumerate(self.paths):
            self.tell(f"float64, sequence {number + 1} of {len(self.paths)}")
            every = self._rows(path, Way("float64"))
            assert every is not None
            rows.append(chosen_of(every, path.ids))
            at = self.tokens.position[self.kept & (self.tokens.sequence == number)]
            if len(at):
                self.logits.append(every[torch.from_numpy(at - 1).to(every.device)].cpu())
        self.truth = self.tokens.gathered(rows)
        if not np.isfinite(self.truth).all():
            raise InputError(f"{self.adapter.facts.name} gives NaN or Inf in float64 on these tokens: give another model.")
        self.ids = np.array([self.paths[s].ids[p] for s, p in zip(self.tokens.sequence, self.tokens.position, strict=True)])
        self.ours, self.alike, self.bands = {}, {}, {}
        seen = self.tokens.engine - self.truth
        for rung in RUNGS:
            self.tell(rung.name)
            if (gap := self._of(rung)) is not None and np.isfinite(gap).all():
                # What was written coarsely is no further from float64 than ours written so.
                ours = gap if self.written is None else self.written[1](gap)
                self.ours[rung.name] = np.abs(ours - self.truth)
                coarse = (ours != gap).any() and np.abs(ours - gap).mean() > np.abs(gap - self.truth).mean()
                self.bands[rung.name] = "" if coarse else rung.name
                # Two engines in one precision round the same weights, and often more, alike.
                effects = [gap, self._some(WEIGHTS[rung.name])] if rung.name in WEIGHTS else [gap]
                there = [(row - self.truth, np.isfinite(row)) for row in effects if np.isfinite(row).any()]
                self.alike[rung.name] = max(steps.alike(seen[ok], row[ok]) for row, ok in there)
        self.gap = np.abs(self.tokens.engine - self.truth)

    def _rows(self, path: GivenPath, way: Way) -> Any:
        return log_probs(self.adapter, path.ids, len(path.prompt), way)

    def _of(self, way: Way, some: bool = False) -> np.ndarray | None:
        """``[token]`` along one of our ways; of the first tokens alone with ``some``."""
        assert self.tokens is not None
        numbers = set(self.tokens.sequence[self.first].tolist()) if some else set(range(len(self.paths)))
        if way.path and not self.adapter.attention_only:
            return None
        found: list[np.ndarray | None] = []
        for number, path in enumerate(self.paths):
            try:
                rows = self._rows(path, way) if number in numbers else None
            except (InputError, UnsupportedError):
                # This model cannot be run so: heads too narrow for a policy's blocks, say.
                return None
            if rows is None and number in numbers:
                return None
            found.append(None if rows is None else chosen_of(rows, path.ids))
        return self.tokens.gathered(found)

    # (b), (c) -------------------------------------------------------------------------------------------------------------

    def _alignment(self) -> tuple[str, str] | None:
        tokens = self.tokens
        assert tokens is not None
        whole: list[np.ndarray | None] = [np.full(len(path.ids), np.nan) for path in self.paths]
        for s, p, value in zip(tokens.sequence, tokens.position, self.truth, strict=True):
            whole[s][p] = value  # type: ignore[index]
        others = {f"shifted by {by:+d}": tokens.gathered(whole, by) for by in (1, -1)}
        coarse = self.ours.get("bfloat16")
        if coarse is None or self.gap.mean() > 1.5 * coarse.mean():
            others |= self._beginnings()
        name, left = steps.winner(tokens, self.truth, others, WINS)
        n = f"n = {int(tokens.held.sum()):,} held-out tokens"
        if not name:
            self._say("alignment", "passed", f"as given; {', '.join(others)} fit no better ({n}).")
            return None
        why = f"the log-probs are {name}: that leaves {left:.2g} of the mean difference ({n})."
        self._say("alignment", "failed", why, left)
        return "misaligned", why

    def _beginnings(self) -> dict[str, np.ndarray]:
        """What the engine would give with another beginning."""
        assert self.tokens is not None
        bos = getattr(self.adapter.tokenizer, "bos_token_id", None)
        cut: list[np.ndarray | None] = []
        put: list[np.ndarray | None] = []
        numbers = set(self.tokens.sequence[self.first].tolist())
        for number, path in enumerate(self.paths):
            if number not in numbers or len(path.ids) < 3:
                cut.append(None)
                put.append(None)
                continue
            rows = log_probs(self.adapter, path.ids[1:], 0, Way("float64"))
            assert rows is not None
            cut.append(np.concatenate([[np.nan], chosen_of(rows, path.ids[1:])]))
            longer = None if bos is None else (bos, *path.ids)
            fits = longer is not None and path.ids[0] != bos and len(longer) <= self.adapter.facts.context
            rows = log_probs(self.adapter, longer, 0, Way("float64")) if fits and longer is not None else None
            put.append(None if rows is None or longer is None else chosen_of(rows, longer)[1:])
        found = {"computed without the first token (BOS)": cut}
        if any(row is not None for row in put):
            found["computed with a BOS in front"] = put
        return {name: self.tokens.gathered(rows) for name, rows in found.items()}

    def _semantics(self) -> tuple[str, str] | None:
        tokens = self.tokens
        assert tokens is not None
        logits, first = torch.cat(self.logits), self.kept
        engine, held, ids = tokens.engine[first], tokens.held[first], self.ids[first]
        unsure = self.truth < -CERTAIN
        share, chance = steps.one_sided((tokens.engine - self.truth)[unsure])
        n = f"n = {len(tokens.engine):,}"
        sided = (
            f"the engine is above ours at {share:.0%} of the tokens (sign test p = {chance:.1g}, n = {int(unsure.sum()):,})"
        )
        coarse = self.ours.get("float16", self.ours["float32"]).mean()
        if self.gap[first].mean() > coarse and (held.all() or not held.any()):
            self._say("semantics", "cannot tell", f"not tried: of {len(engine):,} tokens none can be held out; {sided}.")
            return None
        if self.gap[first].mean() > coarse:
            warm, left = steps.temperature(engine, logits, ids, held)
            cut = {name: self.truth[first] + effect for name, effect in steps.truncations(logits).items()}
            some = dataclasses.replace(tokens, engine=engine, held=held)
            name, kept = (
                steps.winner(some, self.truth[first], cut, REPRODUCES) if share > 0.8 and chance < 1e-6 else ("", 1.0)
            )
            bases = {f"in base {base}": self.truth / np.log(base) for base in (2, 10)}
            base, rest = steps.winner(tokens, self.truth, bases, WINS)
            if base and rest < left:
                why = (
                    f"the log-probs are {base}, not in nats: that leaves {rest:.2g} of the mean difference held out ({n})."
                )
                self._say("semantics", "failed", why, rest)
                return "processed", why
            # A temperature leaves the engine's own rounding; what bends logits otherwise, a soft cap say, leaves more.
            rounding = self.ours.get(self.declared or "bfloat16", coarse).mean() / max(float(self.gap.mean()), 1e-30)
            if left < min(WINS, 0.15 + 1.4 * rounding) and left < kept and abs(warm - 1) > 0.003:
                why = f"the log-probs are after temperature {warm:.3g}: that leaves {left:.2g} of the difference held out ({n})."
                self._say("semantics", "failed", why, left)
                return "processed", why
            if name:
                why = f"the log-probs are after {name}: that leaves {kept:.2g} of the mean difference held out; {sided}."
                self._say("semantics", "failed", why, kept)
                return "processed", why
        self._say("semantics", "passed", f"no temperature and no truncation; {sided}. Penalties cannot be told.")
        return None

    # (d), (e), (f) --------------------------------------------------------------------------------------------------------

    def _rung(self) -> tuple[str | None, str]:
        """The finest precision in whose band the engine lies, and the one that the rest is said of."""
        tokens, stands = self.tokens, None
        assert tokens is not None
        for name, ours in self.ours.items():
            found = steps.ratio(tokens, self.gap, ours, self.seed)
            fine = name == self.declared or (self.declared is None and name == "float32")
            finer = self.declared in self.ours and list(self.ours).index(name) < list(self.ours).index(self.declared)
            # What was not declared is stood on only where its differences go with ours, and a coarser precision than the declared
            # one only at its own distance; a cache has to be reproduced then.
            alike = self.alike[name] > steps.ALIKE
            coarser = alike and (self.declared is None or ("cache" not in name and 0.6 < found["mean"] < 1.5))
            lies = steps.within(self.bands[name], found) and (fine or finer or coarser)
            self.found["rungs"].append(
                {
                    "precision": name,
                    **found,
                    "rank_correlation_at_least": self.alike[name],
                    "lies_in_its_band": "yes" if lies else "no",
                }
            )
            stands = name if lies and stands is None else stands
        table = {row["precision"]: row for row in self.found["rungs"]}
        near = self.declared if self.declared is not None and self.declared in table else stands or list(table)[-1]
        row = table[near]
        self.found |= {"beside": near, "our_mean_distance": float(self.ours[near].mean())}
        close = min(table, key=lambda name: abs(np.log(max(table[name]["mean"], 1e-30))))
        where = stands or f"none of ours, nearest to {close}"
        said = (
            f"{row['mean']:.3g} times our own mean distance to float64 in {near} ({row['low']:.3g} to {row['high']:.3g}), "
            f"{row['max']:.3g} times the max; stands on {where} (n = {len(tokens.engine):,})."
        )
        self._say("rung", "passed" if stands else "cannot tell", said, row["mean"])
        return stands, near

    def _shape(self, near: str) -> None:
        assert self.tokens is not None
        said, self.begins = steps.shape(self.tokens, self.gap, self.ours.get(self.declared or near, self.ours[near]))
        self._say("shape", "passed", f"the difference lies {said}: a suspicion, no cause (n = {len(self.gap):,}).")

    def _cause(self, stands: str | None, near: str) -> tuple[str, str]:
        tokens, row = self.tokens, next(r for r in self.found["rungs"] if r["precision"] == near)
        assert tokens is not None
        order = list(self.ours)
        serves = stands is not None and (self.declared is None or order.index(stands) <= order.index(near))
        n = f"n = {len(tokens.engine):,}"
        band = self.bands[near]
        mean, most = steps.smallest(band, self.ours[near])
        least = f"a mean difference of {mean:.2g} nats, or {most:.2g} at one token, would have shown ({n} in {near})"
        self.found |= {"smallest_mean_difference_that_shows": mean, "smallest_at_one_token_that_shows": most}
        if serves and row["mean"] <= (4.0 if band == "float32" else 1.25):
            self._say("substitution", "not run", f"rounding in {near} is as large as what there is; {least}.")
            word = "equal" if not self.gap.any() else "rounding"
            return word, f"{VERDICTS[word] if word == 'equal' else 'no more than rounding in ' + str(stands)}; {least}."
        name, left, by = self._substituted(near)
        if name is not None:
            why = f"{name.name} reproduces it token by token: {left:.2g} of it is left held out, slope {by:.2f} ({n})."
            self._say("substitution", "passed" if name.word in GOOD else "failed", why, left)
            self.found["named"] = name.name
            return name.word, why
        tried = f"none of {len(self.found['tried'])} causes of ours reproduces it held out"
        held = int((self.first & tokens.held).sum())
        self._say("substitution", "cannot tell", f"{tried} (n = {held:,} held-out tokens).")
        if serves:
            return "rounding", f"no more than rounding in {stands}; {tried}; {least}."
        if stands is not None:
            return "wrong-dtype", f"declared {self.declared}, stands on {stands}; {tried}."
        last = self.found["rungs"][-1]
        # In 32 bits a difference of 16 bits' size is no rounding either; which cause it has is not said.
        beyond = row if band == "float32" and row["low"] > 4 * steps.BANDS["float32"][0] else last
        how = "with a plain cache, once cold and once warm"
        how = how if self.declared == "float32" else f"in float32 {how}"
        after = f"Next: see that both have the same checkpoint; then the engine {how}."
        if beyond["low"] > BEYOND:
            said = f"{beyond['mean']:.3g} times our own distance in {beyond['precision']}, which no rounding is"
            return "unexplained", f"{said}; {tried}. {after}"
        # Nor is one token's, but for another expert that a router chose.
        if (
            band == self.declared == "float32"
            and row["max"] > 4 * steps.BANDS["float32"][1]
            and not any(self.adapter.supports("router", layer) for layer in range(self.adapter.facts.layers))
        ):
            said = f"at one token {row['max']:.3g} times our largest distance in float32, which no rounding is"
            return "unexplained", f"{said}; {tried}. {after}"
        after = after if self.declared else "Next: say with --dtype what the engine computes in, or run it in float32."
        return CANNOT_TELL, f"more than rounding in {near}, and {tried}; {least}. {after}"

    def _substituted(self, near: str) -> tuple[Way | None, float, float]:
        assert self.tokens is not None
        rows, ways = {}, {way.name: way for way in candidates()}
        for way in ways.values():
            self.tell(way.name)
            found = self._of(way, some=True)
            if found is not None and np.isfinite(found[self.first]).all() and (found - self.truth)[self.first].any():
                rows[way.name] = np.where(self.first, found, np.nan)
        seen = self.tokens.engine - self.truth
        if {FLASH_ROW, FLOAT16} <= rows.keys():
            # Of a request a position: a prompt of 64 rows on is computed in tiles, which are added up in float32.
            rows[FLASH] = np.where(self.tokens.position < 64, rows[FLASH_ROW], rows[FLOAT16])
            ways[FLASH] = dataclasses.replace(ways[FLASH_ROW], name=FLASH)
        for name, row in rows.items():
            ok = np.isfinite(row)
            left = steps.mean_gap(self.tokens.engine, row, ok) / max(float(self.gap[ok].mean()), 1e-30)
            by = steps.slope(row - self.truth, seen)
            self.found["tried"].append({"cause": name, "left": left, "slope": by, "n": int(ok.sum())})
        name, left = steps.winner(self.tokens, self.truth, rows, 0.9)
        if not name:
            return None, left, 0.0
        share = self._left_by(ways[name], rows[name], near)
        if ways[name].family is not None and left > share / 2:
            way = self._sized(ways[name])
            ways[way.name], rows = way, {way.name: self._some(way)}
            name, left = steps.winner(self.tokens, self.truth, rows, share)
        by = steps.slope(rows[name] - self.truth, seen) if name else 0.0
        return (ways[name] if name and left < share and 0.75 < by < 1.33 else None), left, by

    def _left_by(self, way: Way, exact: np.ndarray, near: str) -> float:
        """What a cause that is right may leave: the engine's own rounding, and what the cause itself makes of rounding.

        A rounding that moves a code of a quantised cache moves it by a whole step: where the cause is such a cache, it is run in
        the engine's precision too, and how far it then comes from itself is how far an engine that has it may come.
        """
        gap = max(float(self.gap.mean()), 1e-30)
        rounding = float(self.ours[near].mean()) / gap
        dtype = next(rung.dtype for rung in RUNGS if rung.name == near)
        if way.word in ("policy", "kernel") and way.change is not None and dtype != "float32":
            moved = np.abs(self._some(dataclasses.replace(way, dtype=dtype)) - exact)
            if np.isfinite(moved).any():
                rounding = max(rounding, float(np.nanmean(moved)) / gap)
        # Of the same roundings to float16 made in another order there is left what such a cache has anyway.
        half = self.ours.get("float32 with a float16 cache") if "float16" in way.name else None
        if half is not None:
            return max(min(REPRODUCES, 0.15 + 1.4 * rounding), min(WINS, 1.25 * float(half.mean()) / gap))
        return min(REPRODUCES, 0.15 + 1.4 * rounding)

    def _some(self, way: Way) -> np.ndarray:
        found = self._of(way, some=True)
        return np.where(self.first, np.nan if found is None else found, np.nan)

    def _sized(self, way: Way) -> Way:
        """The same cause of the size that is nearest to the engine, on the positions that are not held out."""
        tokens, family = self.tokens, way.family
        assert tokens is not None
        assert family is not None

        def loss(size: float) -> float:
            self.tell(family(float(np.exp(size))).name)
            return steps.mean_gap(tokens.engine, self._some(family(float(np.exp(size)))), ~tokens.held)

        at, reach = np.log(way.size), 0.8 * abs(np.log(way.size))
        found = scipy.optimize.minimize_scalar(
            loss, bounds=(at - reach, at + reach), method="bounded", options={"maxiter": 12}
        )
        return family(float(np.exp(found.x)))

    # Statistics of others -------------------------------------------------------------------------------------------------

    def _statistics(self) -> None:
        """Trainer against rollout: the file's own trainer where it has one, or our float64."""
        tokens = self.tokens
        assert tokens is not None
        sides = [path.trainer for path in self.paths]
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
