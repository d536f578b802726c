"""The figure of an evaluation: each score on each path, with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kvinterp.reading.evaluators import score_named
from kvinterp.report.axes import broken, on_lines
from kvinterp.report.style import of_models, series_of, sheet

_PANELS = 24


def scores_figure(summary: Mapping[str, Any]) -> Figure:
    """A panel a score of :class:`kvinterp.experiments.eval.Eval`, each in its own unit; a line a path, with its interval."""
    rows, paths = summary["results"], summary["paths"]
    scores = list(dict.fromkeys((row["task"], row["metric"], row["filter"]) for row in rows))[:_PANELS]
    with sheet(6.8, 0.7 + (0.5 + 0.24 * len(paths)) * len(scores)) as figure:
        panels = figure.subplots(len(scores), 1, squeeze=False)[:, 0]
        for axes, score in zip(panels, scores, strict=True):
            of = [row for row in rows if (row["task"], row["metric"], row["filter"]) == score]
            for row in of:
                height = paths.index(row["path"])
                series = series_of(height)
                if row["low"] is not None:
                    axes.hlines(height, row["low"], row["high"], color=series.color, linewidth=1.6)
                axes.plot(row["value"], height, series.marker, color=series.color, markersize=5)
            axes.set_yticks(range(len(paths)), [broken(path) for path in paths])
            axes.set_ylim(len(paths) - 0.5, -0.5)
            on_lines(axes)
            better = {True: ", higher is better", False: ", lower is better"}.get(of[0]["higher_is_better"], "")
            axes.set_title(broken(f"{score_named(of[0])}{better}, {of[0]['documents']} documents", 56), fontsize=8.5)
        of_models(figure, [summary["provenance"]])
    return figure
