"""Files that are there whole or not at all, and a record of which ones kvinterp wrote: no other is replaced or removed.

What is read back says itself what it is: a JSON file that is sealed holds the digests of the files beside it and its own, so
that no number in it is read or printed that kvinterp did not write.

A folder that holds a result has a hidden record, ``.kvinterp.json``, of the names that were written into it (and into the
folders right under it) and of their contents. A file that is not in it, or that was changed since, belongs to somebody else.
The record itself may come from anybody: a name in it that leads out of the folder, or to a hidden file, is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvinterp.errors import InputError, shown

_RECORD = ".kvinterp.json"
_KEPT = 2
_PNG_MARK = b"Software\0kvinterp"
_OWN_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")
PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.kvinterp-partial")


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
        return next((cls(folder) for folder in (path.parent, path.parent.parent) if is_there(folder / _RECORD)), None)

    def open(self) -> None:
        """Begins a record where there is none; from then on :func:`write_whole` keeps it."""
        if not is_there(self._path):
            self._save({"files": {}})

    def begin(self, about: Mapping[str, Any], leaving: Iterable[str] = ()) -> None:
        """Says that a result is being written: until :meth:`finish` it is not finished, whatever files are there.

        Args:
            about: What the result is, as plain JSON values.
            leaving: Names that this result takes the place of; those of a result that was cut off here are added.
        """
        read = self._read()
        old = {*leaving, *read.get("leaving", ()), *read.get("written", ())}
        self._save({"files": read["files"], "unfinished": dict(about), "written": [], "leaving": sorted(old)})

    def unfinished(self) -> dict[str, Any] | None:
        """What result is being written here, None where everything is finished."""
        return self._read().get("unfinished")

    def finish(self) -> None:
        """Says that the result is whole, and removes what it takes the place of."""
        read = self._read()
        if "unfinished" in read:
            self.remove(keep=set(read["files"]) - set(read["leaving"]) | set(read["written"]))
            self._save({"files": self._read()["files"]})

    def expect(self, path: Path, digest: str) -> None:
        """Says that a file is about to be there: before it is, so that no interruption leaves one without a name."""
        read, name = self._read(), self._name(path)
        if not _is_own_name(name):
            return
        digests = list(dict.fromkeys([digest, *read["files"].get(name, [])]))[:_KEPT]
        read["files"][name] = digests
        if "unfinished" in read:
            read["written"] = sorted({*read["written"], name})
        self._save(read)

    def holds(self, path: Path) -> bool:
        """Whether kvinterp wrote this file and nobody changed it since."""
        digests = self._read()["files"].get(self._name(path), [])
        return bool(digests) and self._is_inside(path) and digest_of(path) in digests

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Those of the names in the folder that are there and that kvinterp did not write."""
        return [name for name in names if is_there(self.folder / name) and not self._ours(self.folder / name)]

    def names(self) -> frozenset[str]:
        """The names of everything that was written."""
        return frozenset(self._read()["files"])

    def remove(self, keep: Iterable[str] = ()) -> None:
        """Removes the files that kvinterp wrote and nobody changed since, and the folders that this leaves empty.

        Args:
            keep: Names that stay.
        """
        read, kept = self._read(), set(keep)
        files = read["files"]
        for name in [name for name in files if name not in kept]:
            path = self.folder / name
            if self.holds(path):
                path.unlink()
                if path.parent != self.folder:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()
            if not is_there(path):
                del files[name]
        if files or "unfinished" in read:
            self._save(read)
        else:
            self._path.unlink(missing_ok=True)

    def _ours(self, path: Path) -> bool:
        # A figure says itself who drew it; those that were saved on their own are in no record.
        return self.holds(path) or (path.suffix == ".png" and self._is_inside(path) and _PNG_MARK in _beginning(path))

    def _is_inside(self, path: Path) -> bool:
        return is_plain(path) and (path.parent == self.folder or not path.parent.is_symlink())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _read(self) -> dict[str, Any]:
        if self._path.is_symlink():
            raise self._not_ours("is a link")
        read = read_json(self._path) or {}
        files, lists = read.get("files", {}), {name: read.get(name, []) for name in ("written", "leaving")}
        wrong = [value for value in (files, read.get("unfinished", {})) if not isinstance(value, dict)]
        if wrong or not all(isinstance(value, list) for value in lists.values()):
            raise self._not_ours("cannot be read")
        astray = next((n for n in (*files, *lists["written"], *lists["leaving"]) if not _is_own_name(n)), None)
        if astray is not None:
            raise self._not_ours(f"names {astray!r}, which lies outside of the folder or is hidden")
        kept = {
            name: [d for d in digests if isinstance(d, str)] for name, digests in files.items() if isinstance(digests, list)
        }
        marks = {"unfinished": read["unfinished"], **lists} if "unfinished" in read else {}
        return {"files": kept, **marks}

    def _not_ours(self, what: str) -> InputError:
        return InputError(
            f"the record {str(self._path)!r} {what}: kvinterp wrote no such record; choose another folder with --out, or "
            "move it away."
        )

    def _save(self, read: Mapping[str, Any]) -> None:
        about = "the files that kvinterp wrote here; it replaces and removes no others"
        with told(self.folder), replaced(self._path) as partial:
            partial.write(json.dumps({"about": about, **read}, indent=1).encode())


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is there whole or not at all; its folder is made.

    Raises:
        InputError: It cannot be written, or it would replace a file that kvinterp did not write into a result's folder.
    """
    with told(path.parent), whole(path) as partial:
        # Of a file's name that is no UTF-8, which a page may show, an escape is written.
        partial.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raises where no file can be made in a folder, which is left as it was.

    Args:
        folder: The folder; it need not exist.
        option: The option that it was given with.

    Raises:
        InputError: It is no folder, or cannot be written.
    """
    with told(folder, option):
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
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to; at the end it becomes ``path``, and the result's record knows of it.

    Raises:
        InputError: There is a file that kvinterp did not write, in a result's folder.
    """
    record = Record.over(path)
    if record is not None:
        refuse_foreign(record, [path.relative_to(record.folder).as_posix()])
    with replaced(path) as partial:
        yield partial
        if record is not None:
            partial.seek(0)
            record.expect(path, _digest(partial))


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
    """Removes what a killed process left half written, figures too; to be called only by who holds the folder."""
    for place in (folder, folder / "figures"):
        for path in [] if place.is_symlink() else place.glob(".*.kvinterp-partial"):
            if PARTIAL.fullmatch(path.name) and is_plain(path):
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


def sealed(name: str, content: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """The text of a JSON file that holds, under ``sha256``, the digests of files beside it and its own.

    Args:
        name: The file's own name.
        content: What it says.
        files: The digests of other files by their names.
    """
    whole_one = json.loads(strict_json({**content, "sha256": dict(files)}))
    whole_one["sha256"][name] = _seal(whole_one)
    return json.dumps(whole_one, indent=1) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    """What a file that :func:`sealed` made says.

    Raises:
        InputError: There is none, or one that was changed since, or one that was never sealed.
    """
    folder, content = f"folder {str(path.parent)!r}", read_json(path)
    if content is None:
        raise InputError(f"{folder} holds no readable {path.name}: give a folder that kvinterp wrote.")
    digests = content.get("sha256")
    digest = digests.pop(path.name, None) if isinstance(digests, dict) else None
    if digest is None:
        raise InputError(
            f"{folder} holds a {path.name} without a digest of its own: it is another tool's, was cut, or is of an earlier "
            "version of kvinterp; make it again by the same command with --overwrite, or save it again."
        )
    if digest != _seal(content):
        raise InputError(
            f"{folder} holds a {path.name} that is not as kvinterp wrote it: it was changed or damaged since; move the folder "
            "away and make it again."
        )
    return content


def _seal(content: Mapping[str, Any]) -> str:
    """The digest of what a file says, however it is laid out."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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


def bytes_with(path: Path, digest: str) -> bytes | None:
    """The content of a file that has this SHA-256; None where it has another, however large it is.

    Raises:
        OSError: As :func:`opened` says, or it cannot be read to its end.
    """
    with opened(path) as file:
        if path.suffix == ".parquet":
            # Its last bytes tell of one that is cut, or is the hole of a disk, sooner than a digest of gigabytes.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4))
            if file.read() != b"PAR1":
                return None
            file.seek(0)
        if _digest(file) != digest:
            return None
        file.seek(0)
        content = file.read()
    # What is read is what was checked.
    return content if hashlib.sha256(content).hexdigest() == digest else None


def is_there(path: Path) -> bool:
    """Whether the name is taken, be it by a link that leads nowhere."""
    return path.is_symlink() or path.exists()


def is_plain(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with opened(path) as file:
        return _digest(file)


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


def _is_own_name(name: Any) -> bool:
    parts = name.split("/") if isinstance(name, str) else []
    return 1 <= len(parts) <= 2 and all(map(_OWN_NAME.fullmatch, parts))


def _made_anew(path: Path) -> int:
    # O_NOFOLLOW is not on Windows; with O_EXCL no link is followed anyway.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


def is_file(path: Path) -> bool:
    """Whether a file is there; no for what no file can be called."""
    return _is(Path.is_file, path)


def is_folder(path: Path) -> bool:
    """Whether a folder is there; no for what no folder can be called."""
    return _is(Path.is_dir, path)


def _is(asked: Callable[[Path], bool], path: Path) -> bool:
    try:
        return asked(path)
    # Longer than a name can be, or with a character that no name can have.
    except (OSError, ValueError):
        return False
