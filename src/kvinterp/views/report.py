"""One self-contained page about one or more results: the question, this run's answer in words, and what it rests on.

Every number is computed from the tables it is given, every sentence is chosen by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvinterp.comparison import PROTOCOLS, Comparison
from kvinterp.errors import InputError
from kvinterp.models import KINDS
from kvinterp.results import Result, write_whole
from kvinterp.views import sections
from kvinterp.views.page import render
from kvinterp.views.plots import overview
from kvinterp.views.sections import Column, Gallery
from kvinterp.views.words import (
    between,
    drift_medians,
    falls,
    flattened,
    grouped,
    kind_of,
    ladder_of,
    largest_difference,
    leading,
    model_of,
    number,
    place_of,
    with_protocol,
)

__all__ = ["overview_of", "write_report"]

_TEXTS = 12


def write_report(results: Sequence[Result], out: str | Path) -> Path:
    """Writes ``report.html`` and ``figures/*.png`` into a folder.

    Args:
        results: The results. Those in the dtype of the first are the matter of the report; the same in other dtypes are
            its ladder of precisions.
        out: The folder.

    Returns:
        The page's path.

    Raises:
        InputError: There is no result, or none with a step in it.
    """
    useful = [result for result in results if not result.comparison.steps.empty]
    if not useful:
        raise InputError("there is nothing to report: no prompt could be compared; see the failures in summary.json.")
    folder = Path(out)
    about = useful[0].comparison.about
    main = [r for r in useful if r.comparison.about["dtype"] == about["dtype"]]
    rungs = ladder_of(useful, about["dtype"])
    gallery = Gallery(folder / "figures")
    parts = [
        sections.table_section(results),
        sections.kl_section(main, gallery),
        sections.drift_section(main, gallery),
        sections.attention_section(main, gallery),
        sections.kv_section(main, gallery),
        sections.precision_section(rungs, gallery) if rungs else None,
        sections.failures_section(results),
    ]
    page = render(
        title=f"kvinterp: {about['paths']['a']} against {about['paths']['b']}",
        kicker=f"kvinterp {about['kvinterp']} · {', '.join(dict.fromkeys(map(model_of, main)))} · {about['dtype']}",
        question=_question(about),
        answer=_answer(main, rungs),
        sections=[part for part in parts if part is not None],
        texts=_texts(main),
        glossary=_glossary(results),
        provenance=_provenance(results),
        files=_files(results, folder),
    )
    path = folder / "report.html"
    write_whole(path, page)
    return path


def overview_of(results: Sequence[Result]) -> Figure:
    """The four figures in one picture, from the first model and kind that can give all of them.

    Args:
        results: The results; those in the dtype of the first are shown.

    Raises:
        InputError: No model and kind recorded residual streams, patterns, K and V.
    """
    dtype = results[0].comparison.about["dtype"]
    main = [r for r in results if r.comparison.about["dtype"] == dtype and not r.comparison.steps.empty]
    lead = leading(main)
    whole = (r for r in lead if not (r.comparison.layers.empty or r.comparison.heads.empty or r.comparison.kv.empty))
    chosen = next(whole, None)
    if chosen is None:
        raise InputError("no model and kind recorded resid_post, pattern and kv: the four figures need all of them.")
    label = " ".join(place_of(chosen))
    kl = {f"{label}, {r.comparison.about['protocol']}": r.comparison for r in grouped(main)[place_of(chosen)]}
    drift = {" ".join(place_of(r)): r.comparison for r in lead if not r.comparison.layers.empty}
    return overview(kl, drift, {label: chosen.comparison}, {label: chosen.comparison})


# The answer ------------------------------------------------------------------------------------------------------------


def _question(about: Mapping[str, Any]) -> str:
    a, b = about["paths"]["a"], about["paths"]["b"]
    if (a, b) == ("cached", "recompute"):
        return "Does decoding from the KV cache compute the same thing as recomputing the whole prefix at every step?"
    return f"Does the path {a} compute the same thing as the path {b}?"


def _answer(main: Sequence[Result], rungs: Mapping[str, Sequence[Comparison]]) -> list[str]:
    matched = with_protocol(main, "matched")
    measured = matched or list(main)
    # After a flip the two paths hold different texts: only what is before it says something of the arithmetic.
    before = [r.comparison.steps[~r.comparison.steps["after_flip"].astype(bool)] for r in measured]
    steps = pd.concat(before)
    differing = steps[steps["max_abs_logit"] > 0]
    dtype = main[0].comparison.about["dtype"]
    fed = "fed the same tokens" if matched else "each fed its own tokens, before any flip"
    rest = [*_flip_sentence(main), *_fall_sentence(rungs)]
    if differing.empty:
        return [
            f"In this run, yes, bit for bit: in {dtype} the two paths, {fed}, gave the same logits at all {len(steps)} "
            "steps.",
            *rest,
        ]
    means = [float(table["kl"].mean()) for table in before if len(table)]
    return [
        f"Not bit for bit: in {dtype} the two paths, {fed}, gave different logits at {len(differing)} of {len(steps)} "
        f"steps ({len(differing) / len(steps):.0%}), the earliest at step {int(differing['step'].min())}.",
        f"The largest difference of any logit was {number(steps['max_abs_logit'].max())}. The next-token distributions "
        f"were {between(means)} nats of KL apart on average"
        + (", depending on model and kind." if len(means) > 1 else "."),
        *_where_sentence(measured),
        *rest,
    ]


def _where_sentence(measured: Sequence[Result]) -> list[str]:
    medians = [drift_medians(r.comparison) for r in leading(measured)]
    starts = [int(median[median > 0].index[0]) for median in medians if (median > 0).any()]
    ends = [float(median.iloc[-1]) for median in medians if not median.empty]
    if not starts:
        return []
    where = between([float(start) for start in starts])
    return [
        f"Inside, the typical difference of the residual stream begins at layer {where} and is {between(ends)} of the "
        "stream's length at the last layer recorded."
    ]


def _flip_sentence(main: Sequence[Result]) -> list[str]:
    examples = pd.concat([r.comparison.examples for r in main])
    steps = pd.concat([r.comparison.steps for r in main])
    flipped = examples[examples["flip_index"].notna()]
    close = f"The closest decision was won by {number(steps.loc[~steps['after_flip'], 'margin_a'].min())} logits."
    if flipped.empty:
        return [f"No token changed: in all {len(examples)} decodes both paths chose the same tokens. {close}"]
    return [
        f"In {len(flipped)} of {len(examples)} decodes the paths chose a different token somewhere, the earliest at step "
        f"{int(flipped['flip_index'].min())}. {close}"
    ]


def _fall_sentence(rungs: Mapping[str, Sequence[Comparison]]) -> list[str]:
    if not rungs:
        return []
    every = [c for group in rungs.values() for c in group]
    order = list(dict.fromkeys(c.about["dtype"] for c in every))
    largest = {dtype: max(largest_difference(c) for c in every if c.about["dtype"] == dtype) for dtype in order}
    text = "On the same problems the largest logit difference was "
    text += ", ".join(f"{number(size)} in {dtype}" for dtype, size in largest.items()) + "."
    if falls(rungs):
        return [
            f"{text} It falls with every step up in precision, which is how rounding behaves; a mistake in what the cache "
            "holds would stay."
        ]
    return [f"{text} It does not fall at every step up in precision, so rounding alone does not explain it."]


# The rest of the page --------------------------------------------------------------------------------------------------


def _texts(main: Sequence[Result]) -> dict[str, Any]:
    widest = max(main, key=lambda r: len(r.prompts))
    shown = widest.prompts[:_TEXTS]
    rows = [[prompt.id, prompt.text, _decoded(main, prompt.id)] for prompt in shown]
    note = f"{len(shown)} of {len(widest.prompts)} prompts. " if len(shown) < len(widest.prompts) else ""
    note += "Where everything decoded the same text it is shown once, otherwise with what decoded it."
    head = [Column("id"), Column("prompt", text_block=True), Column("decoded", text_block=True)]
    return {"note": note, "head": head, "rows": rows}


def _decoded(main: Sequence[Result], prompt_id: str) -> str:
    by_text: dict[str, dict[str, list[str]]] = {}
    sides: dict[str, int] = {}
    for result in main:
        examples = result.comparison.examples
        for row in examples[examples["id"] == prompt_id].to_dict("records"):
            for side in ("a", "b"):
                sides[model_of(result)] = sides.get(model_of(result), 0) + 1
                where = f"{kind_of(result)} {result.comparison.about['protocol']} {side}"
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


def _glossary(results: Sequence[Result]) -> list[tuple[str, str]]:
    return [
        (
            "path",
            "How next-token logits are computed: from a KV cache, one new token a step, or from the whole prefix again.",
        ),
        (
            "step",
            "Step 0 is the token the prefill decides; step 1 is the first that a cached path computes from one token.",
        ),
        ("matched", _sentence(PROTOCOLS["matched"])),
        ("free", _sentence(f"{PROTOCOLS['free']}, and KL from there on measures two texts instead of rounding")),
        (
            "KL (nats)",
            "0 means equal distributions. Small values are about half the probability-weighted variance of the logit "
            "differences: differences a hundred times smaller give a KL ten thousand times smaller.",
        ),
        ("exactly 0", "Not a small number: the two results are bitwise the same. Figures give zeros a place of their own."),
        (
            "margin",
            "How many logits the chosen token is ahead of the next; rounding can flip a token only where it is tiny.",
        ),
        ("unit in the last place", "The distance from a number to the next one that its dtype can hold."),
        *[(kind, _sentence(KINDS[kind])) for kind in dict.fromkeys(map(kind_of, results))],
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _provenance(results: Sequence[Result]) -> dict[str, Any]:
    rows = [flattened(r.comparison.about) for r in results]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    varying = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    return {
        "head": [Column("what"), Column("value")],
        "common": [[key, rows[0][key]] for key in keys if key not in varying],
        "varying_head": [Column("comparison"), *[Column(key) for key in varying]],
        "varying": [[r.folder.name, *[row.get(key, "") for key in varying]] for r, row in zip(results, rows, strict=True)]
        if varying
        else [],
    }


def _files(results: Sequence[Result], folder: Path) -> str:
    inside = "runs/*/" if any(r.folder != folder for r in results) else ""
    tables = ", ".join(f"{inside}{name}.parquet" for name in ("steps", "examples", "layers", "heads", "kv"))
    return (
        f"Beside this page: figures/*.png, every number above in {tables}, the statistics and settings in "
        f"{inside}summary.json, and the prompts in {inside}prompts.jsonl."
    )
