"""Which experiment keeps a :class:`~kvinterp.common.result.Result`; results are read and
experiments are run by their names.

A result is kept as its command keeps it, so that whatever was found in a notebook is a folder of
the command line, and the other way round.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from kvinterp.commands.base import Experiment
from kvinterp.commands.functions import FUNCTIONS
from kvinterp.commands.registry import experiment_named, experiments
from kvinterp.commands.results import read_summary, reading
from kvinterp.commands.running import folder_named, read_result
from kvinterp.common import words
from kvinterp.common.checks import check_known, given_list
from kvinterp.common.files import SUMMARY, is_file, is_folder
from kvinterp.common.store import check_finished
from kvinterp.common.wings import handed, taken
from kvinterp.errors import InputError, unexpected
from kvinterp.recording import Generation, Trace

_MADE = (
    "model",
    "kind",
    "dtype",
    "attention",
    "protocol",
    "strategy",
    "seed",
    "max_new_tokens",
    "kernels",
    "sizes",
)
"""What provenance says of the choices."""


def experiment_of(verb: str) -> type[Experiment]:
    """The experiment that keeps the results of a command.

    Raises:
        InputError: There is no such command.
    """
    if verb in FUNCTIONS:
        return FUNCTIONS[verb]
    check_known("experiment", verb, experiments())
    return experiment_named(verb)


def keeper_of(result: Any) -> Experiment:
    """The experiment that made a result, or keeps it: then its choices are noted, as far as the
    result knows them.
    """
    # Its tables may have been changed within since what is in them was found.
    vars(result).pop("_of", None)
    if result.choices is None:
        about = result.provenance
        choices = {
            **{name: about[name] for name in _MADE if name in about},
            **about.get("paths", {}),
        }
        vars(result).update(choices=choices, settings={"verb": result.VERB, **choices})
    return result.experiment or experiment_of(result.VERB)()


def load(folder: str | os.PathLike[str]) -> Any:
    """Reads what ``save`` or a command of kvinterp wrote into a folder.

    Args:
        folder: The folder.

    Returns:
        What is kept there: a :class:`Comparison`, a :class:`Sweep`, a :class:`Decomposition`, a
        :class:`KernelsTable`, a :class:`Verdict`, a :class:`Trace`, a :class:`Generation`, what
        :func:`kvinterp.localise` found, or the :class:`Result` of another experiment, with its ``tables`` and its
        ``summary``.

    Raises:
        InputError: It holds none of these, or one that is damaged or of another version.

    Example:
        >>> kv.load("out/compare").where()  # doctest: +SKIP
    """
    path = folder_named(folder)
    if not is_folder(path):
        fault = "is no folder" if os.path.lexists(path) else "does not exist"
        raise InputError(f"folder {str(path)!r} {fault}: give one that kvinterp wrote.")
    if not is_file(path / SUMMARY):
        return _without_a_summary(path)
    summary = read_summary(path)
    settings = summary.get("settings")
    verb = settings.get("verb") if isinstance(settings, dict) else None
    if not isinstance(verb, str):
        raise InputError(
            f"folder {str(path)!r} holds a summary.json that does not say what wrote it: give one that kvinterp wrote."
        )
    with reading(path, summary):
        return read_result(experiment_of(verb)(), path)


def _without_a_summary(path: Path) -> Any:
    for name in handed("folders"):
        if is_file(path / name):
            return taken("folders", name, f"a folder with {name}").load(path)
    if is_file(path / "trace.json"):
        return Trace.load(path)
    if is_file(path / "generation.json"):
        return Generation.load(path)
    check_finished(path)
    raise InputError(
        f"folder {str(path)!r} holds no result: give one that kvinterp wrote, with a summary.json in it."
    )


# Asking -------------------------------------------------------------------------------------------


def experiment(
    name: words.ExperimentName | str,
    *,
    out: str | os.PathLike[str] | None = None,
    existing: words.Existing | str = "error",
    progress: words.Progress | str = "bar",
    engine: str = "local",
    **choices: Any,
) -> Any:
    """Runs an experiment, as its command does.

    Args:
        name: The command, such as ``"behaviour"``; ``kvinterp list experiments`` has them all.
        out: A folder, in which an interrupted run goes on; None keeps everything in memory, and
            ``save`` writes it later.
        existing: What to do about what is already there, see
            :data:`kvinterp.commands.results.EXISTING`.
        progress: ``"bar"`` or ``"none"``.
        engine: Where its cells are done: ``"local"``, ``"ray"`` or ``"ray(WORKERS)"``.
        choices: The command's options, with underscores for hyphens.

    Returns:
        What :func:`load` reads of its folder.

    Raises:
        InputError: There is no such experiment or option, or something given does not fit.

    Example:
        >>> found = kv.experiment("behaviour", models=["zoo:gqa2-mini"], prompts="arithmetic:4")  # doctest: +SKIP
        >>> found.tables["decodes"], found.sentences()  # doctest: +SKIP
    """
    check_known("experiment", name, experiments())
    kind = experiment_named(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for choice, value in choices.items():
        check_known(f"option of {name}", choice, fields)
        is_file = "Path" in str(fields[choice].type) and isinstance(value, str)
        values[choice] = Path(value) if is_file else _option(choice, value, fields[choice].default)
    result = kind(**values).run(
        None if out is None else folder_named(out), existing, progress, engine=engine
    )
    return result if out is None else load(out)


def _option(name: str, value: Any, default: Any) -> Any:
    """A value as the command would have given it: one of several by itself, a list as a tuple."""
    if isinstance(default, tuple):
        return (
            (value,)
            if isinstance(value, str)
            else tuple(given_list(name, value, f"a list such as {list(default)!r}"))
        )
    if isinstance(default, str | bool) and not isinstance(value, type(default)):
        raise unexpected(
            name,
            value,
            f"{'a text' if isinstance(default, str) else 'True or False'}, such as {default!r}",
        )
    return tuple(value) if isinstance(value, list) else value
