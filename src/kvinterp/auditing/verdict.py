"""What an audit gives: the verdict, and everything that was measured kept together with it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from kvinterp.auditing.checks import Check
from kvinterp.auditing.folder import GIVEN, VERDICT, tables_of
from kvinterp.auditing.ladder import Plan, PrecisionRun
from kvinterp.auditing.own_dtype import Distance
from kvinterp.auditing.programs.reach import Reach
from kvinterp.common.checks import check_known, given_list
from kvinterp.common.files import is_file, read_json, strict_json
from kvinterp.common.result import Contents, Result
from kvinterp.errors import InputError

VERDICTS = {
    "equal": "nothing differs bitwise",
    "rounding": "every difference vanishes with its cause: the order of additions, or a cast above the precision that serves",
    "kernel": "a difference is larger than rounding, and is gone with a fixed order",
    "hidden-cast": "something is computed in a narrower dtype than the model's own, and the error is gone without that cast",
    "wrong-dtype": "values lie on a 16-bit grid though 32 bits or more are claimed",
    "bug": "a tensor is wrong, or a use that the model offers crashes: nothing that was taken away takes its error away",
    "unexplained": "the logits differ by more than the errors of all parts explain",
    "overflow": "NaN or Inf",
    "misaligned": "the log-probs of another engine are of other tokens, or its hidden states of another place",
    "processed": "the log-probs of another engine are after temperature or truncation",
    "policy": "a cache of ours with fewer bits does token by token what another engine does",
    "not-the-cache": "a use that was asked for by name is off with a cache and without one",
    "cannot-tell": "the checks that would tell could not be made",
}
GOOD = ("equal", "rounding", "kernel")
CANNOT_TELL, NOT_THE_CACHE = "cannot-tell", "not-the-cache"


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict(Result):
    """What an audit found.

    Attributes:
        verdict: One of :data:`VERDICTS`.
        first_layer: The first block that is wrong; -1 for the embedding, the number of blocks for
            the head; None where it passes, or where what failed has no layer.
        first_position: The absolute position where the tensor is first wrong, or None.
        tensor: The first tensor that differs given equal inputs: K, V, Q, recurrent state,
            attention mask, residual sum, a module, ...; or the exercise that failed.
        module: The module it belongs to.
        evidence: A dictionary a rung (see :meth:`PrecisionRun.summary`), with ``first_tensor`` (see
            :class:`DifferingTensor`) where one was looked for, what takes its error away, and whether the
            parts account for the whole.
        checks: What was exercised and what not, each with what it showed.
        notes: What a reader should know beside the verdict.
        reading: PASS or FAIL and the word, then short lines.
        allowed: Whether the word is one that the caller allows.
        provenance: Provenance.
        seconds: What took how long: a row a rung and part of it, with seconds of the clock and of
            the processor.
        given: Of another engine's log-probs the distances, what was tried, and the statistics of
            reinforcement learning.
        reach: How far the programs went that were right: positions of a text (of the model's
            context), rows, columns taken back, columns of a forward on a filled cache, turns.
        distances: How far the programs that were asked for move logits in the model's own dtype,
            beside two recomputations in it.
        tokens: Of another engine's log-probs every token: ``sequence``, ``position``, ``part``
            (prompt or tokens), ``token``, ``text``, and in nats ``engine``, ``ours`` (float64) and
            ``difference`` (engine less ours); None where none were read.
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
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reach: Reach = dataclasses.field(default_factory=Reach)
    distances: tuple[Distance, ...] = ()
    tokens: pd.DataFrame | None = dataclasses.field(default=None, compare=False)

    def __repr__(self) -> str:
        """The verdict in one line: the word, and how far it went."""
        return f"<Verdict: {' '.join(self.reading.splitlines()[0].split())}>"

    @property
    def exit_code(self) -> int:
        """0 where the model passes, 1 where it fails, 3 where that cannot be told."""
        if self.verdict in GOOD or self.allowed == "yes":
            return 0
        return 3 if self.verdict == CANNOT_TELL else 1

    def to_json(self) -> str:
        """The same fields as JSON, with the exit code; infinities as text."""
        return strict_json({"exit_code": self.exit_code, **self.as_dict()})

    def as_dict(self) -> dict[str, Any]:
        """The fields of the JSON; what is of every token is a table beside it."""
        fields = dataclasses.asdict(dataclasses.replace(self, tokens=None))
        del fields["tokens"]
        return fields

    told = as_dict
    """Its earlier name, by which scripts of others ask for it."""

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Verdict:
        """Reads the verdict.json that an audit wrote.

        Raises:
            InputError: There is none that can be read.
        """
        path = Path(folder)
        if (fields := read_json(path / VERDICT)) is None:
            raise InputError(
                f"folder {str(path)!r} holds no readable {VERDICT}: give a folder that kvinterp wrote."
            )
        try:
            fields = _with_infinities(fields)
            tokens = None
            if is_file(path / GIVEN):
                with (path / GIVEN).open("rb") as file:
                    tokens = pd.read_parquet(file)
            del fields["exit_code"]
            checks = tuple(
                Check(**{**check, "reach": Reach(**check.get("reach", {}))})
                for check in fields.pop("checks")
            )
            fields["reach"] = Reach(**fields.get("reach", {}))
            fields["distances"] = tuple(Distance(**row) for row in fields.get("distances", ()))
            rows = {name: tuple(fields.get(name, ())) for name in ("notes", "seconds")}
            loaded = cls(**{**fields, **rows}, checks=checks, tokens=tokens)
            if loaded.verdict not in VERDICTS or not isinstance(loaded.provenance, dict):
                raise ValueError(f"{loaded.verdict!r} is no verdict")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"folder {str(path)!r} holds no readable verdict.json ({error}): it is damaged or of another version of "
                "kvinterp; make the audit again."
            ) from error
        vars(loaded).update(folder=path, settings={}, choices={})
        return loaded

    def written(self) -> Contents:
        """What each precision showed and what was exercised, and the fields of the JSON."""
        checks = pd.DataFrame(
            [{**fields, **fields.pop("reach")} for fields in map(dataclasses.asdict, self.checks)]
        )
        return {
            "rungs": self.overview(),
            "checks": checks,
            "seconds": pd.DataFrame(self.seconds),
        }, self.as_dict()

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
        return pd.DataFrame(
            [
                {"rung": name, **{n: summary[n] for n in names}}
                for name, summary in self.evidence.items()
            ]
        )

    # What an audit measured is saved by it too.
    def save(self: Any, folder: str | os.PathLike[str], existing: str = "overwrite") -> Path:
        """Writes all that there is; an earlier audit's files are always written over
        (``existing``). Returns the folder.
        """
        return Result.save(self, folder, existing)

    def report(
        self, folder: str | os.PathLike[str] | None = None, existing: str = "overwrite"
    ) -> Path:
        """The page; the one that is there where it was read from a folder, which also shows every
        block.

        Args:
            folder: Where to; unless given where it is kept, or else a new folder among the system's
                temporary ones.
            existing: As for :meth:`save`.

        Returns:
            The page's path.
        """
        if folder is None and self.folder is not None and (self.folder / "report.html").is_file():
            return self.folder / "report.html"
        return (
            self.save(folder or self.folder or tempfile.mkdtemp(prefix="kvinterp-"), existing)
            / "report.html"
        )

    def sentences(self) -> list[str]:
        """The reading, line by line."""
        return [line for line in self.reading.splitlines() if line]

    @property
    def parts(self) -> tuple[str, list[str], str]:
        """The reading's first line, those that say why, and the one on what was run."""
        first, *rest = self.reading.splitlines()
        cut = next((i for i, line in enumerate(rest) if line.startswith("exercised: ")), len(rest))
        return first, rest[:cut], "".join(rest[cut : cut + 1]).removeprefix("exercised: ")

    def __str__(self) -> str:
        return self.reading


@dataclasses.dataclass(repr=False)
class Audit(Result):
    """Everything an audit measured; ``verdict`` is its conclusion, and what :func:`kvinterp.load`
    reads again.

    Attributes:
        verdict: The conclusion.
        rungs: What each precision showed.
        plan: What was run.
        provenance: Provenance.
    """

    VERB: ClassVar = "audit"

    verdict: Verdict
    rungs: list[PrecisionRun]
    plan: Plan
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        """The verdict's first line."""
        return repr(self.verdict).replace("<Verdict", "<Audit", 1)

    def rung(self, name: str) -> PrecisionRun | None:
        """One rung by name, or None."""
        return next((r for r in self.rungs if r.name == name), None)

    def written(self) -> Contents:
        """The tables of all precisions, and the fields of the JSON."""
        return tables_of(self.rungs), self.verdict.written()[1]

    save, report, overview = Verdict.save, Verdict.report, Verdict.overview

    @property
    def evidence(self) -> dict[str, dict[str, Any]]:
        """The verdict's."""
        return self.verdict.evidence

    def sentences(self) -> list[str]:
        """The verdict's reading, line by line."""
        return self.verdict.sentences()


def _with_infinities(value: Any) -> Any:
    """What :func:`strict_json` made a text of as numbers again."""
    if isinstance(value, dict):
        return {name: _with_infinities(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_infinities(inner) for inner in value]
    return float(value) if value in ("inf", "-inf") else value


def allowed(allow: str | Sequence[str]) -> tuple[str, ...]:
    """The words that shall not fail, each of :data:`VERDICTS`."""
    words = f"a list of words of {', '.join(VERDICTS)}"
    named = (allow,) if isinstance(allow, str) else tuple(given_list("allow", allow, words))
    for word in named:
        check_known("verdict to allow", word, VERDICTS)
    return named
