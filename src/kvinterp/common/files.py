"""Writes files that appear whole or not at all, and JSON that every reader accepts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvinterp.errors import InputError

SUMMARY = "summary.json"
"""The name of the file that every finished result has."""
PARTIAL = ".kvinterp-partial"


def check_writable(folder: Path) -> None:
    """Raises where no file can be created in a folder; the folder stays as it was.

    Args:
        folder: The folder; it need not exist.

    Raises:
        InputError: It is no folder, or cannot be written.
    """
    with explaining_errors(folder):
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # An impossible name raises now, not after the work.
        existing = next(
            existing
            for existing in (folder, *folder.parents)
            if existing.exists() or existing.is_symlink()
        )
        with replaced(existing / "probe", keep=False):
            pass


@contextlib.contextmanager
def replaced(path: Path, keep: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file to write to and renames it to ``path`` at the end, so that there is the whole
    file or none.

    Args:
        path: The file.
        keep: False removes the file instead of renaming it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    with partial.open("xb") as file:
        try:
            yield file
            file.flush()
            if keep:
                os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


@contextlib.contextmanager
def explaining_errors(path: Path) -> Iterator[None]:
    """Turns the system's error about a folder into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        name = str(path) if len(str(path)) <= 100 else f"{str(path)[:100]}..."
        raise InputError(
            f"folder {name!r} cannot be written ({reason}): choose another with --out."
        ) from error


def write_whole(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Writes a file so that it appears whole or not at all; creates its folder.

    Args:
        path: The file.
        content: Its content, or a function that writes it.

    Raises:
        InputError: It cannot be written.
    """

    def write() -> None:
        with replaced(path) as file:
            if callable(content):
                content(file)
            else:
                # A page may show a file name that is not UTF-8: it is written as an escape.
                file.write(
                    content.encode("utf-8", "backslashreplace")
                    if isinstance(content, str)
                    else content
                )

    with explaining_errors(path.parent):
        try:
            write()
        except FileNotFoundError:
            # Another run into this folder finished and removed the half-written file.
            write()


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the object in a file; None where there is none that can be read."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def strict_json(value: Any) -> str:
    """Writes JSON that every reader accepts: NaN becomes null, infinities and objects without a
    JSON form become text.
    """
    return json.dumps(_plain(value), indent=1, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """Lists what differs between two settings, as ``dtype: float16, now float32; ...``."""
    entries = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            entries += [inner] if (inner := differences(old, new, f"{prefix}{key}.")) else []
        elif old != new:
            entries.append(f"{prefix}{key}: {_short(old)}, now {_short(new)}")
    return "; ".join(entries)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def bytes_of(path: Path, most: int | None = None) -> bytes:
    """Reads a file that somebody else wrote.

    Args:
        path: The file.
        most: The largest number of bytes that it may have, if there is a limit.

    Raises:
        OSError: It cannot be read, or is longer than that.
    """
    if not path.is_file():
        raise FileNotFoundError(0, "it is no file", str(path))
    if most is not None and path.stat().st_size > most:
        raise OSError(
            0,
            f"it has {path.stat().st_size:,} bytes, more than the {most:,} that are read",
            str(path),
        )
    return path.read_bytes()


is_file, is_folder = os.path.isfile, os.path.isdir
"""Whether a file or a folder exists; False, and no error, for an impossible name."""
