"""A piece of work that is named, kept whole and taken up again: which function, with which plain
settings.

A :class:`Cell` holds names and settings, never a model or a tensor, so that any process can do it:
the model is loaded where the cell runs (:func:`loaded`). What a cell gave is kept in the folder of
its result (:mod:`kvinterp.common.store`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import logging
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from kvinterp.common.collecting import as_always
from kvinterp.common.progress import counting
from kvinterp.common.spec import by_name, read
from kvinterp.common.store import CellResult, CellStore
from kvinterp.common.wings import handed, taken
from kvinterp.errors import visible
from kvinterp.models import Adapter

log = logging.getLogger("kvinterp")

COUNTED = re.compile(r"\d of \d")
MODEL_LOADER = "kvinterp.models:load_model"
Engine = Callable[[Sequence["Cell"], Mapping[str, Any]], None]
"""What does cells: given them, and what they are offered by name (``keep``, ``tell``,
``progress``).
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A piece of work.

    Attributes:
        key: Its name within its run: letters, digits, hyphens and underscores.
        function: A method of an experiment, which holds nothing but choices, or a function of a
            module. Called with the settings it gives a table, tables by name, or tables and what
            else belongs to them. One with the parameters ``keys`` and ``keep`` is called once for
            all the cells that follow each other with the same settings, and calls
            ``keep(key, tables, about)`` as each is made: prompts of one length share a batch. One
            with the parameters ``tell`` or ``progress`` is given what says what runs now, or
            ``"bar"``.
        settings: What it is called with, as plain JSON values; the texts among them say what runs
            now.
    """

    key: str
    function: Callable[..., Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run_cells(
    cells: Sequence[Cell],
    store: CellStore | None = None,
    progress: str = "bar",
    engine: Engine | None = None,
) -> CellsMade:
    """Does the cells that are not done yet, and gives what all of them gave, each read when it is
    asked for.

    Args:
        cells: The cells.
        store: Where they are kept; None keeps them in memory alone.
        progress: ``"bar"`` or ``"none"``.
        engine: What does the cells; :class:`Local` unless given.

    Raises:
        InputError: A cell cannot be written.
    """
    cells_store = store or _InMemory()
    missing = [cell for cell in cells if cells_store.read(cell.key) is None]
    if done := len(cells) - len(missing):
        log.info(
            "going on in %s: %d of %d parts are already there", cells_store.folder, done, len(cells)
        )
    if missing:
        alike = len(missing) > 1 and len({cell.function for cell in missing}) == 1
        with counting(
            len(cells), "answering", "part", progress, done, "yes" if alike else "no"
        ) as bar:

            def keep(*cell_result: Any) -> None:
                cells_store.keep(*cell_result)
                bar.update()

            def tell(text: str) -> None:
                bar.set_postfix_str(visible(text))
                # Where no terminal shows a bar: a line for each stage, none for what is only
                #     counted in one.
                if bar.disable and progress == "bar" and not COUNTED.search(text):
                    log.info("now: %s", text)

            offered = {"keep": keep, "tell": tell, "progress": progress}
            (engine or Local())(missing, offered)
    return CellsMade({cell.key: (cell, cells_store) for cell in cells})


class CellsMade(UserDict[str, Any]):
    """What cells gave, read from where it is kept when it is asked for: of many prompts it would
    fill the memory.
    """

    def __getitem__(self, key: str) -> CellResult:
        cell, store = self.data[key]
        # Where another run into this folder finished first, it took the cells away.
        return result if (result := store.read(key)) is not None else alone([cell])[key]

    def finished(self) -> CellsMade:
        """Those that are there."""
        return CellsMade(
            {key: entry for key, entry in self.data.items() if entry[1].read(key) is not None}
        )


class _InMemory(dict[str, CellResult]):
    """The cells of a run that writes nothing."""

    folder, read = None, dict.get

    def keep(
        self, key: str, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any] | None = None
    ) -> None:
        self[key] = dict(tables), dict(about or {})


@dataclasses.dataclass(frozen=True)
class Local:
    """Does cells in this process, one after another."""

    def __call__(self, cells: Sequence[Cell], offered: Mapping[str, Any]) -> None:
        """Does the cells.

        Args:
            cells: The cells.
            offered: ``keep``, ``tell`` and ``progress``.
        """
        stage = ""
        for group in groups(cells):
            function = group[0].function
            options = {
                name: offered[name]
                for name in inspect.signature(function).parameters
                if name in offered
            }
            if "keep" in options:
                function(keys=[cell.key for cell in group], **group[0].settings, **options)
                continue
            for cell in group:
                now = ", ".join(value for value in cell.settings.values() if isinstance(value, str))
                if now != stage:
                    offered["tell"](now)
                stage = now
                result = function(**cell.settings, **options)
                tables, about = result if isinstance(result, tuple) else (result, {})
                offered["keep"](
                    cell.key,
                    {"table": tables} if isinstance(tables, pd.DataFrame) else tables,
                    about,
                )


def engine_named(text: str) -> Any:
    """What does cells, of a text form: ``local``, or what a wing hands in, as in ``ray`` or
    ``ray(4)``.

    Raises:
        InputError: There is none of this name, or it cannot work here.
    """
    if text == "local":
        return Local()
    named = {name: taken("workers", name, f"engine {name}") for name in handed("workers")}
    engine: Any = read(
        "engine", text, {**by_name(Local), **named}, "Write it as in local, ray, ray(4)."
    )
    if not isinstance(engine, Local):
        engine.check()
    return engine


def alone(cells: Sequence[Cell]) -> dict[str, CellResult]:
    """Does cells here, and gives what they made by their keys."""
    made = _InMemory()
    Local()(cells, {"keep": made.keep, "tell": lambda *_: None, "progress": "none"})
    return made


def groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that follow each other with the same function and settings, together."""
    for _, group in itertools.groupby(cells, lambda cell: (cell.function, cell.settings)):
        yield list(group)


def joined(results: Mapping[str, CellResult], part: str = "") -> dict[str, pd.DataFrame]:
    """The tables of all cells, or of those with a word in their key, by name; those of one below
    those of another.
    """
    return stacked(tables for tables, _ in those(results, part).values())


def those(results: Mapping[str, CellResult], part: str) -> dict[str, CellResult]:
    """What those cells gave that have a word in their key."""
    return {key: results[key] for key in results if part in key}


def stacked(several: Iterable[Mapping[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Tables by name, each the tables of that name one below the other."""
    by_name: dict[str, list[pd.DataFrame]] = {}
    for tables in several:
        for name, table in tables.items():
            by_name.setdefault(name, []).append(table)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in by_name.items()}


# Models -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _loaded(settings_json: str) -> Any:
    settings = json.loads(settings_json)
    module, _, function = settings.pop("loader", MODEL_LOADER).partition(":")
    made = getattr(importlib.import_module(module), function)(**settings)
    as_always()
    # An encoder-decoder is audited as its user's model, without an adapter.
    return made.lasting() if isinstance(made, Adapter) else made


def loaded(model: Mapping[str, Any]) -> Any:
    """The model of plain settings, an adapter: loaded once for all the cells that name it.

    Args:
        model: What :func:`kvinterp.models.load_model` is given, or the function that ``loader``
            names.
    """
    return _loaded(json.dumps(dict(model), sort_keys=True))


@contextlib.contextmanager
def loading_once() -> Iterator[None]:
    """Within it a model is loaded once; behind it none is held, and a checkpoint that was edited is
    read again.
    """
    _loaded.cache_clear()
    try:
        yield
    finally:
        _loaded.cache_clear()
