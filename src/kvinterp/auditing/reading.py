"""The evidence of all precisions read into one word, its location and its sentences: each sentence
stands where it is true.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from kvinterp.auditing.accounting import MARGIN, Account
from kvinterp.auditing.checks import BEYOND, NOT_RUN, UNCLEAR, Check
from kvinterp.auditing.first_difference import Location
from kvinterp.auditing.hints import likely_cause, overflow_remedy
from kvinterp.auditing.judging import Judged
from kvinterp.auditing.ladder import ONE_BY_ONE, PrecisionRun, band, part_named
from kvinterp.auditing.own_dtype import Distance
from kvinterp.auditing.programs.outcome import PLAIN, REFUSED, RIGHT, WRONG
from kvinterp.auditing.programs.reach import Reach
from kvinterp.auditing.values import narrower
from kvinterp.auditing.verdict import CANNOT_TELL, GOOD, NOT_THE_CACHE, Verdict
from kvinterp.common.numbers import listed
from kvinterp.models.cached_rows import NOT_READ, Unread
from kvinterp.paths.prompt import PromptDifference

NOWHERE: Location = (None, None, "", "")
"""The location of what has none."""

IN_PYTHON = "In plain Python, run here before it was shown:"
"""What stands before the lines of a program."""

Reading = tuple[str, Location, list[str]]
"""The word, the location and the lines that say why."""


@dataclasses.dataclass
class Evidence:
    """What an audit saw, before anyone says what it means.

    Attributes:
        who: The model's name, kind and precision, or what anybody's own functions are called.
        own: Name of the rung in the model's own precision.
        terms: The longest sum in the model.
        rungs: What each rung showed, by name.
        judged: The blocks that differed, each with what takes the difference away, by rung.
        accounts: Whether the parts account for the whole, by rung.
        checks: What else was exercised.
        distances: How far the programs that were asked for move logits in the model's own dtype.
        grid_module: The module from which on everything lies on a 16-bit grid, if the logits do.
        refused: The rungs that torch cannot run this model in, and why.
        exercised: The lengths and positions that were run, in a sentence.
        random: The largest relative difference of the same forward run twice.
        unread: The first block whose attention does not read the cache.
        prompt: How far a prompt itself is apart with and without a cache, where that is no
            rounding.
        seconds: What took how long, as :class:`Verdict` has it.
        allow: The words that do not fail.
        notes: What a reader should know beside the verdict.
        about: Provenance.
    """

    who: str
    own: str
    terms: int
    rungs: dict[str, PrecisionRun] = dataclasses.field(default_factory=dict)
    judged: dict[str, list[Judged]] = dataclasses.field(default_factory=dict)
    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)
    checks: list[Check] = dataclasses.field(default_factory=list)
    distances: list[Distance] = dataclasses.field(default_factory=list)
    grid_module: str = ""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    exercised: str = ""
    random: float = 0.0
    unread: Unread | None = None
    prompt: PromptDifference | None = None
    seconds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    allow: tuple[str, ...] = ()
    notes: list[str] = dataclasses.field(default_factory=list)
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def caused(self, word: str) -> list[tuple[str, Judged]]:
        """The blocks whose difference this takes away (nothing, where the word is empty), each with
        its rung.
        """
        return [
            (name, j)
            for name, judged in self.judged.items()
            for j in judged
            if j.cause.word == word
        ]

    def first(self, name: str) -> Judged | None:
        """What a rung is shown by: the first that nothing takes away, else the first."""
        judged = self.judged.get(name, [])
        return next((j for j in judged if not j.cause.word), judged[0] if judged else None)

    def _part(self, layer: int) -> str:
        numbers = [
            int(run.every_error["layer"].max())
            for run in self.rungs.values()
            if len(run.every_error)
        ]
        return part_named(layer, head=max(numbers, default=None))

    # What it says ---------------------------------------------------------------------------------

    def judge(self, allow: tuple[str, ...] = ()) -> Verdict:
        """Says what the evidence means, where some words do not fail."""
        self.allow = allow
        self.notes = [
            f"in {name} the model as it is cannot be run ({why})"
            for name, why in self.refused.items()
        ]
        asked = (
            self._overflow,
            self._wrong_dtype,
            self._unread,
            self._bug,
            self._failed,
            self._hidden_cast,
            self._unexplained,
        )
        others = (self._unknown, self._random, self._not_judged, self._benign)
        # Without a rung the model crashed, which its checks say.
        readings = (
            ask() for ask in ((*asked, *others) if self.rungs else (self._unread, self._failed))
        )
        word, location, lines = next(found for found in readings if found is not None)
        if self.prompt is not None and not self.random:
            lines = [self.prompt.said, *lines]
            # What is left of the difference once a cause of it was taken away is no excuse for the
            # rest.
            word = "bug" if word in (*GOOD, CANNOT_TELL) else word
        return self._verdict(self._asked(word), location, lines)

    def _asked(self, word: str) -> str:
        """The word, where whoever asked for a use by name has a wrong answer although the cache
        adds nothing to it.
        """
        return NOT_THE_CACHE if word in GOOD and self._symptoms() else word

    def _verdict(self, word: str, location: Location, lines: list[str]) -> Verdict:
        allowed = "yes" if word in self.allow else "no"
        tried = sum(check.status in (RIGHT, WRONG, PLAIN) for check in self.checks)
        uses = (
            f"{tried} of {len(self.checks)} uses tried"
            if self.checks
            else "decoding token by token alone"
        )
        if off := sum(check.status == PLAIN for check in self.checks):
            uses += f", {off} {PLAIN}"
        first = (
            "PASS"
            if word in GOOD or allowed == "yes"
            else "CANNOT TELL"
            if word == CANNOT_TELL
            else "FAIL"
        )
        reach = functools.reduce(Reach.beside, (check.reach for check in self.checks), Reach())
        uses += f", {reach}" if str(reach) else ""
        first += f"  {word}{' (allowed)' if allowed == 'yes' else ''}  {self.who}, {uses}"
        figures = [distance.said for distance in self.distances]
        shown = [
            first,
            *self._symptoms(),
            *lines,
            *figures,
            *_exercised(self),
            *(f"note: {note}" for note in self.notes),
        ]
        checks, notes, seconds = tuple(self.checks), tuple(self.notes), tuple(self.seconds)
        evidence, text = self._evidence(), "\n".join(shown)
        return Verdict(
            word,
            *location,
            evidence,
            checks,
            notes,
            text,
            allowed,
            self.about,
            seconds,
            reach=reach,
            distances=tuple(self.distances),
        )

    def _symptoms(self) -> list[str]:
        """What was asked for and is off without a cache too: whoever asked has a wrong answer,
        whatever the cache does.
        """
        names = {one.program: f", asked for as {one.name}" for one in self.distances if one.name}
        return [
            f"not the cache: {check.name} changes the answer with and without one: {check.detail.rstrip('.')}, in the program "
            f"{check.program}{names.get(check.asked, '')}; what follows is said of the cache alone."
            for check in self.checks
            if check.status == PLAIN and check.asked
        ]

    def _evidence(self) -> dict[str, dict[str, Any]]:
        evidence = {name: run.summary() for name, run in self.rungs.items()}
        for name, run in self.rungs.items():
            if (first := self.first(name)) is not None:
                finding, cause = first.finding, first.cause
                evidence[name]["first_tensor"] = {
                    **dataclasses.asdict(finding),
                    "error_in_unit_roundoffs": finding.error / run.unit,
                    "band": band(run.dtype, self.terms),
                    "taken_away_by": cause.word,
                    "cast_to": cause.dtype,
                    "left": cause.left,
                    "detail": cause.detail,
                }
            if name in self.accounts:
                evidence[name]["parts_account_for_the_whole"] = dataclasses.asdict(
                    self.accounts[name]
                )
        return evidence

    # What fails -----------------------------------------------------------------------------------

    def _overflow(self) -> Reading | None:
        own = self.rungs[self.own]
        others = ", ".join(r.name for r in self.rungs.values() if r.nonfinite and r is not own)
        if not own.nonfinite:
            self.notes += [f"in {others} it overflows"] if others else []
            return None
        where = own.nonfinite
        location = (where.get("layer"), where["position"], where["value"], where["module"])
        return "overflow", location, [_first_nonfinite(own, others), overflow_remedy(own)]

    def _wrong_dtype(self) -> Reading | None:
        rungs = [self.rungs[name] for name in (self.own, "float32") if name in self.rungs]
        on_grid = next((rung for rung in rungs if rung.grid and rung.unit < 1e-5), None)
        if on_grid is None:
            return None
        line = (
            f"Every logit is exactly a {on_grid.grid} number though the model is in {on_grid.name}: from module "
            f"{self.grid_module or 'unknown'} on, values were rounded to 16 bits."
        )
        return "wrong-dtype", (None, None, "logits", self.grid_module), [line]

    def _unread(self) -> Reading | None:
        """A cache that is not read is the cause of all that differs in a decode step: positions and
        masks go by it too.
        """
        if (unread := self.unread) is None:
            return None
        line = f"{NOT_READ[0].upper()}{NOT_READ[1:]} ({unread.where})."
        return "bug", (unread.layer, unread.rows, "K", unread.module), [line, *self._said_of_uses()]

    def _bug(self) -> Reading | None:
        """What nothing takes away: in the first layer that any rung saw, as the finest rung sees
        it.

        The finest sees the smallest errors; and of its tensor the first position, which only the
        rung with the long decode may know.
        """
        every = self.caused("")
        if not every:
            return None
        first = min(j.finding.layer for _, j in every)
        here = [(n, j) for n, j in every if j.finding.layer == first]
        _, judged = min(
            here, key=lambda case: (case[1].fed != ONE_BY_ONE, self.rungs[case[0]].unit)
        )
        same = [j for _, j in here if j.finding.tensor == judged.finding.tensor]
        judged = min(same, key=lambda j: (j.fed != ONE_BY_ONE, j.finding.position))
        finding, sizes = judged.finding, dict[str, float]()
        for name, j in every:
            sizes[name] = max(sizes.get(name, 0.0), j.finding.error)
        at = f"in {judged.fed}, in the row of position" if judged.fed != ONE_BY_ONE else "at step"
        at, prompt, wrong = f"{at} {finding.step}", self.prompt, "is wrong"
        uncached = prompt is not None and "without a cache" in (prompt.off, prompt.alone)
        if prompt is not None and uncached:
            wrong = (
                "without a cache is wrong"
                if prompt.off
                else "is another without a cache than with one"
            )
        sentence = f"Given equal inputs, {_location(judged)} {wrong} from position {finding.position} on (seen {at}): "
        sentence += _sizes(sizes)
        # What was tried and what is likely hold the cached step against the forward without a
        # cache.
        said_of = (
            [f"{sentence}."]
            if uncached
            else [
                f"{sentence}. {_tried(judged)}",
                *likely_cause(judged, self.rungs[self.own], self.checks),
            ]
        )
        return "bug", finding.location, [*said_of, *self._said_of_uses()]

    @property
    def _failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == WRONG]

    def _failed(self) -> Reading | None:
        if not self._failures:
            return None
        # Texts packed in one row have no cache to follow: a place comes from the first use that has
        # one.
        first = next(
            (check for check in self._failures if check.layer is not None), self._failures[0]
        )
        return (
            "bug",
            (first.layer, first.step, first.tensor or first.name, first.module),
            self._said_of_uses(),
        )

    def _said_of_uses(self) -> list[str]:
        """What the uses that are wrong showed, and the first program that shows it in plain
        Python.
        """
        lines = next((check.lines for check in self._failures if check.lines), "").splitlines()
        shown = [IN_PYTHON, *(f"    {line}" for line in lines)] if lines else []
        return [check.failure for check in self._failures] + shown

    def _hidden_cast(self) -> Reading | None:
        """A cast that matters in the precision that serves; those that only matter above it become
        notes.
        """
        fail: list[tuple[str, Judged]] = []
        note: dict[tuple[str, str], dict[str, None]] = {}
        for name, judged in self.caused("cast"):
            dtype = getattr(torch, judged.cause.dtype)
            if narrower(dtype, getattr(torch, self.own)):
                fail.append((name, judged))
            elif narrower(dtype, self.rungs[name].dtype):
                note.setdefault((judged.cause.dtype, name), {})[
                    judged.cause.module or "the blocks"
                ] = None
        if not fail or "hidden-cast" in self.allow:
            for (to, name), modules in note.items():
                more = f" and {len(modules) - 2} more" if len(modules) > 2 else ""
                self.notes.append(
                    f"{to} inside ({', '.join([*modules][:2])}{more}): no better than {to} in {name}"
                )
        if not fail:
            return None
        name, judged = fail[0]
        finding, cause = judged.finding, judged.cause
        line = (
            f"In {name}, given equal inputs, {_location(judged)} is off by {finding.error:.2g} {OF_ROW}, "
            f"{finding.error / self.rungs[name].unit:.2g} unit roundoffs; {cause.module or 'the block'} casts to "
            f"{cause.dtype}, and without that cast "
        ) + ("nothing differs." if cause.left == 0 else f"{cause.left:.2g} is left.")
        return "hidden-cast", (*finding.location[:3], cause.module), [line]

    def _unexplained(self) -> Reading | None:
        name, short = next(((n, a) for n, a in self.accounts.items() if not a.holds), ("", None))
        if short is None or short.layer is None:
            return None
        parts = f"errors of the parts' sizes change them by at most {short.explained:.1e} ({MARGIN:.0f} times what was simulated)"
        if short.explained == 0:
            parts = "given equal inputs no part differs by a bit"
        line = (
            f"In {name} ({short.kernels}) the logits differ by {short.found:.1e} relative, but {parts}: something between the "
            f"parts is wrong, first seen in the output of {self._part(short.layer)} at position {short.position}."
        )
        return "unexplained", (short.layer, short.position, "logits", ""), [line]

    # What cannot be told --------------------------------------------------------------------------

    def _unknown(self) -> Reading | None:
        judged = next((j for name, j in self.caused("unknown") if name == self.own), None)
        if judged is None:
            return None
        line = (
            f"In {self.own}, given equal inputs, {_location(judged)} differs by {judged.finding.error:.2g} {OF_ROW}; whether "
            f"that is rounding could not be tried: {judged.cause.detail}."
        )
        return CANNOT_TELL, judged.finding.location, [line]

    def _random(self) -> Reading | None:
        line = (
            f"The same forward run twice differs by {self.random:.1e} relative: the model computes something else each "
            "time (dropout, sampling or noise inside), so its cached path has nothing to be compared with."
        )
        return (CANNOT_TELL, NOWHERE, [line]) if self.random else None

    def _not_judged(self) -> Reading | None:
        """Errors of the finest precision that are larger than it rounds and that nothing was found
        to take away: no PASS.
        """
        name, run = min(self.rungs.items(), key=lambda rung: rung[1].unit)
        taken = {
            j.finding.layer
            for j in self.judged.get(name, [])
            if j.cause.word not in ("order", "rounding")
        }
        side = run if run.fixed is None else run.fixed
        errors = side.every_error[~side.every_error["layer"].isin(taken)]
        if errors.empty or errors["error"].max() <= band(run.dtype, self.terms):
            return None
        worst = errors.loc[errors["error"].idxmax()]
        layer, position = int(worst["layer"]), int(worst["position"])
        line = (
            f"In {name}, given equal inputs, {self._part(layer)} is off by {worst['error'] / run.unit:.2g} unit roundoffs at "
            f"position {position}, and nothing was shown to take that away."
        )
        return "unexplained", (layer, position, "residual sum", ""), [line]

    # What passes ----------------------------------------------------------------------------------

    def _benign(self) -> Reading:
        unfixed = dict[str, list[str]]()
        finite = [r for r in self.rungs.values() if not r.nonfinite]
        differing = [r for r in finite if r.differs]
        for rung in finite:
            if rung.unfixed:
                unfixed.setdefault(rung.unfixed, []).append(rung.name)
        self.notes += [
            f"no fixed order in {', '.join(names)}: {why}" for why, names in unfixed.items()
        ]
        if not differing:
            steps, names = sum(len(r.steps) for r in finite), ", ".join(r.name for r in finite)
            return (
                "equal",
                NOWHERE,
                [f"Every logit of all {steps} steps is bitwise the same in {names}."],
            )
        lines = [_rung(r, self) for r in finite]
        if tipped := dict.fromkeys(
            f"{name} (layer {j.finding.layer})" for name, j in self.caused("choice")
        ):
            lines.append(
                f"Rounding tips the choice between nearly equal experts in {', '.join(tipped)}; with a fixed order the same "
                "ones are chosen."
            )
        if kernels := self.caused("kernel"):
            # The rung with the long decode knows the first position; the others only the lengths
            # they were given.
            name, judged = min(
                kernels, key=lambda case: (case[1].finding.position, self.rungs[case[0]].unit)
            )
            line = (
                f"Given equal inputs, {_location(judged)} is off by {judged.finding.error:.2g} {OF_ROW} in {name}, "
                f"first at position {judged.finding.position}, and bitwise right once every sum has a fixed order: a kernel is "
                "coarse there, not the model's cache."
            )
            return "kernel", NOWHERE, [line, *lines]
        lead = "Cached decoding computes what recomputing computes; the differences are rounding."
        return "rounding", NOWHERE, [lead, *lines]


# Sentences that stand in more than one place, or have cases of their own --------------------------


OF_ROW = "of its row's largest number"
"""What the error of a tensor is relative to, as the error of logits is to the largest logit."""


def _sizes(sizes: Mapping[str, float]) -> str:
    """How large the errors of a tensor are in the precisions that were run."""
    unseen = [name for name, size in sizes.items() if size == torch.inf]
    seen = {name: size for name, size in sizes.items() if size != torch.inf}
    ends = list(dict.fromkeys(f"{end(seen.values()):.2g}" for end in (min, max))) if seen else []
    said = [f"off by {' to '.join(ends)} {OF_ROW} in {listed([*seen])}"] if seen else []
    return "; ".join(
        [*said, *[f"one side sees what the other does not in {listed(unseen)}"] * bool(unseen)]
    )


def _location(judged: Judged) -> str:
    """A finding's layer, tensor and module."""
    finding, module = judged.finding, f" ({judged.finding.module})" if judged.finding.module else ""
    return f"{finding.tensor} of {part_named(finding.layer, finding.tensor)}{module}"


def _tried(judged: Judged) -> str:
    cause = judged.cause
    if cause.detail.startswith("gone with a fixed order"):
        return f"It is {cause.detail}: the kernel's own result is wrong."
    known = {
        "fixed order": "With a fixed order of additions it is there all the same.",
        "native": "A fixed order of additions does not take it away.",
    }.get(judged.kernels, "No fixed order of additions could be run.")
    return f"{known} It is {cause.detail}." if cause.detail else known


def _first_nonfinite(own: PrecisionRun, others: str) -> str:
    """Where NaN or Inf first appears; ``others``: the other precisions in which it does."""
    where = own.nonfinite
    sentence = f"{where['value']} first appears on the {where['path']} path in {where['module'] or 'the logits'} in {own.name}"
    sentence += "" if where["position"] is None else f" at position {where['position']}"
    return f"{sentence}; also in {others}." if others else f"{sentence}."


def _rung(rung: PrecisionRun, evidence: Evidence) -> str:
    """What one precision showed: the machine's kernels, the null control, and a fixed order."""
    summary, fixed = rung.summary(), rung.fixed
    sentence = (
        f"{rung.name}: {summary['bitwise_equal_steps']} of {summary['steps']} steps are bitwise equal; the logits differ by at "
        f"most {summary['max_abs_logit'] or 0.0:.2g} (two recomputations, one among more rows, by "
        f"{summary['null_max_abs_logit'] or 0.0:.2g}), a block given equal inputs by {rung.largest_error / rung.unit:.2g} unit "
        "roundoffs"
    )
    if fixed is None:
        return f"{sentence}."
    if fixed.largest_error == 0 and not len(fixed.differing_steps):
        return (
            f"{sentence}; with a fixed order of additions all {len(fixed.every_error)} checks and {len(fixed.steps)} steps are "
            "bitwise equal."
        )
    reasons = {
        j.cause.word: None for j in evidence.judged.get(rung.name, ()) if j.kernels == "fixed order"
    }
    why = " and ".join(word for word in reasons if word in ("cast", "rounding"))
    left = f"{fixed.largest_error / rung.unit:.2g} unit roundoffs are left"
    return f"{sentence}; with a fixed order {left}{f' ({why})' if why else ''}."


def _exercised(evidence: Evidence) -> list[str]:
    """What was exercised, and what not."""
    named = {
        RIGHT: "right, each in so many programs",
        PLAIN: PLAIN,
        REFUSED: REFUSED,
        BEYOND: BEYOND,
        UNCLEAR: UNCLEAR,
        NOT_RUN: "not reached",
    }
    by_status: dict[str, list[str]] = {status: [] for status in named}
    for check in evidence.checks:
        # What is said by its sentence alone is said with it.
        more = {RIGHT: f" ({check.tried})", PLAIN: "", WRONG: ""}.get(
            check.status, f" ({check.detail.rstrip('.')})"
        )
        by_status.get(check.status, []).append(f"{check.name}{more}")
    options = ", ".join(
        sorted({check.hint for check in evidence.checks if check.hint.startswith("--")})
    )
    ends = {
        PLAIN: ": there a forward without a cache over the same columns is off, or raises, as well",
        NOT_RUN: f" ({options} goes there)" if options else "",
    }
    lines = [
        f"{named[of]}: {'; '.join(dict.fromkeys(names))}{ends.get(of, '')}"
        for of, names in by_status.items()
        if names
    ]
    return [f"exercised: {evidence.exercised}", *lines]


def of_functions(evidence: Evidence, worst: float, against: str) -> Verdict:
    """The verdict on anybody's own two functions: whether their programs are right, off by so much
    at most of ``against``.
    """
    checks = evidence.checks
    word, location, lines = evidence._failed() or ("rounding" if worst else "equal", NOWHERE, [])
    if not any(check.status in (RIGHT, WRONG) for check in checks):
        word, lines = CANNOT_TELL, ["No use could be tried."]
    evidence.exercised = (
        f"programs of the cache, each against {against}; the largest difference {worst:.2g}."
    )
    return evidence._verdict(evidence._asked(word), location, lines)
