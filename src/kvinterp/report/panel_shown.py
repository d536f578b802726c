"""Makes what the panel shows, as plain data: the choices and the answer, with all their words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

from kvinterp.patching import DIRECTIONS, DONORS, PATCH_SITES, PatchAnswer, PatchBench, PatchRequest
from kvinterp.patching.bench import EVERY
from kvinterp.patching.patch import PATCHED_CACHE

Data: TypeAlias = dict[str, Any]
"""Plain data, as JSON has them."""


def choices(models: Iterable[str]) -> Data:
    """The choices that are the same for every model and patch, each as [value, label, meaning]."""
    return {
        "model": [[name, name, ""] for name in models],
        "donor": [[name, name, text] for name, text in DONORS.items()],
        "site": [[name, name, text] for name, text in PATCH_SITES.items()],
        "direction": [
            [name, name, f"the {name.removeprefix('into-')} path is patched"] for name in DIRECTIONS
        ],
        "distance": [
            ["l2", "L2", "of the logits"],
            ["kl", "KL", "in nats"],
            ["logit_difference", "logit difference", "of two tokens, named beside it"],
        ],
    }


def choices_of(bench: PatchBench, question: PatchRequest) -> Data:
    """The choices that belong to a model, its prompt and the patch."""
    facts = bench.adapter.facts
    count, kind = facts.heads_of(question.site)
    prompt, other = bench.prompt, bench.other or bench.prompt
    pieces = bench.adapter.pieces([*prompt, *bench.fed])
    steps = range(question.first, len(bench.fed) + 1)
    span = question.positions
    layers, heads = (
        [[list(numbers), numbers_in_words(numbers), "at once"]]
        if isinstance(numbers, tuple)
        else []
        for numbers in (question.layer, question.head)
    )
    spans = []
    if isinstance(span, tuple):
        text = "".join(pieces[slice(*span)])
        spans = [
            [list(span), positions_in_words(span), text if len(text) <= 12 else f"{text[:11]}…"]
        ]
    return {
        # Every token, and whether the other prompt has a different one in its place; False for
        # decoded tokens.
        "tokens": [
            [piece, at < len(prompt) and other[at : at + 1] != prompt[at : at + 1]]
            for at, piece in enumerate(pieces)
        ],
        "layer": [*([layer, str(layer), ""] for layer in range(facts.layers)), *layers],
        "head": [
            [None, "all", f"all {count} {kind}s at once" if count else "this site has no heads"],
            *([head, str(head), kind] for head in range(count)),
            *heads,
        ],
        "step": [
            [EVERY, "all", f"steps {question.first} to {len(bench.fed)}, each patched"],
            *(
                [s, str(s), f"fed {pieces[len(prompt) + s - 1]!r}" if s else "the prefill"]
                for s in steps
            ),
        ],
        "positions": [
            ["newest", "newest", "the one that decides the next token"],
            ["all", "all", "all that the step computes; of K and V all that it reads"],
            *spans,
        ],
    }


def answer_data(answer: PatchAnswer, bench: PatchBench, measure: str) -> Data:
    """The effect of a patch as plain data, the chosen distance first."""
    question = answer.request
    lead, *rest = answer.sentences()
    giving = {"path": f"{question.other} path", "prompt": "other prompt"}
    titles = {
        "donor": f"donor: {giving.get(question.donor, '')}",
        "unpatched": f"unpatched {question.into} path",
        "patched": f"patched {question.into} path",
    }
    lists = [
        {
            "title": titles[str(run)],
            "rows": [
                [repr(row.text), f"{row.probability:.4g}", f"{row.logit:.5g}"]
                for row in rows.itertuples()
            ],
        }
        for run, rows in answer.tokens.groupby("run", sort=False)
    ]
    first, second = answer.pair
    distances = {
        "l2": ("L2 of the logits", answer.d_before, answer.d_after, answer.recovery),
        "kl": ("KL, nats", answer.kl_before, answer.kl_after, answer.kl_recovery),
        "logit_difference": (
            f"logit difference {first!r} − {second!r}",
            answer.pair_before,
            answer.pair_after,
            answer.pair_recovery,
        ),
    }
    return {
        "lead": lead,
        "rest": f"{'. '.join(rest)}.",
        "said": question_in_words(
            question, bench.adapter.facts.heads_of(question.site), len(bench.fed)
        ),
        "distances": [
            [
                name,
                f"{before:.4g}",
                f"{after:.4g}",
                "undefined" if math.isnan(share) else f"{share:.2%}",
            ]
            for name, before, after, share in (distances.pop(measure), *distances.values())
        ],
        "lists": lists,
        "step": f"Most likely tokens at step {answer.shown_step}{', where the KL is largest' * (len(answer.steps) > 1)}",
        "seconds": f"answered in {answer.seconds:.2f} s",
    }


def code_of(question: PatchRequest, prompt: str, other: str, bench: str) -> str:
    """The call that gives the same answer, for a model named ``model``, on a bench made of these
    arguments.
    """
    options = {
        name: value
        for name, value in vars(question).items()
        if value != getattr(PatchRequest, name)
    }
    if question.donor == "prompt" and other.strip():
        options["other"] = other
    choices = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"kv.PatchBench(model, {bench}).ask({prompt!r}{choices})"


# Sentences ----------------------------------------------------------------------------------------


def label_of(question: PatchRequest) -> str:
    """The choices of a patch in a few words."""
    head = "" if question.head is None else f", head {numbers_in_words(question.head)}"
    label = f"{question.site}, layer {numbers_in_words(question.layer)}{head}"
    positions = question.positions
    where = (
        f"positions {positions_in_words(positions)}"
        if isinstance(positions, tuple)
        else f"{positions} positions"
    )
    return f"{label}, {where}, step {question.step}, {question.direction}, {question.donor}"


def question_in_words(question: PatchRequest, heads: tuple[int, str], last_step: int) -> str:
    """Says in words what a patch moves, and from where.

    Args:
        question: The patch.
        heads: The number of heads of the site, and their name.
        last_step: The last step.
    """
    count, kind = heads
    several = (
        f"all {count} {kind}s at once"
        if question.head is None
        else f"{kind} {numbers_in_words(question.head)}"
    )
    label = f"{question.site} of layer {numbers_in_words(question.layer)}" + (
        f", {several}" if count else ""
    )
    positions = question.positions
    spots = {
        "newest": "the newest position",
        "all": "all positions that attention reads"
        if question.site in PATCHED_CACHE
        else "all positions computed",
        "earlier": "all positions but the newest",
    }
    where = (
        f"positions {positions_in_words(positions)}"
        if isinstance(positions, tuple)
        else spots[str(positions)]
    )
    every = (
        f"at every step from {question.first} to {last_step}, and the distances are means over them"
    )
    when = every if question.step == EVERY else f"at step {question.step} alone"
    source = {
        "path": f"the {question.other} path's",
        "prompt": "those of the other prompt, which is fed the same tokens",
        "zero": "zeros",
    }[question.donor]
    return f"{label}, at {where}, {when}: replaced in the {question.into} path by {source}."


def numbers_in_words(number: int | tuple[int, ...] | None) -> str:
    """A layer or a head, or several, as text."""
    return ", ".join(map(str, number)) if isinstance(number, tuple) else str(number)


def positions_in_words(span: tuple[int, int | None]) -> str:
    """The first and the last of some positions, as text."""
    start, stop = span
    last = "the newest" if stop is None else stop - 1
    return str(start) if last == start else f"{start}–{last}"
