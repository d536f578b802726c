"""A baseline: a JSON file of the faults that are known, by the names of models, which may only
shrink.
"""

from __future__ import annotations

from pathlib import Path

from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.search import base_of
from kvinterp.auditing.verdict import Verdict
from kvinterp.common.files import read_json, strict_json, write_whole
from kvinterp.errors import InputError

WRITE = "KVINTERP_BASELINE"
"""The environment variable that, where it is ``write``, has baselines written and not held to."""


def read_baseline(baseline: Path) -> dict[str, list[str]]:
    """By model, the uses that are known to be wrong; none where there is no file.

    Raises:
        InputError: The file is no baseline.
    """
    if not baseline.exists():
        return {}
    read = read_json(baseline)
    if read is None or not all(
        isinstance(uses, list) and all(isinstance(use, str) for use in uses)
        for uses in read.values()
    ):
        raise InputError(
            f"{baseline} is no baseline: expected a JSON object with a list of uses by the name of each model; delete it and run "
            f"once with {WRITE}=write."
        )
    return read


def write_baseline(
    baseline: Path, known: dict[str, list[str]], name: str, verdict: Verdict
) -> None:
    """Writes the file with the faults of one model as a verdict has them now, the others' as they
    were known.
    """
    faults = {**known, name: sorted(_faults(verdict))}
    write_whole(baseline, strict_json({one: faults[one] for one in sorted(faults) if faults[one]}))


def departure(baseline: Path, known: dict[str, list[str]], name: str, verdict: Verdict) -> str:
    """Says where a verdict has other faults than a baseline knows of this model, or lacks one;
    empty where neither.
    """
    listed = known.get(name, [])
    told = {base_of(use) for use in listed}
    if new := [use for use in _faults(verdict) if base_of(use) not in told]:
        return f"{', '.join(new)}: not among the faults of {name} that {baseline} knows."
    right = {check.name for check in verdict.checks if check.status == RIGHT}
    others = {check.name for check in verdict.checks} - right
    # A word of the whole verdict, such as "bug", is no use that has a check.
    passes = not verdict.exit_code
    if mended := [use for use in listed if use in right or (passes and use not in others)]:
        return (
            f"{name} is right now in what {baseline} lists as wrong: {', '.join(mended)}. Take it out of the file, "
            f"or run once with {WRITE}=write."
        )
    return ""


def _faults(verdict: Verdict) -> list[str]:
    """The uses that are wrong, or the word of a verdict that fails for another reason."""
    wrong = [check.name for check in verdict.checks if check.status == WRONG]
    return wrong or [verdict.verdict] * bool(verdict.exit_code)
