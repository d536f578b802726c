"""One self-contained page about one or more results: the question, this run's answer in words, and what it rests on.

Every number is computed from the tables it is given, every sentence is chosen by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvinterp.comparison import PROTOCOLS, TABLES
from kvinterp.errors import InputError
from kvinterp.files import write_whole
from kvinterp.models import KINDS
from kvinterp.results import Result
from kvinterp.views import sections
from kvinterp.views.answer import answer_of, question_of
from kvinterp.views.flips import flip_section
from kvinterp.views.page import render
from kvinterp.views.plots import overview
from kvinterp.views.precision import ladder_of
from kvinterp.views.section import Column, Gallery
from kvinterp.views.words import flattened, grouped, kind_of, leading, model_of, place_of

__all__ = ["overview_of", "write_report"]

_TEXTS = 12


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
        flip_section(flips) if flips is not None else None,
        sections.failures_section(results if flips is None else [*results, flips]),
    ]
    page = render(
        title=f"kvinterp: {about['paths']['a']} against {about['paths']['b']}",
        kicker=f"kvinterp {about['kvinterp']} · {', '.join(dict.fromkeys(map(model_of, main)))} · {about['dtype']}",
        question=question_of(useful),
        answer=answer_of(main, rungs),
        sections=[part for part in parts if part is not None],
        texts=_texts(main),
        glossary=_glossary(results),
        provenance=_provenance(results if flips is None else [*results, flips]),
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
    whole = (
        r for r in lead if not (r.comparison.layers.empty or r.comparison.heads.empty or r.comparison.kv_positions.empty)
    )
    chosen = next(whole, None)
    if chosen is None:
        raise InputError("no model and kind recorded resid_post, pattern and kv: the four figures need all of them.")
    label = " ".join(place_of(chosen))
    kl = {f"{label}, {r.comparison.about['protocol']}": r.comparison for r in grouped(main)[place_of(chosen)]}
    drift = {" ".join(place_of(r)): r.comparison for r in lead if not r.comparison.layers.empty}
    return overview(kl, drift, {label: chosen.comparison}, {label: chosen.comparison})


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
            "0 for equal distributions. Small values are about half the probability-weighted variance of the logit "
            "differences: differences a hundred times smaller give a KL ten thousand times smaller.",
        ),
        (
            "exactly 0",
            "Not a small number. Logits, vectors, K and V that differ by exactly 0 are the same to the bit; a KL of exactly 0 "
            "can also be one too small for float64. Figures give zeros a place of their own.",
        ),
        (
            "margin",
            "How many logits the most likely token is ahead of the next. A greedy choice can flip only where the largest "
            "logit difference is at least half of it.",
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
    filled = [name for name in TABLES if any(len(getattr(r.comparison, name)) for r in results)]
    tables = ", ".join(f"{inside}{name}.parquet" for name in filled)
    return (
        f"Beside this page: figures/*.png, every number above in {tables}, the statistics and settings in "
        f"{inside}summary.json, and the prompts in {inside}prompts.jsonl."
    )
