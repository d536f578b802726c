"""A result on disk that survives an interruption.

What cells gave is kept in the folder's store (``store.py``). At the end it is reduced to tables, texts, figures and
``summary.json``, each written beside its place and then renamed into it, the summary last. A run that was killed is taken up
again from its cells by the same command, and gives the tables that one uninterrupted run would have given. What was there
before is removed last, and what kvinterp did not write neither replaced nor removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import ArrowException

from kvinterp._version import __version__
from kvinterp.common.files import SUMMARY, bytes_with, differences, read_json, read_sealed, sealed, strict_json, told
from kvinterp.common.parquet import LongTable, write_table
from kvinterp.common.result import flat
from kvinterp.common.store import ADVICE, Store, choices_of, unlike, write_whole
from kvinterp.data import Prompt
from kvinterp.errors import InputError, KvinterpError, in_one_line

PROMPTS = "prompts.jsonl"
"""The file of the prompts that a result was made on."""


class ResultFolder(Store):
    """A folder that a run fills, cell by cell and at the end with its files; nobody else writes there meanwhile.

    Args:
        folder: The folder; made where it is missing.
        settings: What decides what the tables will hold, as far as it is known before a model is loaded, ``verb`` among it.
        names: The files that will be written, beside the summary and figures.
        existing: What to do about what is already there, see :data:`kvinterp.common.store.EXISTING`.

    Raises:
        InputError: The folder cannot be written, or holds something this run must not touch.
    """

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any], names: Iterable[str] = (), existing: str = "error"
    ) -> None:
        super().__init__(Path(folder))
        self.hold()
        self.settings: dict[str, Any] = json.loads(strict_json(settings))
        self._choices, self._existing = choices_of(self.settings), existing
        try:
            with told(self.folder):
                self._there = self.check_free(existing, names, self._choices)
        except BaseException:
            self.release()
            raise

    def take_up(self, settings: Mapping[str, Any] | None = None) -> bool:
        """Says whether the very result is there, finished, and is to be read; else its cells are read and kept here.

        Args:
            settings: All that decides what the tables will hold, where that is more than was given before.
        """
        if settings is not None:
            self.settings = json.loads(strict_json(settings))
        if self._there:
            summary = read_summary(self.folder)
            held, whole = summary.get("settings"), not summary.get("interrupted")
            if not isinstance(held, dict):
                raise InputError(f"folder {str(self.folder)!r} holds a result whose settings cannot be read: {ADVICE}")
            one, other = (settings if whole else choices_of(settings) for settings in (held, self.settings))
            if differences(one, other):
                raise InputError(unlike(self.folder, "a result", one, other))
            if whole:
                return True
        self.for_run(self.settings, self._choices)
        return False

    def finish(
        self,
        tables: Mapping[str, pd.DataFrame | LongTable],
        summary: Mapping[str, Any],
        texts: Mapping[str, str] | None = None,
        draw: Callable[[Path], Iterable[Path]] | None = None,
        ending: str = "finished",
    ) -> list[Path]:
        """Writes the files, each whole or not at all, the summary last.

        Args:
            tables: Tables by the names of their files.
            summary: What ``summary.json`` holds, beside the digests of tables and texts and its own.
            texts: Other files by their names.
            draw: Given a folder, draws the figures into it and returns their files.
            ending: ``"finished"``, after which the cells are removed, or ``"interrupted"``, after which they stay so that the
                run can go on.

        Returns:
            What was written: tables, summary and figures. Nothing where an interrupted run would take the place of a finished
            result.

        Raises:
            InputError: It cannot be written.
        """
        place, before = self.folder / SUMMARY, read_json(self.folder / SUMMARY)
        if ending != "finished" and (before or {}).get("interrupted") is False:
            return []
        self.begin(self._choices, self.names() if self._existing == "overwrite" or before is not None else ())
        digests = {name: write_whole(self.folder / name, text) for name, text in (texts or {}).items()}
        files = [self.folder / f"{name}.parquet" for name in tables]
        for file, table in zip(files, tables.values(), strict=True):
            with told(self.folder):
                digests[file.name] = write_whole(file, functools.partial(write_table, table))
        figures = [] if draw is None else list(draw(self.folder / "figures"))
        write_whole(place, sealed(SUMMARY, summary, digests))
        self.settle("go" if ending == "finished" else "stay")
        return [*files, place, *figures]


def read_summary(folder: Path) -> dict[str, Any]:
    """What ``summary.json`` in a folder says.

    Raises:
        InputError: There is none that can be read, or not the one that was written.
    """
    with told(folder):
        summary = read_sealed(folder / SUMMARY)
    # What was chosen is compared with what is chosen now; all else is said.
    kept = ("choices", "settings", "sha256")
    return {name: value if name in kept else _in_lines(value) for name, value in summary.items()}


def _in_lines(value: Any) -> Any:
    """What a file holds, each text of it safe to print and in one line."""
    if isinstance(value, dict):
        # The texts of tokens are what they are; where they are printed they are made safe.
        return {in_one_line(name): held if name == "texts" else _in_lines(held) for name, held in value.items()}
    if isinstance(value, list):
        return [_in_lines(held) for held in value]
    return in_one_line(value) if isinstance(value, str) else value


def read_tables(folder: Path, summary: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables that a summary was written with, by name, once every file that it was written with is as it was.

    Args:
        folder: Where they are.
        summary: What :func:`read_summary` gave.

    Raises:
        InputError: A file is missing, cannot be read, or is not the one that the summary was written with.
    """
    with reading(folder, summary):
        tables: dict[str, pd.DataFrame] = {}
        for name, digest in summary["sha256"].items():
            # A summary may come from anybody: no name leads out of the folder.
            if not re.fullmatch(r"\w+\.\w+", name):
                raise ValueError(f"{name!r} is no name of a table")
            content = bytes_with(folder / name, digest)
            if content is None:
                raise ValueError(f"{name} is not the one that {SUMMARY} was written with")
            table, dot, _ = name.partition(".parquet")
            if dot:
                tables[table] = pd.read_parquet(io.BytesIO(content))
                tables[table].attrs = _in_lines(flat(tables[table].attrs))
        return tables


@contextlib.contextmanager
def reading(folder: Path, summary: Mapping[str, Any]) -> Iterator[None]:
    """Turns whatever is wrong with the files of a result into one sentence."""
    try:
        yield
    except KvinterpError:
        raise  # It is a sentence already.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArrowException) as error:
        about = summary.get("provenance")
        held = about.get("kvinterp", __version__) if isinstance(about, Mapping) else __version__
        other = f", or read it with kvinterp {held}, which wrote it" if held != __version__ else ""
        if isinstance(error, FileNotFoundError) and error.filename:
            why = f"{Path(error.filename).name} is not there"
        else:
            why = str(error).splitlines()[0][:300] if str(error) else "empty"
        raise InputError(f"folder {str(folder)!r} holds no readable result ({why}): make it again{other}.") from error


def prompt_lines(prompts: Sequence[Prompt]) -> str:
    """The prompts as a file that :func:`kvinterp.data.load_prompts` reads back."""
    rows = []
    for prompt in prompts:
        more = {name: value for name, value in vars(prompt).items() if value and name not in ("id", "text")}
        rows.append({"id": prompt.id, "prompt": prompt.text, **more})
    return "".join(json.dumps(row, default=dict) + "\n" for row in rows)


def prompts_of(found: Any) -> dict[str, str]:
    """The prompts of a result as the text of their file, where it knows them."""
    prompts = getattr(found, "prompts", ())
    return {PROMPTS: prompt_lines(prompts)} if len(prompts) else {}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as a summary holds them: what is not there is None."""
    return table.astype(object).where(table.notna(), None).to_dict("records")  # type: ignore[return-value]


def prompts_digest(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """How many prompts there are, and a digest of all that is in them."""
    lines = prompt_lines(prompts)
    return {"count": len(prompts), "blake2": hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()}
