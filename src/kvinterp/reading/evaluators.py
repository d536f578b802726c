"""What an evaluation found, a sentence each, with how many documents it is of, its interval and the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvinterp.reading.numbers import counted, ends_said, listed, machine_of, number

_SHOWN = 12
"""Of so many scores a sentence each; the table holds all."""


def said_of_eval(summary: Mapping[str, Any]) -> list[str]:
    """What an evaluation found; ``summary`` is that of :class:`kvinterp.experiments.eval.Eval`."""
    provenance, rows = summary["provenance"], summary["results"]
    asked = summary["paths"][-1]
    lines = [
        f"{provenance['model']} ({provenance['kind']}, {provenance['dtype']}) on path {asked}, "
        f"by lm-evaluation-harness {summary['lm_eval']}, on {machine_of(provenance)}. Intervals are 95%, over documents."
    ]
    own = [row for row in rows if row["path"] == asked]
    lines += [_score(row, rows, summary["paths"]) for row in own[:_SHOWN]]
    if len(own) > _SHOWN:
        lines.append(f"{len(own) - _SHOWN} more scores are in the table.")
    tested = [row for row in own if row["p"] is not None and row["changed"]]
    if len(tested) > 1:
        lines.append(f"The {len(tested)} p values are not corrected for their number.")
    return [*lines, *_how_asked(summary)]


def score_named(row: Mapping[str, Any]) -> str:
    """A score's name: task, metric, and the filter where there is one."""
    kept = "" if row["filter"] == "none" else f" ({row['filter']})"
    return f"{row['task']}, {row['metric']}{kept}"


def _score(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> str:
    said = f"{score_named(row)}: {number(row['value'])}{ends_said(row['low'], row['high'])} over "
    said += counted(row["documents"], "document")
    same = ("task", "metric", "filter")
    other = [one for one in rows if one["path"] == paths[0] and all(one[key] == row[key] for key in same)]
    if len(paths) < 2 or not other:
        return f"{said}."
    said += f"; on path {paths[0]} {number(other[0]['value'])}"
    if row["difference"] is None:
        return f"{said}."
    if not row["changed"]:
        return f"{said}: every document's score is the same on both."
    said += f": a difference of {number(row['difference'])}{ends_said(row['difference_low'], row['difference_high'])}"
    if row["p"] is None:
        return f"{said}, from {counted(int(row['changed']), 'document')} with another score."
    return (
        f"{said}, from {counted(int(row['better']), 'document')} that only {row['path']} has right and {int(row['worse'])} "
        f"that only {paths[0]} has (McNemar's exact p = {number(row['p'])})."
    )


def _how_asked(summary: Mapping[str, Any]) -> list[str]:
    asked, lines = summary["paths"][-1], []
    counts, through = summary["counts"][asked], summary["through"]
    if asked.startswith("cached") and "prefill=stored" not in asked:
        last = (
            "last token of the context is"
            if through == 1
            else f"last {through} tokens of the context, or all but its first where it has fewer, are"
        )
        how = "the first token of an answer is decided by it alone."
        if through:
            how = f"the {last} fed through the cache, so that what decides the answer has read what the cache keeps."
        lines.append(
            "The prefill reads keys and values as they were computed. Where likelihoods or one token are asked for, " + how
        )
        alone, asked_for = counts["answered_by_prefill"], counted(counts["requests"], "request")
        lines.append(
            f"{alone} of {asked_for} never read the cache: no policy touched them."
            if alone
            else f"Of {asked_for}, none was answered by the prefill alone: each read the cache for at least one token."
        )
    cut = {path: held["truncated"] for path, held in summary["counts"].items() if held["truncated"]}
    if cut:
        said = listed([f"{count} on {path}" for path, count in cut.items()])
        lines.append(f"Contexts were cut from the left to fit the model's: {said}.")
    return lines
