"""The verdict: what the ladder's evidence says in the precision that serves, judged at the first tensor that is wrong."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import torch

from kvinterp.auditing.accounting import Account
from kvinterp.auditing.bench import FAILED, Check
from kvinterp.auditing.first_difference import Place
from kvinterp.auditing.judging import ONE_BY_ONE, Judged
from kvinterp.auditing.ladder import PrecisionRun, band
from kvinterp.auditing.values import narrower
from kvinterp.errors import InputError
from kvinterp.files import read_sealed, strict_json
from kvinterp.inputs import check_choice
from kvinterp.kept import Held, Kept
from kvinterp.reading import verdict as say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

NOWHERE: Place = (None, None, "", "")
"""The place of what has none."""


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict(Kept):
    """What an audit found.

    Attributes:
        verdict: One of :data:`VERDICTS`.
        first_layer: The first block that is wrong (for rounding: that differs at all); -1 for the embedding, the number of
            blocks for the head; None where nothing differs or what failed has no layer.
        first_position: The absolute position where the tensor is first wrong, or None.
        tensor: The first tensor that differs given equal inputs: K, V, Q, recurrent state, attention mask, residual sum, a
            module, ...; or the exercise that failed.
        module: The module it belongs to.
        evidence: A dictionary a rung (see :meth:`PrecisionRun.summary`), with ``first_tensor`` (see :class:`Finding`) where one
            was looked for, what takes its error away, and whether the parts account for the whole.
        checks: What was exercised and what not, each with what it showed.
        notes: What a reader should know beside the verdict.
        reading: PASS or FAIL and the word, then short lines.
        allowed: Whether the word is one that the caller allows.
        provenance: Provenance.
        seconds: What took how long: a row a rung and part of it, with seconds of the clock and of the processor.
    """

    VERB: ClassVar = "audit"

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
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: tuple[Mapping[str, Any], ...] = ()

    def __repr__(self) -> str:
        """Its first line."""
        return f"<Verdict: {' '.join(self.reading.splitlines()[0].split())}>"

    @property
    def exit_code(self) -> int:
        """0 where the model passes, 1 where it fails, 3 where that cannot be told."""
        if self.verdict in GOOD or self.allowed == "yes":
            return 0
        return 3 if self.verdict == CANNOT_TELL else 1

    def to_json(self) -> str:
        """The same fields as JSON, with the exit code; infinities as text."""
        return strict_json({"exit_code": self.exit_code, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Verdict:
        """Reads the verdict.json that an audit wrote.

        Raises:
            InputError: There is none that can be read, or not the one that was written.
        """
        place = Path(folder)
        fields = _with_infinities(read_sealed(place / "verdict.json"))
        try:
            del fields["exit_code"], fields["sha256"]
            checks = tuple(Check(**check) for check in fields.pop("checks"))
            rows = {name: tuple(fields.get(name, ())) for name in ("notes", "seconds")}
            found = cls(**{**fields, **rows}, checks=checks)
            if found.verdict not in VERDICTS or not isinstance(found.provenance, dict):
                raise ValueError(f"{found.verdict!r} is no verdict")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"folder {str(place)!r} holds no readable verdict.json ({error}): it is damaged or of another version of "
                "kvinterp; make the audit again."
            ) from error
        object.__setattr__(found, "held", Held(place, {}, {}))
        return found

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """What each precision showed and what was exercised, and the fields of the JSON."""
        checks = pd.DataFrame([dataclasses.asdict(check) for check in self.checks])
        return {"rungs": self.overview(), "checks": checks, "seconds": pd.DataFrame(self.seconds)}, dataclasses.asdict(self)

    def overview(self) -> pd.DataFrame:
        """One row a precision: how far apart the logits and the blocks are."""
        names = (
            "unit_roundoff",
            "steps",
            "bitwise_equal_steps",
            "max_abs_logit",
            "max_kl",
            "block_error_in_unit_roundoffs",
        )
        return pd.DataFrame([{"rung": name, **{n: held[n] for n in names}} for name, held in self.evidence.items()])

    def save(self, folder: str | os.PathLike[str], existing: str = "overwrite") -> Path:
        """Writes verdict.json and the page; an earlier audit's are always written over (``existing``). Returns the folder."""
        from kvinterp.auditing.report import save_verdict

        check_choice("existing", existing, ("overwrite",))
        return save_verdict(self, Path(folder))

    def report(self, folder: str | os.PathLike[str] | None = None, existing: str = "overwrite") -> Path:
        """The page; the one that is there where it was read from a folder, which also shows every block.

        Args:
            folder: Where to; unless given where it is kept, or else a new folder among the system's temporary ones.
            existing: As for :meth:`save`.

        Returns:
            The page's path.
        """
        if folder is None and self.held is not None and (self.held.folder / "audit.html").is_file():
            return self.held.folder / "audit.html"
        kept = None if self.held is None else self.held.folder
        return self.save(folder or kept or tempfile.mkdtemp(prefix="kvinterp-"), existing) / "audit.html"

    def figures(self) -> dict[str, Figure]:
        """The ladder of precisions."""
        from kvinterp.auditing.report import ladder_figure

        figure = ladder_figure(self.evidence)
        return {} if figure is None else {"precision_ladder": figure}

    def sentences(self) -> list[str]:
        """The reading, line by line."""
        return [line for line in self.reading.splitlines() if line]

    def __str__(self) -> str:
        return self.reading


def _with_infinities(value: Any) -> Any:
    """What :func:`strict_json` made a text of as numbers again."""
    if isinstance(value, dict):
        return {name: _with_infinities(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_infinities(inner) for inner in value]
    return float(value) if value in ("inf", "-inf") else value


@dataclasses.dataclass
class Evidence:
    """What an audit saw, before anyone says what it means.

    Attributes:
        model: The model's name.
        own: Name of the rung in the model's own precision.
        terms: The longest sum in the model.
        rungs: What each rung showed, by name.
        judged: The blocks that differed, each with what takes the difference away, by rung.
        accounts: Whether the parts account for the whole, by rung.
        checks: What else was exercised.
        grid_module: The module from which on everything lies on a 16-bit grid, if the logits do.
        onset: The rung, layer and position at which a kernel changes its order, or None.
        refused: The rungs that torch cannot run this model in, and why.
        exercised: The lengths and positions that were run, in a sentence.
        random: The largest relative difference of the same forward run twice.
        seconds: What took how long, as :class:`Verdict` has it.
    """

    model: str
    own: str
    terms: int
    rungs: dict[str, PrecisionRun] = dataclasses.field(default_factory=dict)
    judged: dict[str, list[Judged]] = dataclasses.field(default_factory=dict)
    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)
    checks: list[Check] = dataclasses.field(default_factory=list)
    grid_module: str = ""
    onset: tuple[str, int, int] | None = None
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    exercised: str = ""
    random: float = 0.0
    seconds: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def caused(self, word: str) -> list[tuple[str, Judged]]:
        """The blocks whose difference this takes away (nothing, where the word is empty), each with its rung."""
        return [(name, j) for name, judged in self.judged.items() for j in judged if j.cause.word == word]

    def first(self, name: str) -> Judged | None:
        """What a rung is shown by: the first that nothing takes away, else the first."""
        judged = self.judged.get(name, [])
        return next((j for j in judged if not j.cause.word), judged[0] if judged else None)


Told = tuple[str, Place, list[str]]
"""The word, the place and the lines that say why."""


def judge(seen: Evidence, allow: tuple[str, ...] = ()) -> Verdict:
    """Says what the evidence means, where some words do not fail."""
    return _Judge(seen, allow).verdict()


class _Judge:
    def __init__(self, seen: Evidence, allow: tuple[str, ...]) -> None:
        self.seen, self.allow = seen, allow
        self.own: torch.dtype = getattr(torch, seen.own)
        self.notes: list[str] = []

    def verdict(self) -> Verdict:
        """The word, the place and the reading."""
        seen = self.seen
        self.notes += say.refused(seen.refused)
        asked = (self._overflow, self._wrong_dtype, self._bug, self._failed, self._hidden_cast, self._unexplained)
        told = (ask() for ask in (*asked, self._unknown, self._random, self._not_judged, self._benign))
        word, place, lines = next(found for found in told if found is not None)
        allowed = "yes" if word in self.allow else "no"
        first = say.first_line(seen, word, word in GOOD or allowed == "yes", allowed)
        text = "\n".join([first, *lines, *say.checks(seen), *(f"note: {note}" for note in self.notes)])
        return Verdict(word, *place, self._evidence(), tuple(seen.checks), tuple(self.notes), text, allowed)

    def _overflow(self) -> Told | None:
        own = self.seen.rungs[self.seen.own]
        others = [r.name for r in self.seen.rungs.values() if r.nonfinite and r is not own]
        if not own.nonfinite:
            self.notes += say.overflowed(others)
            return None
        where = own.nonfinite
        place = (where.get("layer"), where["position"], where["value"], where["module"])
        return "overflow", place, say.overflow(own, others)

    def _wrong_dtype(self) -> Told | None:
        rungs = (self.seen.rungs.get(name) for name in (self.seen.own, "float32"))
        wide = next((r for r in rungs if r is not None and r.grid and r.unit < 1e-5), None)
        if wide is None:
            return None
        module = self.seen.grid_module
        return "wrong-dtype", (None, None, "logits", module), [say.grid(wide, module)]

    def _bug(self) -> Told | None:
        """What nothing takes away: in the first layer that any rung saw, as the finest rung sees it.

        The finest sees the smallest errors; and of its tensor the first position, which only the rung with the long decode
        may know.
        """
        every = self.seen.caused("")
        if not every:
            return None
        first = min(j.finding.layer for _, j in every)
        here = [(n, j) for n, j in every if j.finding.layer == first]
        _, judged = min(here, key=lambda case: (case[1].fed != ONE_BY_ONE, self.seen.rungs[case[0]].unit))
        same = [j for _, j in here if j.finding.tensor == judged.finding.tensor]
        judged = min(same, key=lambda j: (j.fed != ONE_BY_ONE, j.finding.position))
        sizes: dict[str, float] = {}
        for name, j in every:
            sizes[name] = max(sizes.get(name, 0.0), j.finding.error)
        lines = [say.bug(judged, sizes, self.seen, sorted(self.seen.judged)), *say.hint(judged, self.seen)]
        return "bug", judged.finding.place, [*lines, *map(say.failed, self._failures)]

    @property
    def _failures(self) -> list[Check]:
        return [check for check in self.seen.checks if check.status == FAILED]

    def _failed(self) -> Told | None:
        if not self._failures:
            return None
        first = self._failures[0]
        place = (first.layer, first.step, first.tensor or first.name, first.module)
        return "bug", place, [*map(say.failed, self._failures)]

    def _not_judged(self) -> Told | None:
        """Errors of the finest precision that are larger than it rounds and that nothing was found to take away: no PASS."""
        name, run = min(self.seen.rungs.items(), key=lambda rung: rung[1].unit)
        taken = {j.finding.layer for j in self.seen.judged.get(name, []) if j.cause.word not in ("order", "rounding")}
        side = run if run.fixed is None else run.fixed
        errors = side.every_error[~side.every_error["layer"].isin(taken)]
        if errors.empty or errors["error"].max() <= band(run.dtype, self.seen.terms):
            return None
        worst = errors.loc[errors["error"].idxmax()]
        place = (int(worst["layer"]), int(worst["position"]), "residual sum", "")
        return "unexplained", place, say.not_judged(name, worst, run.unit)

    def _hidden_cast(self) -> Told | None:
        """A cast that matters in the precision that serves; those that only matter above it become notes."""
        fail: list[tuple[str, Judged]] = []
        note: dict[tuple[str, str], list[Judged]] = {}
        for name, judged in self.seen.caused("cast"):
            dtype = getattr(torch, judged.cause.dtype)
            if narrower(dtype, self.own):
                fail.append((name, judged))
            elif narrower(dtype, self.seen.rungs[name].dtype):
                note.setdefault((judged.cause.dtype, name), []).append(judged)
        if not fail or "hidden-cast" in self.allow:
            self.notes += [say.inside(dtype, name, found) for (dtype, name), found in note.items()]
        if not fail:
            return None
        name, judged = fail[0]
        place = (*judged.finding.place[:3], judged.cause.module)
        return "hidden-cast", place, [say.cast(name, judged, self.seen.rungs[name])]

    def _unexplained(self) -> Told | None:
        for name, short in self.seen.accounts.items():
            if not short.holds:
                line = say.unexplained(name, short, self.seen.rungs[name].local["layer"].nunique() - 2)
                return "unexplained", (short.layer, short.position, "logits", ""), [line]
        return None

    def _unknown(self) -> Told | None:
        name = self.seen.own
        judged = next((j for n, j in self.seen.caused("unknown") if n == name), None)
        return None if judged is None else (CANNOT_TELL, judged.finding.place, [say.unknown(name, judged)])

    def _random(self) -> Told | None:
        size = self.seen.random
        return (CANNOT_TELL, NOWHERE, [say.random(size)]) if size else None

    def _evidence(self) -> dict[str, dict[str, Any]]:
        evidence = {name: run.summary() for name, run in self.seen.rungs.items()}
        for name, run in self.seen.rungs.items():
            first = self.seen.first(name)
            if first is not None:
                finding, cause = first.finding, first.cause
                evidence[name]["first_tensor"] = {
                    **dataclasses.asdict(finding),
                    "error_in_unit_roundoffs": finding.error / run.unit,
                    "band": band(run.dtype, self.seen.terms),
                    "taken_away_by": cause.word,
                    "cast_to": cause.dtype,
                    "left": cause.left,
                    "detail": cause.detail,
                }
            if name in self.seen.accounts:
                evidence[name]["parts_account_for_the_whole"] = dataclasses.asdict(self.seen.accounts[name])
        return evidence

    def _benign(self) -> Told:
        finite = [r for r in self.seen.rungs.values() if not r.nonfinite]
        differing = [r for r in finite if len(r.differing_steps) or r.largest_error > 0]
        self.notes += say.unfixed(finite)
        if not differing:
            return "equal", NOWHERE, [say.equal(finite)]
        lines = [say.benign(r, self.seen) for r in finite] + say.choices(self.seen)
        found = self.seen.caused("kernel")
        if found:
            # The rung with the long decode knows the first position; the others only the lengths they were given.
            name, judged = min(found, key=lambda case: (case[1].finding.position, self.seen.rungs[case[0]].unit))
            return "kernel", judged.finding.place, [say.kernel(name, judged), *lines]
        if self.seen.onset is not None:
            name, layer, position = self.seen.onset
            first = self.seen.first(name)
            here = first.finding if first is not None and first.finding.layer == layer else None
            tensor, module = ("block output", "") if here is None else (here.tensor, here.module)
            return "kernel", (layer, position, tensor, module), [say.onset(name, layer, position, tensor), *lines]
        shown = self.seen.first(self.seen.own) or self.seen.first(differing[0].name)
        return "rounding", NOWHERE if shown is None else shown.finding.place, lines
