"""A result on disk: a folder of tables, ``summary.json`` and, where they were drawn, figures and
``report.html``.

While a run goes on, its finished cells lie beside them (:mod:`kvinterp.common.store`). At the end
they are reduced to the files, each written beside its place and renamed into it, the summary last:
it names the files, and says until then that the result is not whole. A run that was killed goes on
from its cells by the same command, and gives the tables of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import ArrowException

from kvinterp._version import __version__
from kvinterp.common.checks import check_known
from kvinterp.common.files import (
    SUMMARY,
    check_writable,
    differences,
    is_file,
    read_json,
    strict_json,
    write_whole,
)
from kvinterp.common.store import clear_cells
from kvinterp.data import Prompt
from kvinterp.errors import InputError, KvinterpError, in_one_line

PROMPTS = "prompts.jsonl"
"""The file of the prompts that a result was made on."""
EXISTING = {
    "error": "a finished result is never touched; an unfinished one with the same settings is taken up again",
    "overwrite": "it is replaced once the new result is there",
    "use": "a finished result with the same settings is read instead of computed again",
}
_ADVICE = (
    "choose another folder with --out, or pass --overwrite (from Python, existing='overwrite')."
)
_OURS = (".parquet", ".html", PROMPTS, SUMMARY)
_NAME = re.compile(r"(figures/)?\w[\w.-]*\*?")


def check_free(folder: Path, verb: str, existing: str = "error") -> bool:
    """Raises where something is in the way of a result: asked before anything slow, such as loading
    a model, begins.

    Args:
        folder: The folder.
        verb: The command whose result it will be.
        existing: What to do about what is already there, see :data:`EXISTING`.

    Returns:
        Whether a result is there that :func:`is_finished` has to look at.

    Raises:
        InputError: The folder cannot be written; or ``existing`` is not ``"overwrite"``, and it
            holds a finished result, one of another command, or a table or page that is of no
            result.
    """
    check_known("way to treat an existing result", existing, EXISTING)
    check_writable(folder)
    if is_file(folder / "figures"):
        raise InputError(f"folder {str(folder)!r} holds 'figures', which is no folder: {_ADVICE}")
    if existing == "overwrite":
        return False
    summary = read_json(folder / SUMMARY)
    if summary is None:
        if taken := sorted(path.name for path in folder.glob("[!.]*") if path.name.endswith(_OURS)):
            raise InputError(
                f"folder {str(folder)!r} already holds {taken[0]!r}, which is of no result of ours: {_ADVICE}"
            )
        return False
    if existing == "error" and not summary.get("interrupted"):
        raise InputError(f"folder {str(folder)!r} already holds a result: {_ADVICE}")
    if (verb_there := _settings(summary).get("verb")) != verb:
        raise InputError(f"folder {str(folder)!r} holds a result of {verb_there!r}: {_ADVICE}")
    return True


def is_finished(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the result of a folder is finished; one that is not goes on, whatever the
    circumstances were.

    Raises:
        InputError: It was made with other settings.
    """
    summary = read_summary(folder)
    before, after = _settings(summary), json.loads(strict_json(settings))
    for made in (before, after) if summary.get("interrupted") else ():
        made.pop("made_with", None)
    if changed := differences(before, after):
        raise InputError(
            f"folder {str(folder)!r} holds a result made with other settings ({changed}): {_ADVICE}"
        )
    return not summary.get("interrupted")


def _settings(summary: Mapping[str, Any]) -> dict[str, Any]:
    settings = summary.get("settings")
    return settings if isinstance(settings, dict) else {}


def write_result(
    folder: Path,
    settings: Mapping[str, Any],
    files: Sequence[str],
    tables: Mapping[str, pd.DataFrame],
    summary: Mapping[str, Any],
    texts: Mapping[str, str],
    draw: Callable[[Path], Iterable[Path]] | None = None,
    ending: str = "finished",
) -> list[Path]:
    """Writes the files of a result, each whole or not at all, the summary last; what an earlier one
    left goes.

    Args:
        folder: The folder; made where it is missing.
        settings: Everything that decides what the tables hold.
        files: The names of all its files beside the summary, drawn or not yet; with a star, what
            they begin with.
        tables: Tables by the names of their files.
        summary: What ``summary.json`` holds, beside the settings and the names of the files.
        texts: Other files by their names.
        draw: Given a folder, draws the figures into it and returns their files.
        ending: ``"finished"``, after which the cells are removed, or ``"interrupted"``, after which
            they stay so that the run can go on.

    Returns:
        What was written. Nothing where an interrupted run would take the place of a finished
        result.

    Raises:
        InputError: It cannot be written.
    """
    file, before = folder / SUMMARY, read_json(folder / SUMMARY) or {}
    if ending != "finished" and before and not before.get("interrupted"):
        return []
    listed = before.get("files")
    # A summary may come from anybody: no name leads out of the folder.
    earlier = (
        [name for name in listed if isinstance(name, str) and _NAME.fullmatch(name)]
        if isinstance(listed, list)
        else []
    )
    # Until the end it is unfinished, whatever is there: what was killed meanwhile is not taken for
    # a result.
    begun = {"settings": settings, "interrupted": True, "files": [*earlier, *files]}
    write_whole(file, strict_json(begun) + "\n")
    for name, text in texts.items():
        write_whole(folder / name, text)
    for name, table in tables.items():
        write_whole(folder / f"{name}.parquet", functools.partial(table.to_parquet, index=False))
    figures = [] if draw is None else list(draw(folder / "figures"))
    for name in {*earlier} - {*files}:
        for path in filter(Path.is_file, folder.glob(name)):
            path.unlink(missing_ok=True)
    cut = {"interrupted": True} if ending == "interrupted" else {}
    if ending == "finished":
        # Before the summary: a run that is killed between the two is not yet a result.
        clear_cells(folder)
    write_whole(file, strict_json({**summary, **cut, "settings": settings, "files": files}) + "\n")
    return [*(folder / f"{name}.parquet" for name in tables), file, *figures]


def read_summary(folder: Path) -> dict[str, Any]:
    """What ``summary.json`` in a folder says.

    Raises:
        InputError: There is none that can be read, or it is of an earlier version.
    """
    summary = read_json(folder / SUMMARY)
    if summary is None:
        raise InputError(
            f"folder {str(folder)!r} holds no readable {SUMMARY}: give a folder that kvinterp wrote."
        )
    if "files" not in summary:
        raise InputError(
            f"folder {str(folder)!r} was made by another tool, or by kvinterp before {__version__}: make it again."
        )
    # What was chosen is compared with what is chosen now; all else is said.
    as_written = ("choices", "settings", "files")
    return {
        name: value if name in as_written else _in_lines(value) for name, value in summary.items()
    }


def _in_lines(value: Any) -> Any:
    """What a file of anybody's holds, each text of it safe to print and in one line."""
    if isinstance(value, dict):
        # The texts of tokens are what they are; where they are printed they are made safe.
        return {
            in_one_line(name): entry if name == "texts" else _in_lines(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [_in_lines(entry) for entry in value]
    return in_one_line(value) if isinstance(value, str) else value


def read_tables(folder: Path, summary: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables that a summary names, by name.

    Args:
        folder: Where they are.
        summary: What :func:`read_summary` gave.

    Raises:
        InputError: A file is missing or cannot be read.
    """
    with reading(folder, summary):
        # A summary may come from anybody: no name leads out of the folder.
        names = [
            name.removesuffix(".parquet")
            for name in summary["files"]
            if re.fullmatch(r"\w+\.parquet", name)
        ]
        tables = {}
        for name in names:
            tables[name] = pd.read_parquet(folder / f"{name}.parquet")
            tables[name].attrs = _in_lines(tables[name].attrs)
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
        version = about.get("kvinterp") if isinstance(about, Mapping) else None
        advice = (
            f", or read it with kvinterp {version}, which wrote it"
            if version not in (None, __version__)
            else ""
        )
        why = str(error).partition("\n")[0][:300]
        raise InputError(
            f"folder {str(folder)!r} holds no readable result ({why}): make it again{advice}."
        ) from error


def prompt_lines(prompts: Sequence[Prompt]) -> str:
    """The prompts as a file that :func:`kvinterp.data.load_prompts` reads back."""
    rows = []
    for prompt in prompts:
        more = {
            name: value
            for name, value in vars(prompt).items()
            if value and name not in ("id", "text")
        }
        rows.append({"id": prompt.id, "prompt": prompt.text, **more})
    return "".join(json.dumps(row, default=dict) + "\n" for row in rows)


def prompts_of(result: Any) -> dict[str, str]:
    """The prompts of a result as the text of their file, where it knows them."""
    prompts = getattr(result, "prompts", ())
    return {PROMPTS: prompt_lines(prompts)} if len(prompts) else {}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as a summary holds them: what is not there is None."""
    return table.astype(object).where(table.notna(), None).to_dict("records")  # type: ignore[return-value]


def prompts_digest(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """How many prompts there are, and a digest of all that is in them."""
    lines = prompt_lines(prompts)
    return {
        "count": len(prompts),
        "blake2": hashlib.blake2b(lines.encode(), digest_size=8).hexdigest(),
    }
