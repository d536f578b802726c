"""Files that are there whole or not at all, and files of others that are read without harm."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvinterp.errors import InputError, shown

SUMMARY = "summary.json"
"""The file that every finished result has."""
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.kvinterp-partial")


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raises where no file can be made in a folder, which is left as it was.

    Args:
        folder: The folder; it need not exist.
        option: The option that it was given with.

    Raises:
        InputError: It is no folder, or cannot be written.
    """
    with told(folder, option):
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # A name that none can have is said now, not after the work.
        place = next(place for place in (folder, *folder.parents) if is_there(place))
        probe = place / partial_name("probe")
        os.close(_made_anew(probe))
        probe.unlink()


def check_target(path: Path, option: str, suffix: str = "") -> None:
    """Raises where a file cannot be written, or would take the place of something that is no plain file.

    Args:
        path: The file.
        option: The option that it was given with.
        suffix: What its name has to end with.

    Raises:
        InputError: It is a folder, a link or a device, cannot be written, or has another ending.
    """
    try:
        taken = is_there(path) and not is_plain(path)
    except OSError as error:
        raise InputError(
            f"{option} {shown(path)} cannot be written ({error.strerror}): expected the name of a file."
        ) from error
    if taken:
        what = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "no plain file"
        raise InputError(f"{option} {shown(path)} is {what}: expected the name of a file that can be written.")
    if suffix and path.suffix.lower() != suffix:
        raise InputError(f"{option} {shown(path)} was given: expected a name that ends with {suffix}.")
    check_writable(path.parent, option)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, renamed to ``path`` at the end: there is the whole file or none.

    Its name cannot be foreseen, and it is made anew: what somebody else planted is never written through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(partial_name(path.name))
    with os.fdopen(_made_anew(partial), "w+b") as file:
        try:
            yield file
            file.flush()
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()


def partial_name(name: str) -> str:
    """A hidden name for what becomes ``name``: nobody can foresee it, and :func:`sweep_partials` knows it again."""
    return f".{name}.{secrets.token_hex(16)}.kvinterp-partial"


def sweep_partials(folder: Path) -> None:
    """Removes what a killed process left half written, figures too."""
    for place in (folder, folder / "figures"):
        for path in [] if place.is_symlink() else place.glob(".*.kvinterp-partial"):
            if _PARTIAL.fullmatch(path.name) and is_plain(path):
                with contextlib.suppress(OSError):
                    path.unlink()


@contextlib.contextmanager
def told(path: Path, option: str = "--out") -> Iterator[None]:
    """Turns what the system says about a folder into one sentence, with the option that names another."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        named = str(path) if len(str(path)) <= 100 else f"{str(path)[:100]}..."
        raise InputError(f"folder {named!r} cannot be written ({reason}): choose another with {option}.") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is none that can be read."""
    try:
        read = json.loads(bytes_of(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


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


_NO_FILES = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def opened(path: Path, most: int | None = None) -> IO[bytes]:
    """A file that somebody else wrote, or a link to one, open for reading; what is no file is not waited for.

    A pipe may never answer and a device never end, so it is asked what it is before it is opened, and once more after.

    Args:
        path: Where it is.
        most: The most bytes it may have, if there is a bound.

    Raises:
        OSError: It is not there, cannot be opened, is no file, or is longer than that.
    """
    _check_file(path.stat(), path, most)
    # Not every system has each of these.
    flags = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
    file = os.fdopen(os.open(path, os.O_RDONLY | flags), "rb")
    try:
        _check_file(os.fstat(file.fileno()), path, most)
    except OSError:
        file.close()
        raise
    return file


def _check_file(found: os.stat_result, path: Path, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = _NO_FILES.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {what} and no file", str(path))
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than the {most:,} that are read", str(path))


def bytes_of(path: Path, most: int | None = None) -> bytes:
    """The content of a file that somebody else wrote.

    Raises:
        OSError: As :func:`opened` says, or it cannot be read to its end.
    """
    with opened(path, most) as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than the {most:,} bytes that are read", str(path))
    return content


def is_there(path: Path) -> bool:
    """Whether the name is taken, be it by a link that leads nowhere."""
    return path.is_symlink() or path.exists()


def is_plain(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def _made_anew(path: Path) -> int:
    # O_NOFOLLOW is not on Windows; with O_EXCL no link is followed anyway.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


is_file, is_folder = os.path.isfile, os.path.isdir
"""Whether a file, a folder is there; no for what nothing can be called."""
