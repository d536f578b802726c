"""A result on disk that survives an interruption.

Each finished batch is a part: a folder of tables that appears under ``DIR/.parts`` by one rename, so that it is there
whole or not at all. At the end the parts are merged into the tables and ``summary.json``, each written beside its place
and then renamed into it. A run that was killed is taken up again from its parts by the same command, and gives the table
that one uninterrupted run would have given. What kvinterp did not write is neither replaced nor removed (``files.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.comparison import COLUMNS, PARTS, TABLES, Comparison
from kvinterp.data import Prompt, load_prompts
from kvinterp.errors import InputError, unknown
from kvinterp.files import Lock, Record, read_json, refuse_foreign, replaced, told, whole, write_whole

__all__ = [
    "EXISTING",
    "TABLES",
    "Parts",
    "Result",
    "ResultFolder",
    "awaits_report",
    "check_free",
    "check_names",
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
NAMES = ("summary.json", "report.html", "prompts.jsonl", *(f"{table}.parquet" for table in TABLES))
"""What a finished comparison consists of, beside its figures."""
FIGURES = re.compile(
    r"(kl_by_step|drift_by_layer|attention_by_head|kv_by_position|precision_ladder|recovery|decomposition|root_cause).*\.png"
)
"""The names of every figure that goes into a result's folder, under ``figures``."""


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
_MOVE = "choose another folder with --out, or move it away."


def check_free(
    path: str | Path, existing: str = "error", last: str = "summary.json", names: Iterable[str] = ("summary.json",)
) -> None:
    """Raises where something is in the way: asked before anything slow, such as loading a model, begins.

    Args:
        path: The folder to be written.
        existing: What to do about what is already there, see :data:`EXISTING`.
        last: The file that a finished result has.
        names: The files that will be written, beside figures.

    Raises:
        InputError: It holds a finished result, and ``existing`` is ``"error"``; or a file that kvinterp did not write.
    """
    if existing not in EXISTING:
        raise unknown("way to treat an existing result", existing, EXISTING)
    folder = Path(path)
    with told(folder):
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()
        finished = (folder / last).exists() and not _part_folders(folder / ".parts")
        if existing == "error" and finished:
            raise InputError(f"folder {str(folder)!r} already holds a result: {_ADVICE}")
        if last == "summary.json" and not (existing == "use" and finished):
            check_names(folder, names)


def check_names(folder: Path, names: Iterable[str]) -> None:
    """Raises where a file that kvinterp did not write has one of these names, or that of a figure.

    Args:
        folder: The folder to be written.
        names: The files that will be written, beside figures.

    Raises:
        InputError: There is such a file.
    """
    drawn = sorted(f"figures/{path.name}" for path in folder.glob("figures/*.png") if FIGURES.fullmatch(path.name))
    refuse_foreign(Record(folder), [*names, *drawn])
    parts = folder / ".parts"
    if parts.is_symlink() or (parts.exists() and not _is_ours(parts)):
        raise InputError(f"folder {str(folder)!r} holds '.parts', which kvinterp did not write: {_MOVE}")


def awaits_report(path: str | Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder holds a finished result of these settings without its report: it was cut off between the two.

    Args:
        path: The folder.
        settings: Some of the result's settings.
    """
    with told(Path(path)):
        if (Path(path) / "report.html").exists():
            return False
        summary = read_json(Path(path) / "summary.json") or {}
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
        existing: What to do about what is already there, see :data:`EXISTING`.

    Raises:
        InputError: The folder cannot be written, or holds something this run must not touch.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], prompts: Sequence[Prompt], existing: str = "error"
    ) -> None:
        check_free(path, existing, names=NAMES)
        self.path, self.prompts = Path(path), list(prompts)
        self._lines = _prompt_lines(self.prompts)
        digest = hashlib.blake2b(self._lines.encode(), digest_size=8).hexdigest()
        chosen = {**settings, "prompts": {"count": len(self.prompts), "blake2": digest}}
        self.settings: dict[str, Any] = json.loads(json.dumps(chosen))
        self._parts, self._record = self.path / ".parts", Record(self.path)
        self._lock: Lock | None = None
        with told(self.path):
            self.finished = existing != "overwrite" and self._adopt()
            if not self.finished:
                self._begin(existing)

    def _begin(self, existing: str) -> None:
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.path)
        try:
            # Asked again: until now another process may have been at work here.
            check_free(self.path, existing, names=NAMES)
            if existing == "overwrite":
                # The prompts stay until others take their place: they may be the only copy.
                self._record.remove(keep=("prompts.jsonl",))
                _remove_parts(self._parts)
            elif self._adopt():
                self.finished = True
                self.release()
                return
            self._before = self._record.names()
            self._record.open()
            self._parts.mkdir(exist_ok=True)
            for left in [*self._parts.glob(".*.partial"), self.path / ".parts-merged"]:
                shutil.rmtree(left, ignore_errors=True)
            with replaced(self._parts / "settings.json") as partial:
                partial.write_text(json.dumps(self.settings, indent=1), encoding="utf-8")
            write_whole(self.path / "prompts.jsonl", self._lines)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets other processes write here; what is finished stays."""
        if self._lock is not None:
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
        numbers = sorted({int(n) for frame in (part.examples, part.failures) for n in frame["example"]})
        with told(self.path):
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
        with told(self.path):
            for name in TABLES:
                frame: pd.DataFrame = getattr(comparison, name)
                frame.attrs = comparison.about
                with whole(self.path / f"{name}.parquet") as partial:
                    frame.to_parquet(partial, index=False)
            summary = _summary(comparison, self.settings, ending)
            write_whole(self.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
            if ending == "finished":
                # Renamed first: a removal that is cut off must not leave some of the parts looking like a run's.
                self._parts.rename(self.path / ".parts-merged")
                shutil.rmtree(self.path / ".parts-merged")
        self.release()
        return Result(self.path, comparison, self.prompts, summary)

    def _adopt(self) -> bool:
        """Whether the folder holds this very result, finished; raises where it holds another."""
        if _part_folders(self._parts):
            self._check(read_json(self._parts / "settings.json"), "an unfinished run")
            return False
        summary = read_json(self.path / "summary.json")
        if summary is None:
            return False
        self._check(summary.get("settings"), "a result")
        return not summary.get("interrupted")

    def _check(self, held: Any, what: str) -> None:
        if not isinstance(held, dict):
            raise InputError(f"folder {str(self.path)!r} holds {what} whose settings cannot be read: {_ADVICE}")
        unlike = _differences(held, self.settings)
        if unlike:
            raise InputError(f"folder {str(self.path)!r} holds {what} made with other settings ({unlike}): {_ADVICE}")

    def _read_parts(self) -> list[Comparison]:
        parts: list[Comparison] = []
        seen: set[int] = set()
        for folder in _part_folders(self._parts):
            part = _read_part(folder)
            numbers = set() if part is None else _numbers(part)
            if part is None or not numbers or numbers & seen or not numbers <= set(range(len(self.prompts))):
                # A power cut can lose what a rename already promised; what cannot be used is computed again.
                shutil.rmtree(folder, ignore_errors=True)
                continue
            seen |= numbers
            parts.append(part)
        return parts

    def _withdraw(self) -> None:
        shutil.rmtree(self._parts, ignore_errors=True)
        if not (self.path / "summary.json").exists():
            with told(self.path):
                self._record.remove(keep=self._before)
        self.release()
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()


_PART = re.compile(r"part-\d{8,}-\d+")


def _part_folders(parts: Path) -> list[Path]:
    return sorted(path for path in parts.glob("part-*") if _PART.fullmatch(path.name) and path.is_dir())


def _is_ours(parts: Path) -> bool:
    if not parts.is_dir():
        return False
    return (parts / "settings.json").exists() or all(path.name.endswith(".partial") for path in parts.iterdir())


def _remove_parts(parts: Path) -> None:
    for folder in (parts, parts.with_name(".parts-merged")):
        shutil.rmtree(folder, ignore_errors=True)


def _numbers(part: Comparison) -> set[int]:
    return {int(n) for frame in (part.examples, part.failures) for n in frame["example"]}


def _read_part(folder: Path) -> Comparison | None:
    """What one part holds, None where it is not a whole one."""
    about = read_json(folder / "about.json")
    if about is None or not {"paths", "protocol", "strategy"} <= set(about):
        return None
    try:
        tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in PARTS}
        if any(not set(COLUMNS[name]) <= set(frame.columns) for name, frame in tables.items()):
            return None
        part = Comparison(**tables, about=about)
        numbers = [int(n) for name in ("examples", "failures") for n in tables[name]["example"]]
        theirs = {int(n) for frame in tables.values() for n in frame["example"].unique()}
        return part if len(numbers) == len(set(numbers)) and theirs <= set(numbers) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_result(folder: str | Path) -> Result:
    """Reads a finished or interrupted result.

    Raises:
        InputError: The folder holds none that can be read.
    """
    path = Path(folder)
    with told(path):
        summary = read_json(path / "summary.json")
    if summary is None:
        raise InputError(f"folder {str(path)!r} holds no readable summary.json: give a folder that kvinterp wrote.")
    try:
        tables = {name: pd.read_parquet(path / f"{name}.parquet") for name in TABLES}
        failures = pd.DataFrame(summary["failures"], columns=["example", "id", "message"])
        comparison = Comparison(**tables, failures=failures, about=summary["provenance"])
        return Result(path, comparison, load_prompts(path / "prompts.jsonl"), summary)
    except (OSError, ValueError, KeyError, TypeError) as error:
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
    check_free(path, existing, names=[*(f"{name}.parquet" for name in tables), "summary.json"])
    Record(path).open()
    with told(path):
        for name, table in tables.items():
            with whole(path / f"{name}.parquet") as partial:
                table.to_parquet(partial, index=False)
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
        with told(path):
            check_names(path, ())
            path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(path)
            held = read_json(self.folder / "settings.json")
            if held is not None and held != wanted and existing == "error":
                self._lock.release()
                raise InputError(
                    f"folder {str(path)!r} holds an unfinished result made with other settings "
                    f"({_differences(held, wanted)}): {_ADVICE}"
                )
            if held != wanted:
                _remove_parts(self.folder)
                with replaced(self.folder / "settings.json") as partial:
                    partial.write_text(strict_json(wanted), encoding="utf-8")

    def made(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The table of this name: read if it is there, else made and kept."""
        file = self.folder / f"{name}.parquet"
        if file.is_file():
            # One that cannot be read is made again.
            with contextlib.suppress(OSError, ValueError):
                return pd.read_parquet(file)
        table = make()
        with told(self.folder), replaced(file) as partial:
            table.to_parquet(partial, index=False)
        return table

    def clear(self) -> None:
        """Removes them: the result is whole."""
        _remove_parts(self.folder)
        self._lock.release()


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
