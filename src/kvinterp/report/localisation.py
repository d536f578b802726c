"""Figures of localisation: recovery of every patch by layer, the paper's patch by example, and the split of the difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, FigureBase

from kvinterp.patching import Decomposition, Sweep
from kvinterp.reading.localisation import localisation_title
from kvinterp.reading.results import only
from kvinterp.report.axes import broken, headed, mapped, percents, whole_numbers
from kvinterp.report.decomposition import decomposition_figure
from kvinterp.report.recovery import DIVERGING, recovery_figure, write_recovery
from kvinterp.report.style import of_models, sheet

_WRITTEN_LAYERS = 8
"""So many layers of a model have their numbers written."""


def localisation_figures(
    found: tuple[Mapping[tuple[str, str], Sweep], Mapping[str, Decomposition]],
) -> dict[str, Figure]:
    """The map of all patches, and of each model the paper's patch by example and the split.

    Args:
        found: The sweeps by model and part, and the splits by model.
    """
    sweeps, splits = found
    drawn: dict[str, Figure] = {}
    if sweeps:
        drawn["localisation"] = recovery_map(sweeps)
    papers = {model: swept for (model, part), swept in sweeps.items() if part == "paper"}
    for number, (model, swept) in enumerate(papers.items()):
        drawn[_named("localisation_paper", number, model)] = recovery_figure(swept)
    for number, (model, split) in enumerate(splits.items()):
        drawn[_named("localisation_decomposition", number, model)] = decomposition_figure(split)
    return drawn


def _named(name: str, number: int, model: str) -> str:
    """The name of a figure of one model: its number, and what of its name every file system takes."""
    bare = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in model.rpartition(":")[2])
    return f"{name}_{number}_{bare[-40:]}"


def recovery_map(sweeps: Mapping[tuple[str, str], Sweep]) -> Figure:
    """Median recovery by layer of sweeps by model and part: a row a patch and sweep, a panel a model; white at 0."""
    table = pd.concat(
        [swept.aggregate().assign(model=model, part=part) for (model, part), swept in sweeps.items()], ignore_index=True
    )
    distances = {part: str(swept.provenance["distance"]).upper() for (_, part), swept in sweeps.items()}
    models = list(dict.fromkeys(table["model"]))
    rows = list(dict.fromkeys(zip(table["part"], table["sweep"], strict=True)))
    with sheet(max(7.2, 3.0 + 2.4 * len(models)), 1.6 + 0.3 * len(rows)) as figure:
        inner: FigureBase = figure.subfigures(1, 1, squeeze=False)[0, 0]
        panels = inner.subplots(1, len(models), squeeze=False)[0]
        image: Any = None
        for axis, model in zip(panels, models, strict=True):
            mine = only(table, model=model).pivot_table(
                index=["part", "sweep"], columns="layer", values="median", dropna=False
            )
            values = mine.reindex(pd.MultiIndex.from_tuples(rows)).to_numpy(float)[::-1]
            image = mapped(axis, values, Normalize(-1, 1), DIVERGING)
            for at, layer in np.ndindex(*values.shape):
                write_recovery(axis, at, layer, values[at, layer], values.shape[1] <= _WRITTEN_LAYERS)
            whole_numbers(axis.xaxis, 10)
            axis.set_yticks([])
            axis.set_xlabel("layer")
            axis.set_title(broken(model.removeprefix("zoo:"), 24), fontsize=9)
        names = [f"{part}, {sweep} ({distances[part]})" for part, sweep in rows[::-1]]
        panels[0].set_yticks(range(len(rows)), names, fontsize=7.5)
        bar = inner.colorbar(image, ax=list(panels), pad=0.02, aspect=30, extend="both")
        percents(bar.ax.yaxis)
        bar.set_label("median recovery over examples")
        bar.ax.grid(visible=False)
        headed(figure, localisation_title(table))
        # One signature a model.
        provenances = list({model: swept.provenance for (model, _), swept in sweeps.items()}.values())
        return of_models(figure, provenances, ("in brackets: the distance", "n/a: no difference to recover"))
