"""What an unfinished run has finished: parts, each whole or not there at all, with digests that are checked when it is read.

``DIR/.parts/KEY/NAME`` holds the tables of one part. KEY is the digest of everything that decides the numbers: a run under
other threads, kernels, weights or versions has parts of its own, so what was made differently is never joined.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import ArrowException

from kvinterp.errors import InputError
from kvinterp.files import digest_of, is_plain, is_there, partial_name, read_json, replaced, told

__all__ = [
    "ADVICE",
    "Parts",
    "differences",
    "foreign_parts",
    "has_parts",
    "remove_parts",
    "strict_json",
    "unfinished_runs",
    "unlike",
]

log = logging.getLogger("kvinterp")

ADVICE = "choose another folder with --out, or pass --overwrite."
FOLDER = ".parts"
_KEY, _SETTINGS, _DIGESTS, _ABOUT = re.compile(r"[0-9a-f]{16}"), "settings.json", "sha256.json", "about.json"
_NAME, _FILE = re.compile(r"\w[\w.-]*"), re.compile(r"\w+\.parquet|sha256\.json|about\.json")
_ASIDE = re.compile(r"\.damaged\.\w[\w.-]*\.[0-9a-f]{16}")
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.kvinterp-partial")


class Parts:
    """Tables that are kept as they are made, so that an interrupted run of many goes on where it stopped.

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
        text = _settings_text(self.settings)
        self.folder = self._above / _key_of(text)
        with told(path):
            if foreign := foreign_parts(path):
                raise InputError(foreign)
            for held in _held(self._above):
                self._beside(held, existing)
            self.folder.mkdir(parents=True, exist_ok=True)
            _sweep(self.folder)
            if not (self.folder / _SETTINGS).exists():
                with replaced(self.folder / _SETTINGS) as partial:
                    partial.write(text.encode())

    def names(self) -> list[str]:
        """The names of the parts that are there."""
        return sorted(place.name for place in self.folder.iterdir() if _NAME.fullmatch(place.name) and _is_folder(place))

    def keep(self, name: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None) -> None:
        """Keeps one part, whole or not at all.

        Args:
            name: Its name: letters, digits, hyphens and underscores.
            tables: Its tables.
            about: What else belongs to it, as plain JSON values.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        with told(self.path):
            partial = self.folder / partial_name(name)
            partial.mkdir()
            for table, frame in tables.items():
                with replaced(partial / f"{table}.parquet") as file:
                    frame.to_parquet(file, index=False)
            with replaced(partial / _ABOUT) as file:
                file.write(json.dumps(dict(about or {})).encode())
            digests = {path.name: digest_of(path) for path in sorted(partial.iterdir())}
            with replaced(partial / _DIGESTS) as file:
                file.write(json.dumps({"part": name, "key": self.folder.name, "files": digests}).encode())
            partial.rename(self.folder / name)

    def read(self, name: str) -> tuple[dict[str, pd.DataFrame], dict[str, Any]] | None:
        """The tables of a part and what belongs to it; None where there is none.

        One whose bytes are not those that were written is set aside, and there is none.
        """
        place = self.folder / name
        if not _is_folder(place):
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ArrowException):
            written = read_json(place / _DIGESTS) or {}
            names = {path.name for path in place.iterdir() if is_plain(path)} - {_DIGESTS}
            # What is read is what was checked: the bytes are taken once.
            found = {file: (place / file).read_bytes() for file in sorted(names)}
            digests = {file: hashlib.sha256(content).hexdigest() for file, content in found.items()}
            if written == {"part": name, "key": self.folder.name, "files": digests}:
                about = json.loads(found.pop(_ABOUT))
                return {file.removesuffix(".parquet"): pd.read_parquet(io.BytesIO(c)) for file, c in found.items()}, about
        self.set_aside(name)
        return None

    def set_aside(self, name: str) -> None:
        """Takes a part that cannot be used out of the way, and says so: it will be made again."""
        log.warning("part %s in %s is damaged: it is set aside and made again", name, self.path)
        with told(self.path):
            (self.folder / name).rename(self.folder / f".damaged.{name}.{secrets.token_hex(8)}")

    def made(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The table of this name: read if it is there, else made and kept.

        It is always one that was read, so that a run that was interrupted gives the very table that any other gives.
        """
        found = self.read(name)
        if found is None:
            self.keep(name, {"table": make()})
            found = self.read(name)
            if found is None:
                raise InputError(
                    f"part {name!r} in folder {str(self.path)!r} is not what was just written: check the disk."
                )
        return found[0]["table"]

    def withdraw(self) -> None:
        """Leaves no trace where no part was made."""
        if not any(place.name != _SETTINGS for place in self.folder.iterdir()):
            (self.folder / _SETTINGS).unlink(missing_ok=True)
        for place in (self.folder, self._above):
            with contextlib.suppress(OSError):
                place.rmdir()

    def _beside(self, held: Path, existing: str) -> None:
        if held == self.folder:
            return
        settings = read_json(held / _SETTINGS)
        if not _holds_parts(held):
            return
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
    if not is_there(above):
        return None
    ours = _is_folder(above) and all(map(_is_ours, above.iterdir()))
    move = "choose another folder with --out, or move it away."
    return None if ours else f"folder {str(path)!r} holds {FOLDER!r}, which kvinterp did not write: {move}"


def remove_parts(path: Path) -> None:
    """Removes parts; a file among them that kvinterp did not make stays."""
    above = path / FOLDER
    for held in _held(above):
        # The settings last: what a removal that is cut off leaves is still known to be kvinterp's.
        for place in held.iterdir():
            if _is_folder(place) and any(known.fullmatch(place.name) for known in (_NAME, _ASIDE, _PARTIAL)):
                _remove_part(place)
        _sweep(held)
        if not any(place.name != _SETTINGS for place in held.iterdir()):
            (held / _SETTINGS).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            held.rmdir()
    with contextlib.suppress(OSError):
        above.rmdir()


def strict_json(value: Any) -> str:
    """JSON that every reader takes: NaN and what it has no word for become null, infinities and other objects text."""
    return json.dumps(_plain(value), indent=1, allow_nan=False, default=str)


def differences(held: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """What differs between two settings, as ``dtype: float16, now float32; ...``."""
    found = []
    for key in sorted({*held, *now}):
        old, new = held.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [inner] if (inner := differences(old, new, f"{prefix}{key}.")) else []
        elif old != new:
            found.append(f"{prefix}{key}: {_short(old)}, now {_short(new)}")
    return "; ".join(found)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _choices(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "made_with"}


def _settings_text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=1, sort_keys=True)


def _key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _held(above: Path) -> list[Path]:
    if not _is_folder(above):
        return []
    return sorted(place for place in above.iterdir() if _KEY.fullmatch(place.name) and _is_ours(place))


def _holds_parts(held: Path) -> bool:
    return any(_NAME.fullmatch(place.name) is not None and _is_folder(place) for place in held.iterdir())


def _is_ours(held: Path) -> bool:
    # A folder of parts names itself by what it was made with; before its settings are there it holds nothing else.
    if not (_KEY.fullmatch(held.name) and _is_folder(held)):
        return False
    if is_plain(held / _SETTINGS):
        return True
    return all(_PARTIAL.fullmatch(place.name) for place in held.iterdir())


def _sweep(held: Path) -> None:
    for place in held.iterdir():
        if _PARTIAL.fullmatch(place.name):
            _remove_part(place)


def _remove_part(place: Path) -> None:
    if is_plain(place):
        place.unlink(missing_ok=True)
    if not _is_folder(place):
        return
    for file in sorted(place.iterdir(), key=lambda file: file.name == _DIGESTS):
        if is_plain(file) and (_FILE.fullmatch(file.name) or _PARTIAL.fullmatch(file.name)):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(place)
