"""Runs an experiment: its cells, one after another or on Ray, kept as they are finished; then its
result, files and page.

An experiment says what is asked and what the answer comes to (:mod:`kvinterp.commands.base`).
Everything here is the same for all of them.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvinterp.commands.cells import CellsMade, engine_named, loading_once, run_cells
from kvinterp.commands.choices import check_models
from kvinterp.commands.results import (
    EXISTING,
    PROMPTS,
    check_free,
    is_finished,
    prompts_digest,
    prompts_of,
    read_summary,
    read_tables,
    reading,
    write_result,
)
from kvinterp.common.checks import check_choice, check_known, check_unread
from kvinterp.common.files import SUMMARY, is_file, write_whole
from kvinterp.common.result import Result
from kvinterp.common.store import CELLS, CellStore
from kvinterp.data import load_prompts
from kvinterp.errors import InputError, unexpected, unknown
from kvinterp.findings import findings_of

if TYPE_CHECKING:
    from kvinterp.commands.base import Experiment

log = logging.getLogger("kvinterp")

INTERRUPTED = "what was finished is on disk; the same command goes on from there"
NOTHING = "nothing was finished; run the same command again"
"""What an interruption leaves behind."""
PAGE = "report.html"
FIGURES = ("page", "png", "none")
"""What is drawn: a page, which draws its figures itself; files besides; or nothing."""
SENTENCES, DOTS = 4, 80
"""How many sentences a card has, and how many dots an inch its picture."""


def run(
    experiment: Experiment,
    out: str | Path | None,
    existing: str = "error",
    progress: str = "bar",
    *,
    figures: str = "page",
    engine: str = "local",
) -> Any:
    """Answers it, or the rest of it.

    Args:
        experiment: The experiment.
        out: A folder, in which an interrupted run can go on; None keeps everything in memory.
        existing: What to do about what is already there, see
            :data:`kvinterp.commands.results.EXISTING`.
        progress: ``"bar"`` (on a terminal or in a notebook), or ``"none"``.
        figures: ``"page"``: the page is written too, which draws its figures itself; ``"png"``:
            and a PNG of each; or ``"none"``.
        engine: Where the cells are done: ``"local"``, in this process; ``"ray"`` or ``"ray(4)"``,
            by workers of Ray.

    Returns:
        Its result: of the experiment's class of results, where it has one.

    Raises:
        InputError: Something given does not exist or does not fit.
        UnsupportedError: This kind of model cannot give what was asked for.
        KeyboardInterrupt: It was interrupted; what was finished is in the folder.
    """
    check_models(vars(experiment))
    check_choice("progress", progress, ("bar", "none"))
    check_choice("figures", figures, FIGURES)
    check_known("way to treat an existing result", existing, EXISTING)
    if out is None:
        check_unread(
            "existing", existing, "error", "there is no folder; give one as out, or leave it out"
        )
    folder = None if out is None else Path(out)
    try:
        return _run(experiment, folder, existing, progress, figures, engine)
    except KeyboardInterrupt as error:
        some = folder is not None and any((folder / CELLS).rglob("*.parquet"))
        error.args = (INTERRUPTED if some else NOTHING,)
        raise


def _run(
    experiment: Experiment,
    out: Path | None,
    existing: str,
    progress: str,
    figures: str,
    engine: str,
) -> Result:
    # The cheap questions first: a typing error should not cost the loading of a model.
    worker = engine_named(engine)
    experiment.check()
    there = out is not None and check_free(out, experiment.verb(), existing)
    with loading_once():
        cells = experiment.cells()
        settings = experiment.settings() if out is not None else asked(experiment)
        store = None if out is None else CellStore(out, settings)
        if out is not None and there and is_finished(out, settings):
            return read_result(experiment, out)
        if store is not None:
            store.say_others()
        options = (store, progress, worker)
        try:
            results = run_cells(cells, *options)
            if second := experiment.second_stage(results):
                cells += second
                results |= run_cells(second, *options)
        except KeyboardInterrupt:
            if store is not None and experiment.PARTIAL == "yes":
                log.warning(
                    "interrupted: tables of what is finished are being written; interrupt again to leave without"
                )
                results = CellsMade({cell.key: (cell, store) for cell in cells}).finished()
                if results:
                    write(
                        experiment,
                        store.folder,
                        settings,
                        experiment.reduce(results),
                        ending="interrupted",
                    )
            raise
        result = experiment.reduce(results)
        if out is None:
            result.settings, result.choices = settings, experiment.choices()
            return with_findings(experiment, result)
        return write(experiment, out, settings, result, figures)


def asked(experiment: Experiment) -> dict[str, Any]:
    """The choices that decide the numbers, with what the prompts hold."""
    settings: dict[str, Any] = {"verb": experiment.verb(), **experiment.choices()}
    if settings.get("prompts") is not None:
        settings["prompts"] = prompts_digest(experiment.prompt_list)
    return settings


# Files --------------------------------------------------------------------------------------------


def files_of(experiment: Experiment, result: Result) -> list[str]:
    """The names of a result's files beside the summary, drawn or not yet."""
    figures = (
        f"figures/{name}.png"
        for name in (experiment.drawn(result) if experiment.has_page(result) else ())
    )
    return [*_beside_figures(experiment, result), *figures]


def _beside_figures(experiment: Experiment, result: Result) -> list[str]:
    tables = (f"{name}.parquet" for name in result.tables)
    there = [
        name
        for name in experiment.FILES
        if result.folder is not None and (result.folder / name).exists()
    ]
    return [*tables, *(result.others or prompts_of(result) or there), PAGE]


def with_findings(experiment: Experiment, result: Result) -> Result:
    """Adds its findings to the tables of a result, which knows from then on what made it."""
    vars(result).update(VERB=experiment.verb(), experiment=experiment)
    if "findings" not in result.tables and (rows := experiment.rows(result)) is not None:
        result.tables = {
            "findings": findings_of(rows).assign(experiment=experiment.verb()),
            **result.tables,
        }
    return result


def read_result(experiment: Experiment, folder: Path) -> Result:
    """Reads a finished result.

    Raises:
        InputError: A table is missing or damaged, or is of another version of kvinterp.
    """
    summary = read_summary(folder)
    tables = read_tables(folder, summary)
    with reading(folder, summary):
        result = experiment.result_of(tables, summary)
        result.tables, result.folder = tables, folder
        result.settings = summary["settings"]
        result.choices = summary.get("choices", result.settings)
        if "prompts" in vars(result):
            vars(result)["prompts"] = (
                load_prompts(folder / PROMPTS) if PROMPTS in summary["files"] else []
            )
        return with_findings(experiment, result)


def write(
    experiment: Experiment,
    folder: Path,
    settings: Mapping[str, Any],
    result: Result,
    figures: str = "none",
    ending: str = "finished",
) -> Result:
    """Writes a result into a folder, which is then finished."""
    result.settings, result.choices, result.folder = (
        settings,
        result.choices or experiment.choices(),
        folder,
    )
    with_findings(experiment, result)
    summary = {**result.contents()[1], "choices": result.choices}
    if "reading" not in summary:
        # Kept as they are said now: what is read again has no NaN, which JSON does not know.
        summary["reading"] = experiment.sentences(result)
    files_too = "png" if figures == "png" else "none"
    draw_into = (
        None
        if figures == "none"
        else lambda figures_folder: draw(experiment, result, figures_folder, files_too)
    )
    texts, files = result.others or prompts_of(result), files_of(experiment, result)
    result.files = write_result(
        folder, settings, files, result.tables, summary, texts, draw_into, ending
    )
    return result


def save(
    experiment: Experiment,
    result: Result,
    folder: str | os.PathLike[str],
    existing: str = "error",
    figures: str = "none",
) -> Path:
    """Writes a result that a function gave into a folder; see
    :meth:`kvinterp.common.result.Result.save`.
    """
    path = folder_named(folder)
    if check_free(path, experiment.verb(), existing) and is_finished(path, result.settings):
        raise unknown("way to treat an existing result", existing, ("error", "overwrite"))
    write(experiment, path, result.settings, result, figures)
    return path


def folder_named(given: Any) -> Path:
    """The path of a folder.

    Raises:
        InputError: Something else was given.
    """
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise unexpected("folder", given, "the name of a folder")
    return Path(given)


# What is shown ------------------------------------------------------------------------------------


def report(
    experiment: Experiment,
    result: Result,
    folder: str | os.PathLike[str] | None = None,
    existing: str = "error",
) -> Path:
    """Writes the page of a result; see :meth:`kvinterp.common.result.Result.report`."""
    path = folder_named(folder or result.folder or tempfile.mkdtemp(prefix="kvinterp-"))
    if result.folder is None or result.folder.resolve() != path.resolve() or existing != "error":
        experiment.save(result, path, existing, "png")
    else:
        draw(experiment, result, path / "figures", "png")
    page = path / PAGE
    if not is_file(page):
        raise InputError(
            f"there is nothing to show on a page of {str(path)!r}: nothing was measured; see the failures in summary.json."
        )
    return page


def draw(
    experiment: Experiment, result: Result, folder: Path, files_too: str = "none"
) -> list[Path]:
    """Writes the page of a result, which draws its figures itself.

    Args:
        experiment: What was asked.
        result: What was found.
        folder: Beside it the page is written, and into it files of the figures.
        files_too: ``"png"``: figures are drawn as PNG too.

    Returns:
        The files; none where there is nothing to show.
    """
    from kvinterp.report.experiment import page_of
    from kvinterp.report.panels import drawing

    if not experiment.has_page(result):
        return []
    files = list[Path]()
    if files_too == "png":
        # matplotlib is imported here alone: it takes as long as the whole of a small comparison.
        from kvinterp.report.style import png

        for name, figure in experiment.figures(result).items():
            files.append(folder / f"{name}.png")
            write_whole(files[-1], png(figure))
    pictures = [*map(drawing, experiment.drawn(result).values())]
    beside = _beside_figures(experiment, with_findings(experiment, result))
    page = folder.parent / PAGE
    write_whole(page, page_of(experiment, result, pictures, [*beside, SUMMARY]))
    return [*files, page]


def card(experiment: Experiment, result: Result) -> str:
    """A card for a notebook: one line, the first sentences, and the first figure, small."""
    from kvinterp.report.page import Answer, Picture, Text, fragment
    from kvinterp.report.style import png

    lines = result.sentences()
    rest = f"{len(lines) - SENTENCES} more in .sentences()" if len(lines) > SENTENCES else ""
    pictures = [
        Picture(name.replace("_", " "), png(drawn, DOTS))
        for name, drawn in list(result.figures().items())[:1]
    ]
    return fragment(Text(repr(result)[1:-1]), Answer(lines[:SENTENCES]), *pictures, Text(rest))
