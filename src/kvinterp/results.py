"""A result on disk that survives an interruption.

Each finished batch is a part: a folder of tables that appears under ``DIR/.parts`` by one rename, so that it is there
whole or not at all. At the end the parts are merged into the tables and ``summary.json``, each written beside its place
and then renamed into it. A run that was killed is taken up again from its parts by the same command, and gives the table
that one uninterrupted run would have given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.comparison import PARTS, TABLES, Comparison
from kvinterp.data import Prompt, load_prompts
from kvinterp.errors import InputError, unknown

__all__ = [
    "EXISTING",
    "TABLES",
    "Parts",
    "Result",
    "ResultFolder",
    "check_free",
    "load_result",
    "strict_json",
    "write_tables",
    "write_whole",
]

EXISTING = {
    "error": "a finished result is never touched; an unfinished one with the same settings is taken up again",
    "overwrite": "what kvinterp wrote there before is removed first",
    "use": "a finished result with the same settings is read instead of computed again",
}


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


_ADVICE = "choose another folder with --out, or pass --overwrite."


def check_free(path: str | Path, existing: str = "error", last: str = "summary.json") -> None:
    """Raises where a finished result is in the way: asked before anything slow, such as loading a model, begins.

    Args:
        path: The folder to be written.
        existing: What to do about what is already there, see :data:`EXISTING`.
        last: The file that a finished result has.

    Raises:
        InputError: It holds a finished result, and ``existing`` is ``"error"``.
    """
    if existing not in EXISTING:
        raise unknown("way to treat an existing result", existing, EXISTING)
    folder = Path(path)
    if existing == "error" and (folder / last).exists() and not any(folder.glob(".parts/part-*")):
        raise InputError(f"folder {str(folder)!r} already holds a result: {_ADVICE}")


class ResultFolder:
    """A folder that a run fills part by part.

    Args:
        path: The folder; made where it is missing.
        settings: Everything that decides what the tables will hold, as plain JSON values. Only a run with the same
            settings and prompts may go on where another stopped.
        prompts: The prompts, in the order of the example numbers.
        existing: What to do about what is already there, see :data:`EXISTING`.

    Raises:
        InputError: The folder cannot be written, or holds something this run must not touch.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], prompts: Sequence[Prompt], existing: str = "error"
    ) -> None:
        check_free(path, existing)
        self.path, self.prompts = Path(path), list(prompts)
        lines = _prompt_lines(self.prompts)
        digest = hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
        whole = {**settings, "prompts": {"count": len(self.prompts), "blake2": digest}}
        self.settings: dict[str, Any] = json.loads(json.dumps(whole))
        self._parts = self.path / ".parts"
        with _told(self.path):
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            if existing == "overwrite":
                self._clear()
            self.finished = self._adopt()
            if not self.finished:
                self._parts.mkdir(exist_ok=True)
                for left in self._parts.glob(".*.partial"):
                    shutil.rmtree(left, ignore_errors=True)
                write_whole(self._parts / "settings.json", json.dumps(self.settings, indent=1))
                write_whole(self.path / "prompts.jsonl", lines)

    def done(self) -> frozenset[int]:
        """The numbers of the examples that need not be run again, failed ones too."""
        parts = self._read_parts()
        return frozenset(int(n) for part in parts for frame in (part.examples, part.failures) for n in frame["example"])

    def add(self, part: Comparison) -> None:
        """Writes one finished batch, whole or not at all.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        numbers = sorted({int(n) for frame in (part.examples, part.failures) for n in frame["example"]})
        with _told(self.path):
            partial = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=self._parts))
            for name in PARTS:
                getattr(part, name).to_parquet(partial / f"{name}.parquet", index=False)
            (partial / "about.json").write_text(json.dumps(part.about), encoding="utf-8")
            partial.rename(self._parts / f"part-{numbers[0]:08d}-{len(numbers)}")

    def close(self, ending: str = "finished") -> Result | None:
        """Merges the parts into the tables and the summary.

        Args:
            ending: ``"finished"``, after which the parts are removed, or ``"interrupted"``, after which they stay so
                that the run can go on.

        Returns:
            The result, or None where nothing was finished: then what this run made of the folder is gone again.

        Raises:
            InputError: It cannot be written.
        """
        parts = self._read_parts()
        if not parts:
            self._withdraw()
            return None
        merged = Comparison.joined(parts)
        ordered = {n: getattr(merged, n).sort_values("example", kind="stable", ignore_index=True) for n in PARTS}
        comparison = dataclasses.replace(merged, **ordered)
        with _told(self.path):
            for name in TABLES:
                frame: pd.DataFrame = getattr(comparison, name)
                frame.attrs = comparison.about
                with _whole(self.path / f"{name}.parquet") as partial:
                    frame.to_parquet(partial, index=False)
            summary = _summary(comparison, self.settings, ending)
            write_whole(self.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
            if ending == "finished":
                # Renamed first: a removal that is cut off must not leave some of the parts looking like a run's.
                self._parts.rename(self.path / ".parts-merged")
                shutil.rmtree(self.path / ".parts-merged")
        return Result(self.path, comparison, self.prompts, summary)

    def _adopt(self) -> bool:
        """Whether the folder holds this very result, finished; raises where it holds another."""
        shutil.rmtree(self.path / ".parts-merged", ignore_errors=True)
        if self._part_folders():
            self._check(_read_json(self._parts / "settings.json"), "an unfinished run")
            return False
        summary = _read_json(self.path / "summary.json")
        if summary is None:
            return False
        self._check(summary.get("settings"), "a result")
        return not summary.get("interrupted")

    def _check(self, held: dict[str, Any] | None, what: str) -> None:
        unlike = _differences(held or {}, self.settings)
        if unlike:
            raise InputError(f"folder {str(self.path)!r} holds {what} made with other settings ({unlike}): {_ADVICE}")

    def _part_folders(self) -> list[Path]:
        return sorted(self._parts.glob("part-*"))

    def _read_parts(self) -> list[Comparison]:
        parts = []
        for folder in self._part_folders():
            try:
                tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in PARTS}
                parts.append(Comparison(**tables, about=json.loads((folder / "about.json").read_text(encoding="utf-8"))))
            except (OSError, ValueError):
                # A power cut can lose what a rename already promised; what cannot be read is computed again.
                shutil.rmtree(folder, ignore_errors=True)
        return parts

    def _clear(self) -> None:
        for name in (".parts", ".parts-merged", "figures"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("summary.json", "report.html", "prompts.jsonl", *(f"{table}.parquet" for table in TABLES)):
            (self.path / name).unlink(missing_ok=True)

    def _withdraw(self) -> None:
        shutil.rmtree(self._parts, ignore_errors=True)
        if not (self.path / "summary.json").exists():
            (self.path / "prompts.jsonl").unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def load_result(folder: str | Path) -> Result:
    """Reads a finished or interrupted result.

    Raises:
        InputError: The folder holds none that can be read.
    """
    path = Path(folder)
    summary = _read_json(path / "summary.json")
    if summary is None:
        raise InputError(f"folder {str(path)!r} holds no readable summary.json: give a folder that kvinterp wrote.")
    try:
        tables = {name: pd.read_parquet(path / f"{name}.parquet") for name in TABLES}
        failures = pd.DataFrame(summary["failures"], columns=["example", "id", "message"])
        comparison = Comparison(**tables, failures=failures, about=summary["provenance"])
        return Result(path, comparison, load_prompts(path / "prompts.jsonl"), summary)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"folder {str(path)!r} holds no readable result ({error}): make it again.") from error


def write_tables(
    path: Path, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any], existing: str = "error"
) -> list[Path]:
    """Writes tables and ``summary.json`` into a folder, each whole or not at all, the summary last.

    Args:
        path: The folder.
        tables: Tables by the names of their files.
        summary: What ``summary.json`` holds.
        existing: ``"error"`` or ``"overwrite"``.

    Raises:
        InputError: The folder holds a result and may not be overwritten, or cannot be written.
    """
    check_free(path, existing)
    for name, table in tables.items():
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        write_whole(path / f"{name}.parquet", buffer.getvalue())
    write_whole(path / "summary.json", strict_json(summary) + "\n")
    return [*(path / f"{name}.parquet" for name in tables), path / "summary.json"]


class Parts:
    """Tables that are kept as they are made, so that an interrupted run of many goes on where it stopped.

    Args:
        path: The folder of the result; the parts lie under ``.parts`` in it.
        settings: What decides the numbers; parts made under other settings are not taken up.
        existing: ``"error"`` or ``"overwrite"``.

    Raises:
        InputError: There are parts of another run, which may not be overwritten.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], existing: str = "error") -> None:
        self.folder = path / ".parts"
        wanted = json.loads(strict_json(settings))
        held = _read_json(self.folder / "settings.json")
        if held is not None and held != wanted and existing == "error":
            raise InputError(
                f"folder {str(path)!r} holds an unfinished result made with other settings ({_differences(held, wanted)}): "
                f"{_ADVICE}"
            )
        if held != wanted:
            self.clear()
            write_whole(self.folder / "settings.json", strict_json(wanted))

    def made(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The table of this name: read if it is there, else made and kept."""
        file = self.folder / f"{name}.parquet"
        if file.is_file():
            return pd.read_parquet(file)
        table, buffer = make(), io.BytesIO()
        table.to_parquet(buffer, index=False)
        write_whole(file, buffer.getvalue())
        return table

    def clear(self) -> None:
        """Removes them: the result is whole."""
        shutil.rmtree(self.folder, ignore_errors=True)


def strict_json(value: Any) -> str:
    """JSON that every reader takes: NaN and what it has no word for become null, infinities and other objects text."""
    return json.dumps(_plain(value), indent=1, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is there whole or not at all; its folder is made.

    Raises:
        InputError: It cannot be written.
    """
    with _told(path.parent), _whole(path) as partial:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"folder {str(path)!r} cannot be written ({reason}): choose another with --out.") from error


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


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def _differences(held: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """What differs between two settings, as ``dtype: float16, now float32; ...``."""
    found = []
    for key in sorted({*held, *now}):
        old, new = held.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [inner] if (inner := _differences(old, new, f"{prefix}{key}.")) else []
        elif old != new:
            found.append(f"{prefix}{key}: {json.dumps(old)}, now {json.dumps(new)}")
    return "; ".join(found)
