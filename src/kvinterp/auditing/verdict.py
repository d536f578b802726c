"""The verdict: what the ladder's evidence says in the precision that serves, judged at the first tensor that is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvinterp.auditing.evidence import Evidence
from kvinterp.auditing.exercises import Check
from kvinterp.auditing.first_difference import Place
from kvinterp.auditing.judging import ONE_BY_ONE, Judged
from kvinterp.auditing.values import narrower
from kvinterp.files import strict_json
from kvinterp.reading import verdict as say

__all__ = ["CANNOT_TELL", "FAIL", "GOOD", "PASS", "VERDICTS", "Verdict", "judge"]

VERDICTS = {
    "equal": "nothing differs bitwise",
    "rounding": "every difference vanishes with its cause: the order of additions, or a cast above the precision that serves",
    "kernel": "a difference appears or jumps at a fixed position, or is larger than rounding, and is gone with a fixed order",
    "hidden-cast": "something is computed in a narrower dtype than the model's own, and the error is gone without that cast",
    "wrong-dtype": "values lie on a 16-bit grid though 32 bits or more are claimed",
    "bug": "a tensor is wrong: nothing that was taken away takes its error away",
    "unexplained": "the logits differ by more than the errors of all parts explain",
    "overflow": "NaN or Inf",
    "cannot-tell": "the checks that would tell could not be made",
}
GOOD = ("equal", "rounding", "kernel")
CANNOT_TELL = "cannot-tell"
PASS, FAIL = "PASS", "FAIL"

NOWHERE: Place = (None, None, "", "")
"""The place of what has none."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes:
        verdict: One of :data:`VERDICTS`.
        first_layer: The first block that is wrong (for rounding: that differs at all); -1 for the embedding, the number of
            blocks for the head; None where nothing differs or what failed has no layer.
        first_position: The absolute position where the tensor is first wrong, or None.
        tensor: The first tensor that differs given equal inputs: K, V, Q, recurrent state, attention mask, residual sum, a
            module, ...; or the exercise that failed.
        module: The module it belongs to.
        evidence: A dictionary a rung (see :meth:`Rung.summary`), with ``first_tensor`` (see :class:`Finding`) where one
            was looked for, what takes its error away, and whether the parts account for the whole.
        checks: What was exercised and what not, each with what it showed.
        notes: What a reader should know beside the verdict.
        reading: PASS or FAIL and the word, then short lines.
        allowed: Whether the word is one that the caller allows.
    """

    verdict: str
    first_layer: int | None
    first_position: int | None
    tensor: str
    module: str
    evidence: dict[str, dict[str, Any]]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    reading: str
    allowed: str = "no"

    @property
    def exit_code(self) -> int:
        """0 where the model passes, 1 where it fails, 3 where that cannot be told."""
        if self.verdict in GOOD or self.allowed == "yes":
            return 0
        return 3 if self.verdict == CANNOT_TELL else 1

    def to_json(self) -> str:
        """The same fields as JSON, with the exit code; infinities as text."""
        return strict_json({"exit_code": self.exit_code, **dataclasses.asdict(self)})

    def __str__(self) -> str:
        return self.reading


def judge(seen: Evidence, allow: tuple[str, ...] = ()) -> Verdict:
    """Says what the evidence means.

    Args:
        seen: The evidence.
        allow: Words that do not fail.
    """
    return _Judge(seen, allow).verdict()


class _Judge:
    def __init__(self, seen: Evidence, allow: tuple[str, ...]) -> None:
        self.seen, self.allow = seen, allow
        self.own: torch.dtype = getattr(torch, seen.own)
        self.notes: list[str] = []

    def verdict(self) -> Verdict:
        """The word, the place and the reading."""
        self.notes += say.refused(self.seen.refused)
        for ask in (
            self._overflow,
            self._wrong_dtype,
            self._bug,
            self._failed,
            self._hidden_cast,
            self._unexplained,
            self._unknown,
            self._random,
        ):
            told = ask()
            if told is not None:
                return told
        return self._benign()

    def _overflow(self) -> Verdict | None:
        own = self.seen.rungs[self.seen.own]
        others = [r.name for r in self.seen.rungs.values() if r.nonfinite and r is not own]
        if not own.nonfinite:
            self.notes += say.overflowed(others)
            return None
        where = own.nonfinite
        place = (where.get("layer"), where["position"], where["value"], where["module"])
        return self._verdict("overflow", place, say.overflow(own, others))

    def _wrong_dtype(self) -> Verdict | None:
        rungs = (self.seen.rungs.get(name) for name in (self.seen.own, "float32"))
        wide = next((r for r in rungs if r is not None and r.grid and r.unit < 1e-5), None)
        if wide is None:
            return None
        module = self.seen.grid_module
        return self._verdict("wrong-dtype", (None, None, "logits", module), [say.grid(wide, module)])

    def _bug(self) -> Verdict | None:
        """What nothing takes away: in the first layer that any rung saw, as the finest rung sees it.

        The finest sees the smallest errors; and of its tensor the first position, which only the rung with the long decode
        may know.
        """
        wrong = {name: [j for j in judged if not j.cause.word] for name, judged in self.seen.judged.items()}
        every = [(name, j) for name, judged in wrong.items() for j in judged]
        if not every:
            return None
        first = min(j.finding.layer for _, j in every)
        here = [(n, j) for n, j in every if j.finding.layer == first]
        _, judged = min(here, key=lambda case: (case[1].fed != ONE_BY_ONE, self.seen.rungs[case[0]].unit))
        same = [j for _, j in here if j.finding.tensor == judged.finding.tensor]
        judged = min(same, key=lambda j: (j.fed != ONE_BY_ONE, j.finding.position))
        sizes = {n: max(j.finding.error for j in found) for n, found in wrong.items() if found}
        seen = {n for n, judgeds in self.seen.judged.items() if n in sizes or judgeds is not None}
        lines = [say.bug(judged, sizes, self.seen, sorted(seen)), *say.hint(judged, self.seen)]
        return self._verdict("bug", judged.finding.place, [*lines, *map(say.failed, self._failures)])

    @property
    def _failures(self) -> list[Check]:
        return [check for check in self.seen.checks if check.status == "failed"]

    def _failed(self) -> Verdict | None:
        if not self._failures:
            return None
        first = self._failures[0]
        place = (first.layer, first.step, first.tensor or first.name, first.module)
        return self._verdict("bug", place, [*map(say.failed, self._failures)])

    def _hidden_cast(self) -> Verdict | None:
        casts = self._casts()
        if not casts:
            return None
        name, judged = casts[0]
        place = (*judged.finding.place[:3], judged.cause.module)
        return self._verdict("hidden-cast", place, [say.cast(name, judged, self.seen.rungs[name])])

    def _unexplained(self) -> Verdict | None:
        for name, short in self.seen.accounts.items():
            if not short.holds:
                line = say.unexplained(name, short, len(self.seen.rungs[name].worst_by_layer()) - 2)
                return self._verdict("unexplained", (short.layer, short.position, "logits", ""), [line])
        return None

    def _unknown(self) -> Verdict | None:
        name = self.seen.own
        for judged in self.seen.judged.get(name, ()):
            if judged.cause.word == "unknown":
                return self._verdict(CANNOT_TELL, judged.finding.place, [say.unknown(name, judged)])
        return None

    def _random(self) -> Verdict | None:
        size = self.seen.random
        return self._verdict(CANNOT_TELL, NOWHERE, [say.random(size)]) if size else None

    def _casts(self) -> list[tuple[str, Judged]]:
        """Casts that matter in the precision that serves; those that only matter above it become notes."""
        fail: list[tuple[str, Judged]] = []
        note: dict[tuple[str, str], list[Judged]] = {}
        for name, judged in self.seen.judged.items():
            for one in judged:
                if one.cause.word != "cast":
                    continue
                if narrower(getattr(torch, one.cause.dtype), self.own):
                    fail.append((name, one))
                elif narrower(getattr(torch, one.cause.dtype), self.seen.rungs[name].dtype):
                    note.setdefault((one.cause.dtype, name), []).append(one)
        if not fail or "hidden-cast" in self.allow:
            self.notes += [say.inside(dtype, name, found) for (dtype, name), found in note.items()]
        return fail

    def _verdict(self, word: str, place: Place, lines: list[str]) -> Verdict:
        allowed = "yes" if word in self.allow else "no"
        passes = word in GOOD or allowed == "yes"
        first = say.first_line(self.seen.model, self.seen.own, word, passes, allowed)
        tail = [*say.checks(self.seen), *(f"note: {note}" for note in self.notes)]
        text = "\n".join([first, *lines, *tail])
        checks, notes = tuple(self.seen.checks), tuple(self.notes)
        return Verdict(word, *place, self._evidence(), checks, notes, text, allowed)

    def _evidence(self) -> dict[str, dict[str, Any]]:
        evidence = {name: rung.summary() for name, rung in self.seen.rungs.items()}
        for name, rung in self.seen.rungs.items():
            first = self.seen.first(name)
            if first is not None:
                finding, cause = first
                evidence[name]["first_tensor"] = {
                    **dataclasses.asdict(finding),
                    "error_in_unit_roundoffs": finding.error / rung.unit,
                    "band": self.seen.band(name),
                    "taken_away_by": cause.word,
                    "cast_to": cause.dtype,
                    "left": cause.left,
                    "detail": cause.detail,
                }
            if name in self.seen.accounts:
                evidence[name]["parts_account_for_the_whole"] = dataclasses.asdict(self.seen.accounts[name])
        return evidence

    def _benign(self) -> Verdict:
        finite = [r for r in self.seen.rungs.values() if not r.nonfinite]
        differing = [r for r in finite if len(r.differing_steps) or r.largest_error > 0]
        self.notes += say.unfixed(finite)
        if not differing:
            return self._verdict("equal", NOWHERE, [say.equal(finite)])
        shown = self.seen.first(self.seen.own) or self.seen.first(differing[0].name)
        lines = [say.benign(r, self.seen) for r in finite] + say.choices(self.seen)
        kernels = self._kernel_lines()
        if kernels:
            place, line = kernels
            return self._verdict("kernel", place, [line, *lines])
        return self._verdict("rounding", NOWHERE if shown is None else shown[0].place, lines)

    def _kernel_lines(self) -> tuple[Place, str] | None:
        found = [(n, j) for n, judged in self.seen.judged.items() for j in judged if j.cause.word == "kernel"]
        if found:
            # The rung with the long decode knows the first position; the others only the lengths they were given.
            name, judged = min(found, key=lambda case: (case[1].finding.position, self.seen.rungs[case[0]].unit))
            return judged.finding.place, say.kernel(name, judged)
        if self.seen.onset is None:
            return None
        name, layer, position = self.seen.onset
        first = self.seen.first(name)
        here = first[0] if first is not None and first[0].layer == layer else None
        tensor_name, module = ("block output", "") if here is None else (here.tensor, here.module)
        return (layer, position, tensor_name, module), say.onset(name, layer, position, tensor_name)
