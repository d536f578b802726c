"""Files that are there whole or not at all, and a record of which ones kvinterp wrote: no other is replaced or removed.

A folder that holds a result has a hidden record, ``.kvinterp.json``, of the names that were written into it (and into the
folders right under it) and of their contents. A file that is not in it, or that was changed since, belongs to somebody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvinterp.errors import InputError

__all__ = ["Lock", "Record", "read_json", "refuse_foreign", "replaced", "told", "whole", "write_whole"]

_RECORD, _LOCK = ".kvinterp.json", ".kvinterp.lock"
_KEPT = 2
_PNG_MARK = b"Software\0kvinterp"


class Record:
    """What kvinterp wrote into a folder.

    Args:
        folder: The folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / _RECORD

    @classmethod
    def over(cls, path: Path) -> Record | None:
        """The record that a file belongs in: of its folder or of the one above, None where neither has one."""
        return next((cls(folder) for folder in (path.parent, path.parent.parent) if (folder / _RECORD).is_file()), None)

    def open(self) -> None:
        """Begins a record where there is none; from then on :func:`write_whole` keeps it."""
        if not self._path.is_file():
            self._save({})

    def expect(self, path: Path, digest: str) -> None:
        """Says that a file is about to be there: before it is, so that no interruption leaves one without a name."""
        files, name = self._files(), self._name(path)
        self._save({**files, name: list(dict.fromkeys([digest, *files.get(name, [])]))[:_KEPT]})

    def holds(self, path: Path) -> bool:
        """Whether kvinterp wrote this file and nobody changed it since."""
        digests = self._files().get(self._name(path), [])
        return bool(digests) and _is_plain(path) and _digest(path) in digests

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Those of the names in the folder that are there and that kvinterp did not write."""
        return [name for name in names if _there(self.folder / name) and not self._ours(self.folder / name)]

    def names(self) -> frozenset[str]:
        """The names of everything that was written."""
        return frozenset(self._files())

    def remove(self, keep: Iterable[str] = ()) -> None:
        """Removes the files that kvinterp wrote and nobody changed since, and the folders that this leaves empty.

        Args:
            keep: Names that stay.
        """
        files, kept = self._files(), set(keep)
        for name in [name for name in files if name not in kept]:
            path = self.folder / name
            if self.holds(path):
                path.unlink()
                if path.parent != self.folder:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()
            if not _there(path):
                del files[name]
        if files:
            self._save(files)
        else:
            self._path.unlink(missing_ok=True)

    def _ours(self, path: Path) -> bool:
        # A figure says itself who drew it; those that were saved on their own are in no record.
        return self.holds(path) or (path.suffix == ".png" and _is_plain(path) and _PNG_MARK in path.read_bytes()[:4096])

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _files(self) -> dict[str, list[str]]:
        files = (read_json(self._path) or {}).get("files")
        return files if isinstance(files, dict) else {}

    def _save(self, files: dict[str, list[str]]) -> None:
        about = "the files that kvinterp wrote here; it replaces and removes no others"
        with told(self.folder), replaced(self._path) as partial:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"about": about, "files": files}, indent=1), encoding="utf-8")


class Lock:
    """Keeps a second process out of a folder; a lock whose process is gone is taken over.

    Args:
        folder: The folder, which exists.

    Raises:
        InputError: Another process is at work there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / _LOCK
        self._mine = f"{os.getpid()} {socket.gethostname()}"
        with told(folder):
            while not self._taken():
                self._clear_away(self._holder())

    def release(self) -> None:
        """Lets others in."""
        with contextlib.suppress(OSError):
            if self._holder() == self._mine:
                self._path.unlink()

    def _taken(self) -> bool:
        try:
            with self._path.open("x", encoding="utf-8") as file:
                file.write(self._mine)
        except FileExistsError:
            return self._holder() == self._mine
        return True

    def _holder(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def _clear_away(self, holder: str | None) -> None:
        if holder is None:
            return
        number, _, host = holder.partition(" ")
        if host != socket.gethostname() or not _gone(number):
            raise InputError(
                f"folder {str(self.folder)!r} is being written by another process ({holder or 'not named yet'}): wait for "
                f"it, choose another with --out, or remove {str(self._path)!r} where that process is gone."
            )
        aside = self._path.with_name(f"{_LOCK}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(aside)
            if aside.read_text(encoding="utf-8", errors="replace") == holder:
                aside.unlink()
            else:
                # Somebody else took it over in between, and this is theirs.
                aside.rename(self._path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is there whole or not at all; its folder is made.

    Raises:
        InputError: It cannot be written, or it would replace a file that kvinterp did not write into a result's folder.
    """
    with told(path.parent), whole(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def refuse_foreign(record: Record, names: Iterable[str]) -> None:
    """Raises where a file that kvinterp did not write has one of the names that it needs.

    Args:
        record: The folder's record.
        names: The names, relative to the folder.

    Raises:
        InputError: There is one.
    """
    foreign = record.foreign(names)
    if foreign:
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise InputError(
            f"folder {str(record.folder)!r} holds {foreign[0]!r}{more}, which kvinterp did not write or which was changed "
            "since, and which would have to be replaced: choose another folder with --out, or move it away."
        )


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write to; at the end it becomes ``path``, and the result's record knows of it.

    Raises:
        InputError: There is a file that kvinterp did not write, in a result's folder.
    """
    record = Record.over(path)
    if record is not None:
        refuse_foreign(record, [path.relative_to(record.folder).as_posix()])
    with replaced(path) as partial:
        yield partial
        if record is not None:
            record.expect(path, _digest(partial))


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A place to write to, renamed to ``path`` at the end: there is the whole file or none."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns what the system says about a folder into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        shown = str(path) if len(str(path)) <= 100 else f"{str(path)[:100]}..."
        raise InputError(f"folder {shown!r} cannot be written ({reason}): choose another with --out.") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is none that can be read."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _gone(process: str) -> bool:
    # On Windows the signal 0 would not ask but interrupt.
    if os.name == "nt" or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
