"""A result on disk that survives an interruption.

Each finished batch is a part under ``DIR/.parts`` (``parts.py``). At the end the parts are merged into the tables and
``summary.json``, each written beside its place and then renamed into it. A run that was killed is taken up again from its
parts by the same command, and gives the table that one uninterrupted run would have given. What was there before is removed
last, and what kvinterp did not write neither replaced nor removed (``files.py``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.comparison import COLUMNS, PARTS, TABLES, Comparison
from kvinterp.data import Prompt, load_prompts
from kvinterp.errors import InputError
from kvinterp.files import (
    Record,
    digest_of,
    read_json,
    told,
    whole,
    write_whole,
)
from kvinterp.folders import SUMMARY, check_free
from kvinterp.locks import Lock
from kvinterp.parts import (
    ADVICE,
    Parts,
    differences,
    has_parts,
    remove_parts,
    strict_json,
    unlike,
)

__all__ = [
    "TABLES",
    "Parts",
    "Result",
    "ResultFolder",
    "awaits_report",
    "load_result",
    "strict_json",
    "write_tables",
]

log = logging.getLogger("kvinterp")

VERB = "compare"
NAMES = (SUMMARY, "report.html", "prompts.jsonl", *(f"{table}.parquet" for table in TABLES))
"""What a finished comparison consists of, beside its figures."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison with the prompts it was made on and the folder it is kept in.

    Attributes:
        folder: Where it is.
        comparison: The tables.
        prompts: The prompts, in the order of the example numbers.
        summary: What ``summary.json`` holds.
    """

    folder: Path
    comparison: Comparison
    prompts: list[Prompt]
    summary: dict[str, Any]


def awaits_report(path: str | Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder holds a finished result of these settings without its report: it was cut off between the two.

    Args:
        path: The folder.
        settings: Some of the result's settings.
    """
    with told(Path(path)):
        if (Path(path) / "report.html").exists():
            return False
        summary = read_json(Path(path) / SUMMARY) or {}
    held = summary.get("settings")
    if summary.get("interrupted") is not False or not isinstance(held, dict):
        return False
    return all(held.get(name) == value for name, value in json.loads(strict_json(settings)).items())


class ResultFolder:
    """A folder that a run fills part by part.

    Args:
        path: The folder; made where it is missing.
        settings: Everything that decides what the tables will hold, as plain JSON values. Only a run with the same
            settings and prompts may go on where another stopped.
        prompts: The prompts, in the order of the example numbers.
        existing: What to do about what is already there, see :data:`kvinterp.folders.EXISTING`.

    Raises:
        InputError: The folder cannot be written, or holds something this run must not touch.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], prompts: Sequence[Prompt], existing: str = "error"
    ) -> None:
        self.path, self.prompts, self.finished = Path(path), list(prompts), False
        self._lines = _prompt_lines(self.prompts)
        digest = hashlib.blake2b(self._lines.encode(), digest_size=8).hexdigest()
        chosen = {"verb": VERB, **settings, "prompts": {"count": len(self.prompts), "blake2": digest}}
        self.settings: dict[str, Any] = json.loads(json.dumps(chosen))
        self._record = Record(self.path)
        check_free(self.path, existing, NAMES, about={"verb": VERB})
        self._lock = Lock(self.path)
        try:
            # Asked again: until now another process may have been at work here.
            check_free(self.path, existing, NAMES, about={"verb": VERB})
            with told(self.path):
                if self._adopts(existing):
                    # What a removal that was cut off left.
                    remove_parts(self.path)
                    self.finished = True
                    self.release()
                    return
                held = read_json(self.path / SUMMARY)
                self._keeps = (held or {}).get("interrupted") is False
                self._replaces = existing == "overwrite" or held is not None
                self._parts = Parts(self.path, self.settings, existing)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets other processes write here; what is finished stays."""
        self._lock.release()

    def done(self) -> frozenset[int]:
        """The numbers of the examples that need not be run again, failed ones too."""
        parts = self._read_parts()
        return frozenset(int(n) for part in parts for frame in (part.examples, part.failures) for n in frame["example"])

    def add(self, part: Comparison) -> None:
        """Writes one finished batch, whole or not at all.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        numbers = sorted(_numbers(part))
        tables = {name: getattr(part, name) for name in PARTS}
        self._parts.keep(f"part-{numbers[0]:08d}-{len(numbers)}", tables, part.about)

    def close(self, ending: str = "finished") -> Result | None:
        """Merges the parts into the tables and the summary.

        Args:
            ending: ``"finished"``, after which the parts are removed, or ``"interrupted"``, after which they stay so
                that the run can go on.

        Returns:
            The result, or None where nothing was finished: then what this run made of the folder is gone again. None too
            where an interrupted run would take the place of a finished result.

        Raises:
            InputError: It cannot be written.
        """
        parts = self._read_parts()
        if not parts or (self._keeps and ending != "finished"):
            with told(self.path):
                self._parts.withdraw()
            self.release()
            return None
        merged = Comparison.joined(parts)
        ordered = {n: getattr(merged, n).sort_values("example", kind="stable", ignore_index=True) for n in PARTS}
        comparison = dataclasses.replace(merged, **ordered)
        with told(self.path):
            self._record.begin({"verb": VERB}, self._record.names() if self._replaces else ())
            write_whole(self.path / "prompts.jsonl", self._lines)
            digests = {}
            for name in TABLES:
                frame: pd.DataFrame = getattr(comparison, name)
                frame.attrs = comparison.about
                with whole(self.path / f"{name}.parquet") as file:
                    frame.to_parquet(file, index=False)
                digests[name] = digest_of(self.path / f"{name}.parquet")
            summary = {**_summary(comparison, self.settings, ending), "sha256": digests}
            write_whole(self.path / SUMMARY, json.dumps(summary, indent=1, allow_nan=False))
            self._record.finish()
            if ending == "finished":
                remove_parts(self.path)
        self.release()
        return Result(self.path, comparison, self.prompts, summary)

    def _adopts(self, existing: str) -> bool:
        """Whether the folder holds this very result, finished, and it may be used; raises where it holds another."""
        summary = read_json(self.path / SUMMARY)
        if summary is None or existing == "overwrite" or has_parts(self.path):
            return False
        held, whole_one = summary.get("settings"), not summary.get("interrupted")
        if not isinstance(held, dict):
            raise InputError(f"folder {str(self.path)!r} holds a result whose settings cannot be read: {ADVICE}")
        leave = set() if whole_one else {"made_with"}
        one, other = ({name: v for name, v in s.items() if name not in leave} for s in (held, self.settings))
        if differences(one, other):
            raise InputError(unlike(self.path, "a result", one, other))
        return whole_one

    def _read_parts(self) -> list[Comparison]:
        parts: list[Comparison] = []
        seen: set[int] = set()
        for name in self._parts.names():
            found = self._parts.read(name)
            if found is None:
                continue
            part = _comparison(*found)
            numbers = set() if part is None else _numbers(part)
            if part is None or not numbers or numbers & seen or not numbers <= set(range(len(self.prompts))):
                self._parts.set_aside(name)
                continue
            seen |= numbers
            parts.append(part)
        return parts


def _numbers(part: Comparison) -> set[int]:
    return {int(n) for frame in (part.examples, part.failures) for n in frame["example"]}


def _comparison(tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Comparison | None:
    """What one part holds, None where it is not a whole one."""
    if not {"paths", "protocol", "strategy"} <= set(about) or set(tables) != set(PARTS):
        return None
    if any(not set(COLUMNS[name]) <= set(frame.columns) for name, frame in tables.items()):
        return None
    numbers = [int(n) for name in ("examples", "failures") for n in tables[name]["example"]]
    theirs = {int(n) for frame in tables.values() for n in frame["example"].unique()}
    whole_one = len(numbers) == len(set(numbers)) and theirs <= set(numbers)
    return Comparison(**tables, about=dict(about)) if whole_one else None


def load_result(folder: str | Path) -> Result:
    """Reads a finished or interrupted result.

    Raises:
        InputError: The folder holds none that can be read.
    """
    path = Path(folder)
    with told(path):
        summary = read_json(path / SUMMARY)
    if summary is None:
        raise InputError(f"folder {str(path)!r} holds no readable summary.json: give a folder that kvinterp wrote.")
    try:
        for name, digest in (summary.get("sha256") or {}).items():
            if name in TABLES and digest_of(path / f"{name}.parquet") != digest:
                raise ValueError(f"{name}.parquet is not the one that summary.json was written with")
        tables = {name: pd.read_parquet(path / f"{name}.parquet") for name in TABLES}
        failures = pd.DataFrame(summary["failures"], columns=["example", "id", "message"])
        comparison = Comparison(**tables, failures=failures, about=summary["provenance"])
        return Result(path, comparison, load_prompts(path / "prompts.jsonl"), summary)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"folder {str(path)!r} holds no readable result ({error}): make it again.") from error


def write_tables(
    path: Path,
    tables: Mapping[str, pd.DataFrame],
    summary: Mapping[str, Any],
    existing: str = "error",
    draw: Callable[[Path], Iterable[Path]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes tables, figures and ``summary.json`` into a folder, each whole or not at all, the summary last.

    Args:
        path: The folder.
        tables: Tables by the names of their files.
        summary: What ``summary.json`` holds.
        existing: ``"error"`` or ``"overwrite"``; what was there before is removed once everything is written.
        draw: Given a folder, draws the figures into it and returns their files.
        about: What the result is, ``verb`` among it, for the case that the writing is cut off.

    Raises:
        InputError: The folder holds a result and may not be overwritten, or cannot be written.
    """
    lock, record = Lock(path), Record(path)
    try:
        check_free(path, existing, [*(f"{name}.parquet" for name in tables), SUMMARY], about)
        replaces = existing == "overwrite" or (path / SUMMARY).exists()
        record.begin(json.loads(strict_json(about or {})), record.names() if replaces else ())
        with told(path):
            for name, table in tables.items():
                with whole(path / f"{name}.parquet") as file:
                    table.to_parquet(file, index=False)
        figures = [] if draw is None else list(draw(path / "figures"))
        write_whole(path / SUMMARY, strict_json(summary) + "\n")
        with told(path):
            record.finish()
            remove_parts(path)
    finally:
        lock.release()
    return [*(path / f"{name}.parquet" for name in tables), path / SUMMARY, *figures]


def _summary(comparison: Comparison, settings: dict[str, Any], ending: str) -> dict[str, Any]:
    made = comparison.summary()
    counts = {name: made.pop(name) for name in ("examples", "steps", "failed")}
    counts["planned"] = settings["prompts"]["count"]
    front = {name: made.pop(name) for name in ("paths", "protocol", "strategy")}
    made["provenance"] = comparison.about
    return {
        **front,
        "counts": counts,
        "interrupted": ending != "finished",
        "reading": comparison.where().splitlines(),
        **made,
        "settings": settings,
    }


def _prompt_lines(prompts: Sequence[Prompt]) -> str:
    """The prompts as a file that :func:`kvinterp.data.load_prompts` reads back."""
    rows = []
    for prompt in prompts:
        fields = {field.name: getattr(prompt, field.name) for field in dataclasses.fields(prompt)}
        text = fields.pop("text")
        rows.append({"id": fields.pop("id"), "prompt": text, **{k: v for k, v in fields.items() if v}})
    return "".join(json.dumps(row, default=dict) + "\n" for row in rows)
