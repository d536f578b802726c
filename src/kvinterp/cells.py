"""A piece of work that is named, kept whole and taken up again: which function, with which plain settings.

A :class:`Cell` holds names and settings, never a model or a tensor, so that any process can do it: the function is found by
its import name, and the model is loaded where the cell runs (:func:`loaded`). What a cell gave is a part: one file,
``DIR/.parts/KEY/NAME.part``, there whole or not at all, with a digest that is checked when it is read. KEY is the digest of
everything that decides the numbers: a run under other threads, kernels, weights or versions has parts of its own, so what was
made differently is never joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import json
import logging
import re
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import ArrowException

from kvinterp.errors import InputError
from kvinterp.files import PARTIAL, differences, is_plain, is_there, read_json, replaced, strict_json, told
from kvinterp.progress import Tell, unshared

log = logging.getLogger("kvinterp")

ADVICE = "choose another folder with --out, or pass --overwrite (from Python, existing='overwrite')."
FOLDER, MODEL_LOADER = ".parts", "kvinterp.models:load_model"
_KEY, _SETTINGS, _ABOUT, _SUFFIX = re.compile(r"[0-9a-f]{16}"), "settings.json", "about.json", ".part"
_PART = re.compile(r"\w[\w.-]*\.part")
_ASIDE = re.compile(r"\.damaged\.\w[\w.-]*\.[0-9a-f]{16}")

Made = tuple[dict[str, pd.DataFrame], dict[str, Any]]
"""What a cell gave: tables by name, and what else belongs to them as plain JSON values."""
Engine = Callable[[Sequence["Cell"], Mapping[str, Any]], None]
"""What does cells: given them, and what they are offered by name (``keep``, ``tell``, ``progress``)."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A piece of work.

    Attributes:
        key: Its name within its run: letters, digits, hyphens and underscores.
        function: ``package.module:function``. Called with the settings it gives a table, tables by name, or tables and what
            else belongs to them. One with the parameters ``keys`` and ``keep`` is called once for all the cells that follow
            each other with the same settings, and calls ``keep(key, tables, about)`` as each is made: prompts of one length
            share a batch. One with the parameters ``tell`` or ``progress`` is given what says what runs now, or ``"bar"``.
        settings: What it is called with, as plain JSON values.
        told: What is said while it runs; nothing where it is empty.
    """

    key: str
    function: str
    settings: Mapping[str, Any]
    told: str = ""


def run_cells(
    cells: Sequence[Cell],
    parts: Parts | _InMemory | None = None,
    tell: Tell | None = None,
    progress: str = "bar",
    unit: str = "parts",
    engine: Engine | None = None,
) -> CellsMade:
    """Does the cells that are not done yet, and gives what all of them gave, each read when it is asked for.

    Args:
        cells: The cells.
        parts: Where they are kept; None keeps them in memory alone. What is given is always what was read from there, so that
            a run that was interrupted gives the very tables that any other gives.
        tell: Told what runs now.
        progress: ``"bar"`` or ``"none"``.
        unit: What a cell is of, in the plural.
        engine: What does the cells; :func:`locally` unless given.

    Raises:
        InputError: A part cannot be written, or cannot be read again.
    """
    parts = parts or _InMemory()
    missing = [cell for cell in cells if parts.read(cell.key) is None]
    if len(missing) < len(cells):
        log.info("going on in %s: %d of %d %s are already there", parts.path, len(cells) - len(missing), len(cells), unit)
    offered = {"keep": parts.keep, "tell": tell or (lambda *_: None), "progress": progress}
    (engine or locally)(missing, offered)
    return CellsMade({cell.key: parts for cell in cells})


class CellsMade(Mapping[str, Made]):
    """What cells gave, read when it is asked for: of many prompts it would fill the memory."""

    def __init__(self, parts: Mapping[str, Parts | _InMemory]) -> None:
        self._parts = dict(parts)

    def __getitem__(self, key: str) -> Made:
        parts = self._parts[key]
        if (part := parts.read(key)) is None:
            raise InputError(f"part {key!r} in folder {str(parts.path)!r} is not what was written: check the disk.")
        return part

    def __contains__(self, key: object) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __or__(self, other: CellsMade) -> CellsMade:
        return CellsMade(self._parts | other._parts)


def locally(cells: Sequence[Cell], offered: Mapping[str, Any]) -> None:
    """Does cells in this process, one after another."""
    for group in groups(cells):
        run_alike(group, offered)


def groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that follow each other with the same function and settings, together."""
    for _, group in itertools.groupby(cells, lambda cell: (cell.function, cell.settings)):
        yield list(group)


def run_alike(cells: Sequence[Cell], offered: Mapping[str, Any]) -> None:
    """Does cells that have their function and settings in common.

    Args:
        cells: The cells.
        offered: ``keep``, ``tell`` and ``progress``.
    """
    function = imported(cells[0].function)
    takes = inspect.signature(function).parameters
    given = {name: offered[name] for name in offered if name in takes}
    if "keep" in given:
        with unshared():
            function(keys=[cell.key for cell in cells], **cells[0].settings, **given)
        return
    for cell in cells:
        if cell.told:
            offered["tell"](cell.told)
        made = function(**cell.settings, **given)
        tables, about = made if isinstance(made, tuple) else (made, {})
        offered["keep"](cell.key, {"table": tables} if isinstance(tables, pd.DataFrame) else tables, about)


def joined(made: Mapping[str, Made]) -> dict[str, pd.DataFrame]:
    """The tables of all cells by name, those of one below those of another."""
    return stacked(tables for tables, _ in made.values())


def stacked(several: Iterable[Mapping[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Tables by name, each the tables of that name one below the other."""
    found: dict[str, list[pd.DataFrame]] = {}
    for tables in several:
        for name, table in tables.items():
            found.setdefault(name, []).append(table)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def imported(name: str) -> Callable[..., Any]:
    """The function of an import name, ``package.module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


# Models ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _loaded(given: str) -> Any:
    settings = json.loads(given)
    return imported(settings.pop("loader", MODEL_LOADER))(**settings)


def loaded(model: Mapping[str, Any]) -> Any:
    """The model of plain settings, an adapter: loaded once for all the cells that name it.

    Args:
        model: What :func:`kvinterp.models.load_model` is given, or the function that ``loader`` names.
    """
    return _loaded(json.dumps(dict(model), sort_keys=True))


@contextlib.contextmanager
def loading_once() -> Iterator[None]:
    """Within it a model is loaded once; behind it none is held, and a checkpoint that was edited is read again."""
    _loaded.cache_clear()
    try:
        yield
    finally:
        _loaded.cache_clear()


# Parts -----------------------------------------------------------------------------------------------------------------


class Parts:
    """What cells gave, kept as it is made, so that an interrupted run of many goes on where it stopped.

    Whoever uses it holds the folder's :class:`kvinterp.locks.Lock`.

    Args:
        path: The folder of the result.
        settings: What decides the numbers, as plain JSON values: ``made_with`` holds the circumstances (versions, device,
            threads, weights), the rest what was chosen, ``verb`` among it.
        existing: ``"error"`` or ``"overwrite"``: whether an unfinished result of other choices may be replaced. It is
            removed once this one is finished.

    Raises:
        InputError: There is an unfinished result of other choices, which may not be replaced; or parts that kvinterp did
            not make.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], existing: str = "error") -> None:
        self.settings: dict[str, Any] = json.loads(strict_json(settings))
        self.path, self._above = path, path / FOLDER
        text = json.dumps(self.settings, indent=1, sort_keys=True)
        self.folder = self._above / hashlib.sha256(text.encode()).hexdigest()[:16]
        with told(path):
            if foreign := foreign_parts(path):
                raise InputError(foreign)
            for held in _held(self._above):
                self._beside(held, existing)
            self.folder.mkdir(parents=True, exist_ok=True)
            _sweep(self.folder, PARTIAL)
            if not (self.folder / _SETTINGS).exists():
                with replaced(self.folder / _SETTINGS) as partial:
                    partial.write(text.encode())

    def keep(self, key: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None) -> None:
        """Keeps one part, whole or not at all.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, frame in tables.items():
                table = io.BytesIO()
                frame.to_parquet(table, index=False)
                # Without a date, so that equal parts are equal files.
                archive.writestr(zipfile.ZipInfo(f"{name}.parquet"), table.getvalue())
            named = {"part": key, "run": self.folder.name, "about": dict(about or {})}
            archive.writestr(zipfile.ZipInfo(_ABOUT), json.dumps(named))
        content = packed.getvalue()
        with told(self.path), replaced(self._place(key)) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def read(self, key: str) -> Made | None:
        """The tables of a part and what belongs to it; None where there is none.

        One whose bytes are not those that were written is set aside, and there is none.
        """
        place = self._place(key)
        if not is_plain(place):
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, ArrowException):
            # What is read is what was checked: the bytes are taken once.
            content = place.read_bytes()
            if content[:32] == hashlib.sha256(content[32:]).digest():
                with zipfile.ZipFile(io.BytesIO(content[32:])) as archive:
                    found = {name: archive.read(name) for name in archive.namelist()}
                named = json.loads(found.pop(_ABOUT))
                if (named["part"], named["run"]) == (key, self.folder.name):
                    tables = {name.removesuffix(".parquet"): pd.read_parquet(io.BytesIO(c)) for name, c in found.items()}
                    return tables, named["about"]
        log.warning("part %s in %s is damaged: it is set aside and made again", key, self.path)
        with told(self.path):
            place.rename(self.folder / f".damaged.{key}.{secrets.token_hex(8)}")
        return None

    def among(self, keys: Iterable[str]) -> Mapping[str, Made]:
        """The parts of these keys that are there, each read when it is asked for."""
        return CellsMade({key: self for key in keys if self.read(key) is not None})

    def withdraw(self) -> None:
        """Leaves no trace where no part was made."""
        _vacate(self.folder)
        with contextlib.suppress(OSError):
            self._above.rmdir()

    def _place(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _beside(self, held: Path, existing: str) -> None:
        if held == self.folder or not _holds_parts(held):
            return
        settings = read_json(held / _SETTINGS)
        if settings is None:
            if existing != "overwrite":
                raise InputError(
                    f"folder {str(self.path)!r} holds an unfinished run whose settings cannot be read: {ADVICE}"
                )
        elif _choices(settings) != _choices(self.settings):
            if existing != "overwrite":
                raise InputError(unlike(self.path, "an unfinished run", settings, self.settings))
            log.warning("an unfinished run in %s is removed once this one is finished: --overwrite was given", self.path)
        else:
            changed = differences(settings.get("made_with") or {}, self.settings.get("made_with") or {})
            log.warning("what an unfinished run left in %s was made with other %s: it is made again", self.path, changed)


class _InMemory:
    """Parts of a run that writes nothing."""

    path = Path()

    def __init__(self) -> None:
        self._made: dict[str, Made] = {}

    def keep(self, key: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None) -> None:
        self._made[key] = dict(tables), dict(about or {})

    def read(self, key: str) -> Made | None:
        return self._made.get(key)


def unlike(path: Path, what: str, held: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The sentence about a result that was made with other settings."""
    return f"folder {str(path)!r} holds {what} made with other settings ({differences(held, now)}): {ADVICE}"


def has_parts(path: Path) -> bool:
    """Whether a folder holds at least one part of an unfinished run."""
    return any(map(_holds_parts, _held(path / FOLDER)))


def unfinished_runs(path: Path) -> list[dict[str, Any]]:
    """The settings of every unfinished run that has a part in a folder."""
    return [read_json(held / _SETTINGS) or {} for held in _held(path / FOLDER) if _holds_parts(held)]


def foreign_parts(path: Path) -> str | None:
    """Says what in the place for parts kvinterp did not put there; None where there is nothing."""
    above = path / FOLDER
    if not is_there(above) or (_is_folder(above) and all(map(_is_ours, above.iterdir()))):
        return None
    move = "choose another folder with --out, or move it away."
    return f"folder {str(path)!r} holds {FOLDER!r}, which kvinterp did not write: {move}"


def remove_parts(path: Path) -> None:
    """Removes parts; a file among them that kvinterp did not make stays."""
    for held in _held(path / FOLDER):
        # The settings last: what a removal that is cut off leaves is still known to be kvinterp's.
        _sweep(held, _PART, _ASIDE, PARTIAL)
        _vacate(held)
    with contextlib.suppress(OSError):
        (path / FOLDER).rmdir()


def _choices(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "made_with"}


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _held(above: Path) -> list[Path]:
    return sorted(filter(_is_ours, above.iterdir())) if _is_folder(above) else []


def _holds_parts(held: Path) -> bool:
    return any(_PART.fullmatch(place.name) is not None and is_plain(place) for place in held.iterdir())


def _is_ours(held: Path) -> bool:
    # A folder of parts names itself by what it was made with; before its settings are there it holds nothing else.
    if not (_KEY.fullmatch(held.name) and _is_folder(held)):
        return False
    return is_plain(held / _SETTINGS) or all(PARTIAL.fullmatch(place.name) for place in held.iterdir())


def _vacate(held: Path) -> None:
    """Removes a folder of parts that holds its settings alone."""
    if not any(place.name != _SETTINGS for place in held.iterdir()):
        (held / _SETTINGS).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        held.rmdir()


def _sweep(held: Path, *names: re.Pattern[str]) -> None:
    for place in list(held.iterdir()):
        if is_plain(place) and any(name.fullmatch(place.name) for name in names):
            place.unlink(missing_ok=True)
