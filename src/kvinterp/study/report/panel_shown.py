"""What the panel shows, as plain data: the choices, the answer and the map, every word of them made here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from kvinterp.patching import DIRECTIONS, DONORS, PATCH_SITES, VIEWS, Asked, PatchAnswer, PatchBench, PatchMap
from kvinterp.patching.bench import EVERY, MEASURED, blocks_of
from kvinterp.study.reading.patching import asked_said, map_said, recovery_said, said_of

UNITS = {"kl": "nats", "l2": "in logits", "logit_difference": "in logits"}
NAMES = {"kl": "KL", "l2": "L2 distance", "logit_difference": "logit difference"}


def choices(models: Iterable[str], bench: PatchBench | None, asked: Asked | None) -> dict[str, Any]:
    """Every choice there is, each as [value, what it is called, what it means]."""
    offered: dict[str, Any] = {
        "model": [[name, name, ""] for name in models],
        **{
            field: [[name, name, text] for name, text in texts.items()]
            for field, texts in (("donor", DONORS), ("site", PATCH_SITES))
        },
        "direction": [[name, name, f"the {name.removeprefix('into-')} path is patched"] for name in DIRECTIONS],
        "view": [[name, name, "each cell is a patch of its own"] for name in VIEWS],
        "distance": [
            ["kl", "KL", "in nats"],
            ["l2", "L2", "of the logits"],
            ["logit_difference", "logit difference", "of two tokens, named beside the map"],
        ],
        "layer": [[0, "0", ""]],
        "head": [[None, "all", ""]],
        "step": [[EVERY, "all", ""]],
        "positions": [["newest", "newest", ""], ["all", "all", ""]],
    }
    if bench is None or asked is None:
        return offered
    count, kind = bench.adapter.facts.heads_of(asked.site)
    last = len(bench.fed)
    pieces = bench.adapter.pieces([*bench.prompt, *bench.fed])
    texts = [f"fed {piece!r}" for piece in pieces[len(bench.prompt) :]]
    spans = [*blocks_of(bench)]
    if isinstance(asked.positions, tuple) and asked.positions not in spans:
        spans.append((asked.positions[0], asked.positions[1] or len(pieces)))
    other = bench.other or bench.prompt
    return offered | {
        # Every token with whether the other prompt has another there, which no decoded one has.
        "tokens": [
            [piece, at < len(bench.prompt) and (at >= len(other) or other[at] != bench.prompt[at])]
            for at, piece in enumerate(pieces)
        ],
        "layer": [*([layer, str(layer), ""] for layer in range(bench.adapter.facts.layers)), *_several(asked.layer)],
        "head": [
            [None, "all", f"all {count} {kind}s at once" if count else "this site has no heads"],
            *([head, str(head), kind] for head in range(count)),
            *_several(asked.head),
        ],
        "step": [
            [EVERY, "all", f"steps {asked.first} to {last}, each patched"],
            *([step, str(step), texts[step - 1] if step else "the prefill"] for step in range(asked.first, last + 1)),
        ],
        "positions": [
            ["newest", "newest", "the one that decides the next token"],
            ["all", "all", "all that the step computes; of K and V all that it reads"],
            *([plain(span), _span(span), _block(span, pieces).partition(" ")[2]] for span in spans),
        ],
    }


def answer_shown(answer: PatchAnswer, bench: PatchBench, measure: str) -> dict[str, Any]:
    """What a patch did, with the distance asked for first."""
    asked = answer.asked
    lead, rest = recovery_said(answer)
    giving = {"path": f"{'cached' if asked.into == 'recompute' else 'recompute'} path", "prompt": "other prompt"}
    titles = {
        "donor": f"donor: {giving.get(asked.donor, '')}",
        "unpatched": f"unpatched {asked.into} path",
        "patched": f"patched {asked.into} path",
    }
    lists = []
    for run, rows in answer.tokens.groupby("run", sort=False):
        shown = [[repr(row.text), f"{row.probability:.4g}", f"{row.logit:.5g}"] for row in rows.itertuples()]
        lists.append({"title": titles[str(run)], "rows": shown})
    one, two = answer.pair
    distances: dict[str, tuple[str, float, float, float]] = {
        "logit_difference": (
            f"logit difference {one!r} − {two!r}",
            answer.pair_before,
            answer.pair_after,
            answer.pair_recovery,
        ),
        "kl": ("KL, nats", answer.d_before, answer.d_after, answer.recovery),
        "l2": ("L2 of the logits", answer.l2_before, answer.l2_after, answer.l2_recovery),
    }
    order = [measure, *(name for name in MEASURED if name != measure)]
    return {
        "lead": lead,
        "rest": rest,
        "said": asked_said(asked, bench.adapter.facts.heads_of(asked.site), len(bench.fed)),
        "distances": [_row(*distances[name]) for name in order],
        "lists": lists,
        "step": f"Most likely tokens at step {answer.shown_step}{', where the KL is largest' * (len(answer.steps) > 1)}",
        "seconds": f"answered in {answer.seconds:.2f} s",
    }


def map_shown(made: PatchMap, measure: str, asked: Asked) -> dict[str, Any]:
    """A map as far as it is filled, by one distance, with the cell of the patch that is shown."""
    bench = made.bench
    pieces = bench.adapter.pieces([*bench.prompt, *bench.fed])

    def label(value: Any) -> str:
        return "all" if value in (None, EVERY) else _block(value, pieces) if isinstance(value, tuple) else str(value)

    filled = [[_finite(value) for value in row] for row in made.values[measure]]
    empty = [[None] * len(made.columns)] * (len(made.rows) - made.filled)
    fields = made.fields
    chosen = [
        axis.index(getattr(asked, field)) if getattr(asked, field) in axis else -1
        for axis, field in zip((made.rows, made.columns), fields, strict=True)
    ]
    ablates = made.asked.ablates
    return {
        "name": str(id(made)),
        "view": made.view,
        "fields": list(fields),
        "values": [[plain(value) for value in axis] for axis in (made.rows, made.columns)],
        "rows": [label(value) for value in made.rows],
        "columns": [label(value) for value in made.columns],
        "cells": filled + empty,
        "filled": made.filled,
        "chosen": chosen if min(chosen) >= 0 else None,
        "title": map_said(measure, ablates),
        "unit": UNITS[measure] if ablates else f"recovery of the {NAMES[measure]}",
        "scale": "sequential" if ablates else "diverging",
        "limits": None if ablates else [-1, 1],
    }


def plain(value: Any) -> Any:
    """The value as JSON has it: a tuple becomes a list."""
    return list(value) if isinstance(value, tuple) else value


def _finite(value: float | None) -> float | None:
    """The value as JSON has it: without NaN."""
    return value if value is not None and math.isfinite(value) else None


def _row(name: str, before: float, after: float, recovery: float) -> list[str]:
    return [name, _number(before), _number(after), "undefined" if math.isnan(recovery) else f"{recovery:.2%}"]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.4g}"


def _several(numbers: Any) -> list[list[Any]]:
    """The choice of several layers or heads at once, where they were typed."""
    return [[list(numbers), said_of(numbers), "at once"]] if isinstance(numbers, tuple) else []


def _span(span: Any) -> str:
    return str(span[0]) if span[1] == span[0] + 1 else f"{span[0]}–{span[1] - 1}"


def code_of(asked: Asked, prompt: str, other: str, max_new_tokens: int, kernels: str) -> str:
    """The call that gives the same answer, for a model named ``model``."""
    given = {f.name: getattr(asked, f.name) for f in dataclasses.fields(asked) if getattr(asked, f.name) != f.default}
    if asked.donor not in ("path", "zero") and other.strip():
        given["other"] = other
    if asked.donor != "resample":
        given.pop("seed", None)
    choices = "".join(f", {name}={value!r}" for name, value in given.items())
    return f"kv.PatchBench(model, {max_new_tokens}, {kernels!r}).ask({prompt!r}{choices})"


def _block(span: Any, pieces: list[str]) -> str:
    text = "".join(pieces[slice(*span)])
    return f"{_span(span)} {text if len(text) <= 12 else text[:11] + '…'!s}"
