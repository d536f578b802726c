"""The page and figure of an evaluation: each score on each path, with its interval, and the answers that changed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvinterp.files import write_whole
from kvinterp.reading.evaluators import score_named
from kvinterp.reading.numbers import number
from kvinterp.report.page import Answer, Column, Pairs, Picture, Table, Text, render
from kvinterp.report.style import SERIES, png, save, sheet, signed

__all__ = ["scores_figure", "write_eval_report"]

_PANELS, _CHANGED, _LONG = 24, 12, 600


def write_eval_report(summary: Mapping[str, Any], samples: pd.DataFrame, folder: Path) -> list[Path]:
    """Writes ``eval_scores.png`` into a folder and ``report.html`` above it.

    Args:
        summary: That of :class:`kvinterp.experiments.eval.Eval`.
        samples: What each document gave on each path.
        folder: That of the figures.
    """
    figure = scores_figure(summary)
    about = summary["provenance"]
    shown = ("model", "kind", "dtype", "attention", "device", "threads", "torch", "transformers", "kvinterp", "weights")
    made_with = {name: str(about[name]) for name in shown} | {"lm-evaluation-harness": str(summary["lm_eval"])}
    tasks = {f"task {name}": f"version {version}" for name, version in summary["versions"].items()}
    parts = [
        Answer(summary["reading"]),
        Text("Scores", look="h2"),
        _scores(summary["results"]),
        Picture("Each score with its 95% interval over documents.", png(figure)),
        *_changed(summary["paths"], samples),
        Text("Made with", look="h2"),
        Pairs(made_with | tasks, "beside"),
    ]
    title = f"{about['model']}: scores on {summary['paths'][-1]}"
    write_whole(folder.parent / "report.html", render("report", title, parts, kicker="kvinterp eval"))
    return [save(figure, folder / "eval_scores.png"), folder.parent / "report.html"]


def scores_figure(summary: Mapping[str, Any]) -> Figure:
    """A panel a score, since each has its own unit; a line a path, with its interval."""
    rows, paths = summary["results"], summary["paths"]
    scores = list(dict.fromkeys((row["task"], row["metric"], row["filter"]) for row in rows))[:_PANELS]
    with sheet(6.8, 0.7 + (0.5 + 0.24 * len(paths)) * len(scores)) as figure:
        panels = figure.subplots(len(scores), 1, squeeze=False)[:, 0]
        for axes, score in zip(panels, scores, strict=True):
            of = [row for row in rows if (row["task"], row["metric"], row["filter"]) == score]
            for row in of:
                height = paths.index(row["path"])
                series = SERIES[height % len(SERIES)]
                if row["low"] is not None:
                    axes.hlines(height, row["low"], row["high"], color=series.color, linewidth=1.6)
                axes.plot(row["value"], height, series.marker, color=series.color, markersize=5)
            axes.set_yticks(range(len(paths)), ["\n".join(textwrap.wrap(path, 34)) for path in paths])
            axes.set_ylim(len(paths) - 0.5, -0.5)
            axes.grid(visible=True, axis="x")
            axes.grid(visible=False, axis="y")
            better = {True: ", higher is better", False: ", lower is better"}.get(of[0]["higher_is_better"], "")
            axes.set_title(f"{score_named(of[0])}{better}, {of[0]['documents']} documents", fontsize=8.5)
        about = summary["provenance"]
        said = f"{about['model']} · {about['kind']} · {about['dtype']} · weights {about['weights']} · {about['device']}"
        signed(figure, "\n".join(textwrap.wrap(said, 120)), [about])
    return figure


def _scores(rows: Sequence[Mapping[str, Any]]) -> Table:
    head = [
        *(Column(name) for name in ("task", "metric", "filter", "path")),
        *(
            Column(name, "number")
            for name in ("score", "95% interval", "difference", "95% interval", "documents changed", "p")
        ),
        *(Column(name, "number") for name in ("documents", "worked examples")),
    ]
    cells = [
        [
            *(str(row[name]) for name in ("task", "metric", "filter", "path")),
            _shown(row["value"]),
            _interval(row["low"], row["high"]),
            _shown(row["difference"]),
            _interval(row["difference_low"], row["difference_high"]),
            _shown(row["changed"]),
            _shown(row["p"]),
            str(row["documents"]),
            _shown(row["fewshot"]),
        ]
        for row in rows
    ]
    return Table(head, cells)


def _shown(value: float | None) -> str:
    return "–" if value is None else number(value)


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{number(low)} to {number(high)}"


def _changed(paths: Sequence[str], samples: pd.DataFrame) -> list[Any]:
    """The first documents whose score is another on the second path, with what was answered."""
    if len(paths) < 2:
        return []
    keys = ["task", "doc", "metric", "filter"]
    sides = [samples[samples["path"] == path].drop(columns="path") for path in paths]
    beside = sides[0].merge(sides[1], on=keys, suffixes=("_a", "_b"))
    changed = beside[beside["value_a"] != beside["value_b"]].dropna(subset=["value_a", "value_b"])
    if changed.empty:
        return []
    head = [Column("task"), Column("document", "number"), Column("metric")]
    head += [Column(f"{what}, {path}", kind) for path in paths for what, kind in (("score", "number"), ("answer", "pre"))]
    rows = [
        [row["task"], str(row["doc"]), f"{row['metric']} ({row['filter']})"]
        + [text for side in "ab" for text in (number(row[f"value_{side}"]), str(row[f"answer_{side}"])[:_LONG])]
        for row in changed.head(_CHANGED).to_dict("records")
    ]
    said = f"Documents with another score: {min(len(changed), _CHANGED)} of {len(changed)}"
    return [Text(said, look="h2"), Table(head, rows)]
