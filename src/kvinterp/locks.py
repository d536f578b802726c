"""One process, and one thread of it, at work in a folder.

The lock is the system's own (``flock`` through filelock), so that it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from pathlib import Path

from filelock import FileLock, Timeout

from kvinterp.errors import InputError
from kvinterp.files import is_plain, is_there, sweep_partials, told

_NAME = ".kvinterp.lock"
_held: weakref.WeakValueDictionary[tuple[Path, int], Lock] = weakref.WeakValueDictionary()


class Lock:
    """Keeps everybody else out of a folder; within the thread that holds it, it may be taken again.

    Args:
        folder: The folder; it is made where it is missing, and removed again at the release where nothing came into it.

    Raises:
        InputError: Another process or thread is at work there, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / _NAME
        self._made: list[Path] = []
        self._lock: FileLock | None = None
        with told(folder):
            self._made = [place for place in (folder, *folder.parents) if not place.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._key = folder.resolve(), threading.get_ident()
                # Kept, so that it is held for as long as anybody within counts on it.
                self._outer = _held.get(self._key)
                if self._outer is None:
                    self._take()
                    _held[self._key] = self
            except BaseException:
                self._leave()
                raise

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets others in; what was made for nothing is gone again."""
        if self._lock is None:
            return
        # While it is held: who waits for the file that is removed here sees that it is gone, and begins anew.
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._lock.release()
        self._lock = None
        _held.pop(self._key, None)
        self._leave()

    def _take(self) -> None:
        # The file is empty; one that holds something, and a link, are somebody else's.
        if is_there(self._path) and (not is_plain(self._path) or self._path.stat().st_size):
            raise InputError(
                f"folder {str(self.folder)!r} holds {_NAME!r}, which is not the empty file that kvinterp makes: "
                "choose another folder with --out, or move it away."
            )
        lock = FileLock(self._path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise InputError(
                f"folder {str(self.folder)!r} is being written by another process: wait until it is done, or choose another "
                "folder with --out."
            ) from error
        self._lock = lock
        # Whoever was half-way through a file when killed is gone, since the lock was free.
        sweep_partials(self.folder)

    def _leave(self) -> None:
        for place in self._made:
            with contextlib.suppress(OSError):
                place.rmdir()
