"""The page about one or more comparisons: the question, this run's answer in words, and what it rests on.

Every number is computed from the tables it is given, every sentence is chosen by them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvinterp.common.numbers import against, number
from kvinterp.common.store import write_whole
from kvinterp.comparison import PARTS, TABLES, Comparison
from kvinterp.errors import InputError
from kvinterp.study.findings import finding, findings_of
from kvinterp.study.findings.of_comparison import headline_of, rows_of_comparison
from kvinterp.study.reading.answer import matched, notes_of, question_of
from kvinterp.study.reading.changed import flips_said
from kvinterp.study.reading.glossary import glossary
from kvinterp.study.reading.precision import ladder_said
from kvinterp.study.reading.results import (
    grouped,
    kind_of,
    leading,
    model_of,
    only,
    place_of,
    right_answers,
    unit_roundoff,
)
from kvinterp.study.report.experiment import made_with_parts
from kvinterp.study.report.figures import FIGURES, Labelled, figure_named, overview, precision_ladder
from kvinterp.study.report.findings import findings_table
from kvinterp.study.report.page import Answer, Bullets, Column, Folded, Links, Pairs, Picture, Section, Table, Text, render
from kvinterp.study.report.style import keeping, save
from kvinterp.study.report.svg import picture
from kvinterp.study.report.tokens import SCRIPTS, SHEETS, called, changes
from kvinterp.study.results import Result

_TEXTS = 12


def pictured(folder: Path, name: str, figure: Figure, caption: str) -> Picture:
    """Saves a figure as ``name.png`` in a folder, for the page to show."""
    with keeping():
        return picture(save(figure, folder / f"{name}.png"), caption)


def write_report(results: Sequence[Result], out: str | Path, flips: Result | None = None) -> Path:
    """Writes ``report.html`` and ``figures/*.png`` into a folder.

    Args:
        results: The results. Those in the dtype of the first are the matter of the report; the same in other dtypes are
            its ladder of precisions.
        out: The folder.
        flips: A comparison in which to show what a flipped token changes; it counts in nothing else on the page.

    Returns:
        The page's path.

    Raises:
        InputError: There is no result, or none with a step in it.
    """
    useful = [result for result in results if not result.comparison.steps.empty]
    if not useful:
        raise InputError("there is nothing to report: no prompt could be compared; see the failures in summary.json.")
    folder = Path(out)
    provenance = useful[0].comparison.provenance
    main = [r for r in useful if r.comparison.provenance["dtype"] == provenance["dtype"]]
    rungs = ladder_of(useful, provenance["dtype"])
    every = [*results, *filter(None, [flips])]
    drawn = folder / "figures"
    of_kinds = (kl_pictures, drift_pictures, attention_pictures, kv_pictures, routing_pictures)
    pictures = [picture for draw in of_kinds for picture in draw(main, drawn)]
    sections = [
        precision_section(rungs, drawn) if rungs else None,
        flip_section(flips) if flips is not None else None,
        failures_section(every),
    ]
    parts: list[Any] = [
        Answer([*headline_of([r.comparison for r in matched(main)]), *ladder_said(rungs)]),
        *pictures[:1],
        findings_table(findings_between(main), file=""),
        *changes(called([*main, *(r for r in [flips] if r is not None and not r.comparison.steps.empty)])),
        *([Text("Where inside", look="h2")] if pictures[1:] else []),
        *pictures[1:],
        *(section for section in sections if section is not None),
        Folded("What to know of these numbers", [Bullets(notes_of(main))]),
        *_texts(main),
        Folded("How to read this", [Pairs(glossary(map(kind_of, results)))]),
        *made_with_parts({r.folder.name: r.comparison.provenance for r in every}, "comparison"),
        *_files(every, folder),
    ]
    title = f"kvinterp: {against(provenance)}"
    kicker = f"kvinterp {provenance['kvinterp']} · {', '.join(dict.fromkeys(map(model_of, main)))} · {provenance['dtype']}"
    path = folder / "report.html"
    write_whole(path, render("report", title, parts, question_of(useful), kicker, scripts=SCRIPTS, sheets=SHEETS))
    return path


def overview_of(results: Sequence[Result]) -> Figure:
    """The four figures in one picture, from the first model and kind that can give all of them.

    Args:
        results: The results; those in the dtype of the first are shown.

    Raises:
        InputError: No model and kind recorded residual streams, patterns, K and V.
    """
    dtype = results[0].comparison.provenance["dtype"]
    main = [r for r in results if r.comparison.provenance["dtype"] == dtype and not r.comparison.steps.empty]
    lead = leading(main)
    recorded = ("layers", "heads", "kv_positions")
    chosen = next((r for r in lead if all(map(r.comparison.count, recorded))), None)
    if chosen is None:
        raise InputError("no model and kind recorded resid_post, pattern and kv: the four figures need all of them.")
    label = " ".join(place_of(chosen))
    kl = {f"{label}, {r.comparison.provenance['protocol']}": r.comparison for r in grouped(main)[place_of(chosen)]}
    drift = {" ".join(place_of(r)): r.comparison for r in lead if r.comparison.count("layers")}
    return overview(kl, drift, {label: chosen.comparison}, {label: chosen.comparison})


# Findings --------------------------------------------------------------------------------------------------------------


def findings_between(results: Sequence[Result]) -> pd.DataFrame:
    """The findings of all comparisons, each with what tells it from the others."""
    labels: dict[str, Callable[[Result], str]] = {
        "model": model_of,
        "kind": kind_of,
        "protocol": lambda result: result.comparison.provenance["protocol"],
        "pair": lambda result: against(result.comparison.provenance),
        "strategy": lambda result: result.comparison.provenance["strategy"],
    }
    varying = {name: of for name, of in labels.items() if len({of(r) for r in results}) > 1}
    rows = []
    for result in results:
        of = {name: label(result) for name, label in varying.items()}
        right = right_answers(result)
        found = rows_of_comparison(result.comparison)
        for side, path in zip("ab", result.comparison.provenance["paths"].values(), strict=True) if right else ():
            share = right["ab".index(side)] / len(result.comparison.examples) if right else 0.0
            found.append(
                finding("prompts answered right", share, n=len(result.comparison.examples), measure="%", path=path)
            )
        rows += [{**of, **row} for row in found]
    return findings_of(rows)


# Pictures --------------------------------------------------------------------------------------------------------------


def _pictures(
    folder: Path, figure: str, lines: Mapping[tuple[str, str], Labelled], main: Sequence[Result]
) -> list[Picture]:
    """One figure of each model and kind; where the kind is empty, of all that are drawn."""
    made = []
    for (model, kind), drawn in lines.items():
        caption = f"{model}, {kind or ' and '.join(drawn)}: {FIGURES[figure]}"
        made.append(pictured(folder, file_name(model, kind, figure, main), figure_named(figure, drawn), caption))
    return made


def file_name(model: str, kind: str, figure: str, main: Sequence[Result]) -> str:
    """The figure's file name: plain where there is one result, with model and kind where there are more."""
    if len(main) == 1:
        return figure
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in model.rpartition("/")[2])
    return "-".join(part for part in (safe, kind, figure) if part)


def kl_pictures(main: Sequence[Result], folder: Path) -> list[Picture]:
    """How far apart the next-token distributions are, step by step."""
    lines = {
        place: {r.comparison.provenance["protocol"]: r.comparison for r in group if not r.comparison.steps.empty}
        for place, group in grouped(main).items()
    }
    return _pictures(folder, "kl_by_step", {place: drawn for place, drawn in lines.items() if drawn}, main)


def drift_pictures(main: Sequence[Result], folder: Path) -> list[Picture]:
    """How far apart the residual streams are, layer by layer."""
    lines: dict[tuple[str, str], dict[str, Comparison]] = {}
    for result in leading(main):
        if result.comparison.count("layers"):
            lines.setdefault((model_of(result), ""), {})[kind_of(result)] = result.comparison
    return _pictures(folder, "drift_by_layer", lines, main)


def attention_pictures(main: Sequence[Result], folder: Path) -> list[Picture]:
    """How far apart the attention patterns are, head by head."""
    lines = {place_of(r): {"": r.comparison} for r in leading(main) if r.comparison.count("heads")}
    return _pictures(folder, "attention_by_head", lines, main)


def kv_pictures(main: Sequence[Result], folder: Path) -> list[Picture]:
    """How far apart K and V are, position by position."""
    lines = {place_of(r): {"": r.comparison} for r in leading(main) if r.comparison.count("kv_positions")}
    return _pictures(folder, "kv_by_position", lines, main)


def routing_pictures(main: Sequence[Result], folder: Path) -> list[Picture]:
    """How often other experts are chosen, layer by layer and step by step."""
    lines = {place_of(r): {"": r.comparison} for r in leading(main) if (r.comparison.routing["step"] > 0).any()}
    return _pictures(folder, "routing_by_step", lines, main)


# Sections --------------------------------------------------------------------------------------------------------------


def precision_section(rungs: Mapping[str, Sequence[Comparison]], folder: Path) -> Section:
    """The same weights and prompts in more than one dtype."""
    picture = pictured(folder, "precision_ladder", precision_ladder(rungs), "Largest logit difference by dtype")
    names = ("steps", "largest logit difference", "unit roundoff", "difference in unit roundoffs", "mean KL")
    head = [Column("model"), Column("dtype"), *[Column(name, "number") for name in names]]
    rows = []
    for model, group in rungs.items():
        for c in group:
            unit, largest = unit_roundoff(c.provenance["dtype"]), float(c.steps["max_abs_logit"].max())
            numbers = (largest, unit, largest / unit, c.steps["kl"].mean())
            rows.append([model, c.provenance["dtype"], str(len(c.steps)), *map(number, numbers)])
    return Section("The same in higher precision", [], [], [picture], head, rows)


def ladder_of(results: Sequence[Result], dtype: str) -> dict[str, list[Comparison]]:
    """For each model the same kind, protocol, paths and prompts in more than one dtype, ``dtype`` first.

    Returns:
        The comparisons by the model's name; with its kind and protocol where a model has more than one such ladder.
    """
    found: dict[tuple[str, ...], list[Comparison]] = {}
    for rung in results:
        if rung.comparison.provenance["dtype"] == dtype or rung.comparison.steps.empty:
            continue
        key = _setting(rung)
        base = next((r for r in results if r.comparison.provenance["dtype"] == dtype and _setting(r) == key), None)
        if base is None or base.comparison.steps.empty:
            continue
        if key not in found:
            examples = base.comparison.examples
            shared = examples[examples["id"].isin(rung.comparison.examples["id"])]["example"]
            found[key] = [_only(base.comparison, shared)]
        found[key].append(rung.comparison)
    models = [key[0] for key in found]
    return {key[0] if models.count(key[0]) == 1 else ", ".join(key[:3]): group for key, group in found.items()}


def _setting(result: Result) -> tuple[str, ...]:
    provenance = result.comparison.provenance
    return *place_of(result), provenance["protocol"], provenance["paths"]["a"], provenance["paths"]["b"]


def _only(comparison: Comparison, examples: pd.Series) -> Comparison:
    tables = {n: (t := getattr(comparison, n))[t["example"].isin(examples)] for n in PARTS}
    return Comparison(**tables, provenance=comparison.provenance)


def flip_section(result: Result) -> Section:
    """What happens where a token flips, on a comparison that is made to show it and counts nowhere else on the page."""
    done, seen, rows = flips_said(result)
    head = [Column("prompt, path"), Column("decoded", "pre"), Column("answer")] if rows else []
    return Section("A token that flips", done, seen, head=head, rows=rows)


def failures_section(results: Sequence[Result]) -> Section | None:
    """The prompts in which NaN or Inf appeared."""
    rows = [
        [r.folder.name, str(row["id"]), str(row["message"])]
        for r in results
        for row in r.comparison.failures.to_dict("records")
    ]
    if not rows:
        return None
    done = ["NaN or Inf appeared in these; they are left out of every number and figure above."]
    return Section("Left out", done, [], head=[Column("comparison"), Column("prompt"), Column("what happened")], rows=rows)


# The rest of the page --------------------------------------------------------------------------------------------------


def _texts(main: Sequence[Result]) -> list[Any]:
    widest = max(main, key=lambda r: len(r.prompts))
    shown = widest.prompts[:_TEXTS]
    rows = [[prompt.id, prompt.text, _decoded(main, prompt.id)] for prompt in shown]
    note = f"{len(shown)} of {len(widest.prompts)} prompts. " if len(shown) < len(widest.prompts) else ""
    note += "Where everything decoded the same text it is shown once, otherwise with what decoded it."
    head = [Column("id"), Column("prompt", "pre"), Column("decoded", "pre")]
    return [Folded("Prompts and what was decoded", [Text(note), Table(head, rows)])]


def _decoded(main: Sequence[Result], prompt_id: str) -> str:
    by_text: dict[str, dict[str, list[str]]] = {}
    sides: dict[str, int] = {}
    for result in main:
        examples = result.comparison.examples
        for row in only(examples, id=prompt_id).to_dict("records"):
            for side in ("a", "b"):
                sides[model_of(result)] = sides.get(model_of(result), 0) + 1
                where = f"{kind_of(result)} {result.comparison.provenance['protocol']} {side}"
                by_text.setdefault(str(row[f"text_{side}"]), {}).setdefault(model_of(result), []).append(where)
    if not by_text:
        return "(left out: see the failures)"
    if len(by_text) == 1:
        return next(iter(by_text))
    return "\n".join(f"{text}\n    [{_who(models, sides)}]" for text, models in by_text.items())


def _who(models: Mapping[str, Sequence[str]], sides: Mapping[str, int]) -> str:
    """Each model, with kind, protocol and path where not all of the model's decoded the same text."""
    return "; ".join(
        model if len(where) == sides[model] else f"{model}: {', '.join(where)}" for model, where in models.items()
    )


def _files(results: Sequence[Result], folder: Path) -> list[Any]:
    """Where every number stands: the tables of each result, by links from the page."""
    rows: list[list[str | Links]] = []
    for result in results:
        place = "" if result.folder == folder else f"{os.path.relpath(result.folder, folder)}/".replace(os.sep, "/")
        names = [f"{name}.parquet" for name in filter(result.comparison.count, TABLES)]
        names += ["summary.json", "prompts.jsonl"]
        rows.append([result.folder.name, Links(files={name: place + name for name in names})])
    note = "The tables hold every number above, summary.json statistics and settings, figures/ every figure as PNG."
    return [Folded("Files", [Text(note), Table([Column("comparison"), Column("its files")], rows, look="cards")])]
