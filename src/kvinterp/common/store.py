"""The store of a folder: one hidden SQLite file, ``.kvinterp.db``, that says what in the folder is kvinterp's.

It holds the names and digests of the files that kvinterp wrote there (no other is replaced or removed), what result is being
written, and what the cells of an unfinished one gave. A change is a transaction: it is there whole or not at all, whenever the
process is killed. Who writes holds the file, so that a second writer is refused, and the system lets go of it with the
process, however that ends. Each cell has a digest that is checked when it is read. The file may come from anybody: a
name in it that leads out of the folder, or to a hidden file, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import re
import secrets
import sqlite3
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import pandas as pd
from pyarrow import ArrowException

from kvinterp.common.files import (
    SUMMARY,
    check_writable,
    differences,
    digest_in,
    digest_of,
    is_plain,
    is_there,
    replaced,
    strict_json,
    sweep_partials,
    told,
)
from kvinterp.errors import InputError, unknown

log = logging.getLogger("kvinterp")

FILE = ".kvinterp.db"
ADVICE = "choose another folder with --out, or pass --overwrite (from Python, existing='overwrite')."
EXISTING = {
    "error": "a finished result is never touched; an unfinished one with the same settings is taken up again",
    "overwrite": "what kvinterp wrote there before is removed once the new result is there",
    "use": "a finished result with the same settings is read instead of computed again",
}
Made = tuple[dict[str, pd.DataFrame], dict[str, Any]]
"""What a cell gave: tables by name, and what else belongs to them as plain JSON values."""

_MOVE = "choose another folder with --out, or move it away."
_APPLICATION = 0x6B760001
_OLDER = (".kvinterp.json", ".kvinterp.lock", ".parts")
_SCHEMA = f"""
pragma auto_vacuum=full;
begin;
create table written(name text, sha text, state int, primary key(name, sha));
create table run(run text primary key, choices text, settings text);
create table cell(run text, key text, sha text, content blob, primary key(run, key));
pragma application_id={_APPLICATION};
commit;
"""
_SETTLED, _NEW, _LEAVING = range(3)
"""The states of a file: of a finished result or of none; of the one that is being written; of one that it takes the place of."""
_RESULT, _ABOUT = "result", "about"
"""The key under which ``run`` holds what result is being written; what of a cell is no table."""
_KEPT = 2
"""So many digests of a file are known: killed before a new content is there, the old one is still kvinterp's."""
_PNG_MARK = b"Software\0kvinterp"
_OWN_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")
_Store = TypeVar("_Store", bound="Store")
_held: weakref.WeakValueDictionary[tuple[Path, int], Store] = weakref.WeakValueDictionary()


def _refuse_older(folder: Path) -> None:
    for name in _OLDER:
        if is_there(folder / name):
            raise InputError(f"folder {str(folder)!r} holds {name!r} of an earlier version of kvinterp: {_MOVE}")


def _opened(folder: Path) -> sqlite3.Connection:
    _refuse_older(folder)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / FILE
    if not all(map(is_plain, folder.glob(f"{FILE}*"))):
        raise _not_ours(folder)
    db = sqlite3.connect(place, timeout=0, check_same_thread=False)
    try:
        # One in which there is nothing is new, or whoever made it was killed meanwhile: then it has a size all the same.
        if (made := _made_of(db)) == _NOTHING:
            db.executescript(_SCHEMA)
            made = _made_of(db)
        # Views and triggers are code, which SQLite would run for whoever put them there.
        if made != _ours():
            raise _not_ours(folder)
    except BaseException:
        db.close()
        raise
    return db


_NOTHING = [(0,)]


def _made_of(db: sqlite3.Connection) -> list[Any]:
    """Whose a database is, and every table, index, view and trigger of it."""
    return (
        db.execute("pragma application_id").fetchall()
        + db.execute("select type, name, sql from sqlite_master order by name").fetchall()
    )


@functools.cache
def _ours() -> list[Any]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        return _made_of(db)


def _not_ours(folder: Path) -> InputError:
    return InputError(f"folder {str(folder)!r} holds {FILE!r}, which this version of kvinterp did not write: {_MOVE}")


@contextlib.contextmanager
def _answers(folder: Path) -> Iterator[None]:
    """Turns what SQLite says about a folder's store into one sentence."""
    with told(folder):
        try:
            yield
        except sqlite3.Error as error:
            # Its codes are not to be had in Python 3.10.
            if "is locked" in str(error):
                raise InputError(
                    f"folder {str(folder)!r} is being written by another process: wait until it is done, or choose another "
                    "folder with --out."
                ) from error
            if "is not a database" in str(error):
                raise _not_ours(folder) from error
            if "malformed" in str(error):
                raise InputError(f"folder {str(folder)!r} holds {FILE!r}, which is damaged ({error}): {_MOVE}") from error
            raise OSError(str(error)) from error


class Store:
    """The store of a folder; it is made when something is first written to it.

    Within ``with store:`` everybody else is kept out, and the thread that holds it may hold it again; asked without that, the
    store is open for a moment.

    A run, whose cells it keeps, has the digest of everything that decides its numbers: one under other threads, kernels, weights
    or versions has cells of its own, so what was made differently is never joined. Whoever keeps cells holds the store.

    Args:
        folder: The folder; it need not exist. One that is made for nothing is removed again at the release.
        settings: What decides the numbers of a run, see :meth:`for_run`.

    Raises:
        InputError: Another process or thread is at work there, or the folder cannot be written.
    """

    run = ""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.db: Any = None
        self.folder, self._made = folder, list[Path]()
        if settings is not None:
            self.for_run(settings)

    # Who is at work ----------------------------------------------------------------------------------------------------

    def __enter__(self: _Store) -> _Store:
        return self if self.db is not None else self.hold()

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self: _Store) -> _Store:
        """Keeps everybody else out, until it is released."""
        with _answers(self.folder):
            self._made = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            try:
                self._key = self.folder.resolve(), threading.get_ident()
                # Referred to, so that it is held for as long as anybody within counts on it.
                self._outer = _held.get(self._key)
                if self._outer is None:
                    self.db = _taken(self.folder)
                    _held[self._key] = self
            except BaseException:
                self._leave()
                raise
        return self

    def release(self) -> None:
        """Lets others in; what was made for nothing is gone again."""
        if self.db is None:
            return
        with contextlib.suppress(OSError, sqlite3.Error):
            if self.db.execute("select (select count(*) from written) + (select count(*) from run)").fetchone() == (0,):
                for name in (FILE, f"{FILE}-journal"):
                    (self.folder / name).unlink(missing_ok=True)
        self.db.close()
        self.db = None
        del _held[self._key]
        self._leave()

    def __del__(self) -> None:
        # A connection is in a circle with its cache: whoever forgets to let others in does so now, not when circles are sought.
        if self.db is not None:
            self.db.close()

    def _leave(self) -> None:
        for place in self._made:
            with contextlib.suppress(OSError):
                place.rmdir()

    # What is written -----------------------------------------------------------------------------------------------------

    @classmethod
    def over(cls, path: Path) -> Store | None:
        """The store that a file belongs in: of its folder or of the one above, None where neither has one."""
        return next((cls(folder) for folder in (path.parent, path.parent.parent) if is_there(folder / FILE)), None)

    @contextlib.contextmanager
    def changed(self) -> Iterator[sqlite3.Connection]:
        """The store, within one transaction; it is made where there is none."""
        with _answers(self.folder):
            lock = _held.get((self.folder.resolve(), threading.get_ident()))
            db = _opened(self.folder) if lock is None else lock.db
            try:
                with db:
                    yield db
            finally:
                if lock is None:
                    db.close()

    def rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        """What a query gives; nothing where there is no store."""
        with _answers(self.folder):
            if not is_there(self.folder / FILE):
                _refuse_older(self.folder)
                return []
        with self.changed() as db:
            return db.execute(sql, given).fetchall()

    def begin(self, about: Mapping[str, Any], leaving: Iterable[str] = ()) -> None:
        """Says that a result is being written: until :meth:`settle` it is not finished, whatever files are there.

        Args:
            about: What the result is, as plain JSON values.
            leaving: Names that this result takes the place of; those of a result that was cut off here are added.
        """
        with self.changed() as db:
            db.execute("update written set state=? where state=?", (_LEAVING, _NEW))
            db.executemany(f"update written set state={_LEAVING} where name=?", [(name,) for name in leaving])
            db.execute("insert or replace into run values(?, ?, null)", (_RESULT, json.dumps(dict(about))))

    def unfinished(self) -> dict[str, Any] | None:
        """What result is being written here, None where everything is finished."""
        found = [_object(text) for (text,) in self.rows("select choices from run where run=?", _RESULT)]
        return (found[0] or {}) if found else None

    def settle(self, cells: str = "stay") -> None:
        """Says that the result is whole, and removes what it takes the place of; ``cells="go"``: what cells gave too."""
        self.remove(name for (name,) in self.rows("select name from written where state=?", _LEAVING))
        with self.changed() as db:
            db.execute("update written set state=?", (_SETTLED,))
            db.execute("delete from run where run=?", (_RESULT,))
            for table in ("cell", "run") if cells == "go" else ():
                db.execute(f"delete from {table}")

    def expect(self, name: str, digest: str) -> None:
        """Says that a file is about to be there: before it is, so that no interruption leaves one without a name."""
        if not _is_own_name(name):
            return
        newest = "select rowid from written where name=:name order by rowid desc limit :kept"
        state = f"select {_NEW} from run where run='{_RESULT}'"
        given = {"name": name, "sha": digest, "kept": _KEPT}
        with self.changed() as db:
            db.execute("insert or replace into written values(:name, :sha, 0)", given)
            db.execute(f"delete from written where name=:name and rowid not in ({newest})", given)
            db.execute(f"update written set state=coalesce(({state}), {_SETTLED}) where name=:name", given)

    def holds(self, name: str) -> bool:
        """Whether kvinterp wrote the file of this name and nobody changed it since."""
        digests = self._files().get(name, ())
        return bool(digests) and self._is_inside(name) and digest_of(self.folder / name) in digests

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Those of the names in the folder that are there and that kvinterp did not write."""
        return [name for name in names if is_there(self.folder / name) and not self._ours(name)]

    def names(self) -> frozenset[str]:
        """The names of everything that was written."""
        return frozenset(self._files())

    def remove(self, names: Iterable[str]) -> None:
        """Removes those of the files that kvinterp wrote and nobody changed since, and the folders that this leaves empty."""
        for name in self._files().keys() & set(names):
            path = self.folder / name
            if self.holds(name):
                path.unlink()
                if path.parent != self.folder:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()
            if not is_there(path):
                with self.changed() as db:
                    db.execute("delete from written where name=?", (name,))

    def _files(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, digest in self.rows("select name, sha from written"):
            if not _is_own_name(name):
                raise InputError(
                    f"the store {str(self.folder / FILE)!r} names {name!r}, which lies outside of the folder or is hidden: "
                    f"kvinterp wrote no such store; {_MOVE}"
                )
            found.setdefault(name, []).append(digest)
        return found

    def _ours(self, name: str) -> bool:
        if self.holds(name):
            return True
        # A figure says itself who drew it; those that were saved on their own are in no store.
        if not name.endswith(".png") or not self._is_inside(name):
            return False
        with (self.folder / name).open("rb") as file:
            return _PNG_MARK in file.read(4096)

    def _is_inside(self, name: str) -> bool:
        path = self.folder / name
        return is_plain(path) and (path.parent == self.folder or not path.parent.is_symlink())

    def refuse_foreign(self, names: Iterable[str]) -> None:
        """Raises where a file that kvinterp did not write has one of the names, relative to the folder, that it needs."""
        foreign = self.foreign(names)
        if foreign:
            more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
            raise InputError(
                f"folder {str(self.folder)!r} holds {foreign[0]!r}{more}, which kvinterp did not write or which was changed "
                "since, and which would have to be replaced: choose another folder with --out, or move it away."
            )

    # What is in the way ------------------------------------------------------------------------------------------------

    def check_free(self, existing: str, names: Iterable[str], choices: Mapping[str, Any]) -> bool:
        """Raises where something is in the way: asked before anything slow, such as loading a model, begins.

        Args:
            existing: What to do about what is already there, see :data:`EXISTING`.
            names: The files that will be written; ``figures/recovery*`` are all that begin so.
            choices: What was chosen, ``verb`` among it; an unfinished result of other choices is in the way.

        Returns:
            Whether a finished result is there, which is to be read if it is the same.

        Raises:
            InputError: The folder cannot be written; it holds a finished result, an unfinished one of something else or a file of
                another result under one of the names, and ``existing`` is ``"error"``; or a file that kvinterp did not write.
        """
        folder = self.folder
        if existing not in EXISTING:
            raise unknown("way to treat an existing result", existing, EXISTING)
        unfinished = self.rows("select choices from run where run=? or run in (select run from cell)", _RESULT)
        finished = not unfinished and (folder / SUMMARY).exists()
        if existing == "error" and finished:
            raise InputError(f"folder {str(folder)!r} already holds a result: {ADVICE}")
        for held in (_object(text) for (text,) in unfinished):
            if held == choices:
                continue
            if existing == "overwrite":
                log.warning(
                    "an unfinished result in %s is removed once this one is finished: --overwrite was given", folder
                )
            elif held is None:
                raise InputError(
                    f"folder {str(folder)!r} holds an unfinished result whose settings cannot be read: {ADVICE}"
                )
            elif held.get("verb") != choices.get("verb"):
                raise InputError(f"folder {str(folder)!r} holds an unfinished result of {held.get('verb')!r}: {ADVICE}")
            else:
                raise InputError(unlike(folder, "an unfinished result", held, choices))
        if existing == "use" and finished:
            return True
        names = [*names, SUMMARY]
        self.check_names(names)
        if existing == "error" and not unfinished and (taken := [name for name in names if is_there(folder / name)]):
            raise InputError(f"folder {str(folder)!r} already holds {taken[0]!r} of another result: {ADVICE}")
        check_writable(folder)
        return False

    def check_names(self, names: Iterable[str]) -> None:
        """Raises where a file that kvinterp did not write has one of these names, or is in the place of a folder.

        Args:
            names: The files that will be written, as :func:`check_free` takes them.

        Raises:
            InputError: There is such a file.
        """
        folder, figures = self.folder, self.folder / "figures"
        if is_there(figures):
            if figures.is_symlink() or not figures.is_dir():
                raise InputError(
                    f"folder {str(folder)!r} holds 'figures', which is no folder and which kvinterp did not write: {_MOVE}"
                )
            check_writable(figures)
        there: dict[str, None] = {}
        for name in names:
            matching = sorted(folder.glob(name)) if "*" in name else [folder / name]
            there |= dict.fromkeys(path.relative_to(folder).as_posix() for path in matching)
        self.refuse_foreign(there)

    # Cells -------------------------------------------------------------------------------------------------------------

    def for_run(self, settings: Mapping[str, Any], choices: Mapping[str, Any] | None = None) -> None:
        """From now on the cells of a run are kept and read, so that an interrupted one goes on where it stopped.

        Args:
            settings: What decides the numbers, as plain JSON values: ``made_with`` holds the circumstances (versions, device,
                threads, weights), the rest what was chosen, ``verb`` among it.
            choices: What of them was known before a model was loaded; all but ``made_with`` unless given.
        """
        self._texts = strict_json(choices_of(settings) if choices is None else choices), strict_json(settings)
        self.run = hashlib.sha256(self._texts[1].encode()).hexdigest()[:16]
        beside = "select settings from run where run in (select run from cell) and run<>? and choices=?"
        for (held,) in self.rows(beside, self.run, self._texts[0]):
            changed = differences(_object(held) or {}, json.loads(self._texts[1])).replace("made_with.", "")
            log.warning("what an unfinished run left in %s was made with other %s: it is made again", self.folder, changed)

    def keep(self, key: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None) -> None:
        """Keeps what one cell gave, whole or not at all.

        Raises:
            InputError: It cannot be written, for instance because the disk is full.
        """
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, table in tables.items():
                # Without a date, so that equal cells are equal bytes.
                archive.writestr(zipfile.ZipInfo(f"{name}.parquet"), table.to_parquet(None, index=False))
            archive.writestr(zipfile.ZipInfo(_ABOUT), json.dumps(dict(about or {})))
        content = packed.getvalue()
        with self.changed() as db:
            db.execute("insert or ignore into run values(?, ?, ?)", (self.run, *self._texts))
            db.execute(
                "insert or replace into cell values(?, ?, ?, ?)", (self.run, key, self._digest(key, content), content)
            )

    def read(self, key: str) -> Made | None:
        """The tables of a cell and what belongs to it; None where there is none, or not what was written."""
        where = "from cell where run=? and key=?"
        for digest, content in self.rows(f"select sha, content {where}", self.run, key):
            # Whatever a store that others made holds.
            with contextlib.suppress(ValueError, KeyError, TypeError, zipfile.BadZipFile, ArrowException):
                if digest == self._digest(key, content):
                    with zipfile.ZipFile(io.BytesIO(content)) as archive:
                        found = {name: archive.read(name) for name in archive.namelist()}
                    about = json.loads(found.pop(_ABOUT))
                    return {
                        name.removesuffix(".parquet"): pd.read_parquet(io.BytesIO(c)) for name, c in found.items()
                    }, about
            log.warning("part %s in %s is damaged: it is made again", key, self.folder)
            with self.changed() as db:
                db.execute(f"delete {where}", (self.run, key))
        return None

    def _digest(self, key: str, content: bytes) -> str:
        return hashlib.sha256(f"{self.run} {key} ".encode() + content).hexdigest()


def _taken(folder: Path) -> sqlite3.Connection:
    db, place = _opened(folder), folder / FILE
    try:
        db.execute("pragma locking_mode=exclusive")
        # Of a file that has lost its name meanwhile SQLite gives a lock as well, but it makes no change there.
        db.executescript("begin exclusive; commit")
        # Whoever was half-way through a file when killed is gone.
        sweep_partials(folder)
        if _is_sound(db):
            return db
    except BaseException:
        db.close()
        raise
    log.warning("the store %s is damaged: it is set aside, and what it held is made again", place)
    db.close()
    place.rename(folder / f"{FILE}.damaged.{secrets.token_hex(8)}")
    return _taken(folder)


def _is_sound(db: sqlite3.Connection) -> bool:
    try:
        return bool(db.execute("pragma quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError:
        return False


def _object(text: Any) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _is_own_name(name: Any) -> bool:
    parts = name.split("/") if isinstance(name, str) else []
    # A part of more bytes no file system has: asked for one, it raises.
    return 1 <= len(parts) <= 2 and all(_OWN_NAME.fullmatch(part) and len(os.fsencode(part)) < 256 for part in parts)


def write_whole(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> str:
    """Writes a file so that it is there whole or not at all; its folder is made. In a folder with a store that knows of it.

    Args:
        path: The file.
        content: What is in it, or what writes that.

    Returns:
        Its digest.

    Raises:
        InputError: It cannot be written, or it would replace a file that kvinterp did not write into a result's folder.
    """
    with told(path.parent):
        record = Store.over(path)
        name = "" if record is None else path.relative_to(record.folder).as_posix()
        if record is not None:
            record.refuse_foreign([name])
        with replaced(path) as file:
            if callable(content):
                content(file)
            else:
                # Of a file's name that is no UTF-8, which a page may show, an escape is written.
                file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            file.seek(0)
            digest = digest_in(file)
            if record is not None:
                record.expect(name, digest)
    return digest


def choices_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the circumstances: what was chosen."""
    return {name: value for name, value in settings.items() if name != "made_with"}


def unlike(path: Path, what: str, held: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The sentence about a result that was made with other settings."""
    return f"folder {str(path)!r} holds {what} made with other settings ({differences(held, now)}): {ADVICE}"
