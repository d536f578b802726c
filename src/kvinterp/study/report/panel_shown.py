"""Makes what the panel shows, as plain data and as a picture: the choices and the answer, with all their words."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvinterp.common.numbers import counted, upper
from kvinterp.common.vocabulary import UNCHANGED
from kvinterp.patching import DIRECTIONS, DONORS, PATCH_SITES, Asked, PatchAnswer, PatchBench
from kvinterp.patching.bench import EVERY, MEASURED
from kvinterp.study.report.page import Column, Table, Text, fragment


def choices(models: Iterable[str], bench: PatchBench | None, question: Asked | None) -> dict[str, Any]:
    """All choices, each as [value, label, meaning]."""
    offered: dict[str, Any] = {
        "model": [[name, name, ""] for name in models],
        **{
            field: [[name, name, text] for name, text in texts.items()]
            for field, texts in (("donor", DONORS), ("site", PATCH_SITES))
        },
        "direction": [[name, name, f"the {name.removeprefix('into-')} path is patched"] for name in DIRECTIONS],
        "distance": [
            ["kl", "KL", "in nats"],
            ["l2", "L2", "of the logits"],
            ["logit_difference", "logit difference", "of two tokens, named beside it"],
        ],
        "layer": [[0, "0", ""]],
        "head": [[None, "all", ""]],
        "step": [[EVERY, "all", ""]],
        "positions": [["newest", "newest", ""], ["all", "all", ""]],
    }
    if bench is None or question is None:
        return offered
    count, kind = bench.adapter.facts.heads_of(question.site)
    last = len(bench.fed)
    pieces = bench.adapter.pieces([*bench.prompt, *bench.fed])
    texts = [f"fed {piece!r}" for piece in pieces[len(bench.prompt) :]]
    at = question.positions
    spans = [(at[0], at[1] or len(pieces))] if isinstance(at, tuple) else []
    other_prompt = bench.other or bench.prompt
    return offered | {
        # Every token, and whether the other prompt has a different one in its place; False for decoded tokens.
        "tokens": [
            [piece, at < len(bench.prompt) and (at >= len(other_prompt) or other_prompt[at] != bench.prompt[at])]
            for at, piece in enumerate(pieces)
        ],
        "layer": [*([layer, str(layer), ""] for layer in range(bench.adapter.facts.layers)), *_several(question.layer)],
        "head": [
            [None, "all", f"all {count} {kind}s at once" if count else "this site has no heads"],
            *([head, str(head), kind] for head in range(count)),
            *_several(question.head),
        ],
        "step": [
            [EVERY, "all", f"steps {question.first} to {last}, each patched"],
            *([step, str(step), texts[step - 1] if step else "the prefill"] for step in range(question.first, last + 1)),
        ],
        "positions": [
            ["newest", "newest", "the one that decides the next token"],
            ["all", "all", "all that the step computes; of K and V all that it reads"],
            *([plain(span), _span(span), _block(span, pieces).partition(" ")[2]] for span in spans),
        ],
    }


def answer_data(answer: PatchAnswer, bench: PatchBench, measure: str) -> dict[str, Any]:
    """The effect of a patch as plain data, the chosen distance first."""
    question = answer.asked
    lead, rest = recovery_in_words(answer)
    giving = {"path": f"{'cached' if question.into == 'recompute' else 'recompute'} path", "prompt": "other prompt"}
    titles = {
        "donor": f"donor: {giving.get(question.donor, '')}",
        **{run: f"{run} {question.into} path" for run in ("unpatched", "patched")},
    }
    lists = [
        {
            "title": titles[str(run)],
            "rows": [[repr(row.text), f"{row.probability:.4g}", f"{row.logit:.5g}"] for row in rows.itertuples()],
        }
        for run, rows in answer.tokens.groupby("run", sort=False)
    ]
    first, second = answer.pair
    distances: dict[str, tuple[str, float, float, float]] = {
        "logit_difference": (
            f"logit difference {first!r} − {second!r}",
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
        "said": question_in_words(question, bench.adapter.facts.heads_of(question.site), len(bench.fed)),
        "distances": [
            [name, f"{before:.4g}", f"{after:.4g}", "undefined" if math.isnan(share) else f"{share:.2%}"]
            for name, before, after, share in map(distances.__getitem__, order)
        ],
        "lists": lists,
        "step": f"Most likely tokens at step {answer.shown_step}{', where the KL is largest' * (len(answer.steps) > 1)}",
        "seconds": f"answered in {answer.seconds:.2f} s",
    }


def plain(value: Any) -> Any:
    """Converts a value for JSON: a tuple becomes a list."""
    return list(value) if isinstance(value, tuple) else value


def _several(numbers: Any) -> list[list[Any]]:
    """The choice of several layers or heads at once, where the user typed several."""
    return [[list(numbers), numbers_in_words(numbers), "at once"]] if isinstance(numbers, tuple) else []


def _span(span: Any) -> str:
    return str(span[0]) if span[1] == span[0] + 1 else f"{span[0]}–{span[1] - 1}"


def code_of(question: Asked, prompt: str, other_prompt: str, max_new_tokens: int, kernels: str) -> str:
    """The call that gives the same answer, for a model named ``model``."""
    options = {
        f.name: getattr(question, f.name) for f in dataclasses.fields(question) if getattr(question, f.name) != f.default
    }
    if question.donor not in ("path", "zero") and other_prompt.strip():
        options["other"] = other_prompt
    if question.donor != "resample":
        options.pop("seed", None)
    choices = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"kv.PatchBench(model, {max_new_tokens}, {kernels!r}).ask({prompt!r}{choices})"


def _block(span: Any, pieces: list[str]) -> str:
    text = "".join(pieces[slice(*span)])
    return f"{_span(span)} {text if len(text) <= 12 else text[:11] + '…'!s}"


# The picture -----------------------------------------------------------------------------------------------------------


def picture(fields: Mapping[str, Any], answer: Mapping[str, Any], error: str) -> str:
    """The panel's state for a page without a kernel; the answer may be empty, and all text is escaped."""
    parts: list[Any] = [
        Text("A picture of the panel as it last stood. To change it, run the cell in a notebook."),
        Text(fields["prompt"], "Prompt:"),
    ]
    if fields["donor"] not in ("path", "zero") and fields["other"]:
        parts.append(Text(fields["other"], "Other prompt:"))
    if error:
        parts.append(Text(error, look="alert"))
    if answer:
        head = map(Column, ("distance", "before", "after", "recovery"))
        parts += [Text(answer["rest"], answer["lead"]), Text(answer["said"]), Table([*head], answer["distances"])]
        lists = answer["lists"]
        tokens = [Column(name) for token_list in lists for name in (token_list["title"], "probability", "logit")]
        beside = zip(*(token_list["rows"] for token_list in lists), strict=True)
        parts += [Text(answer["step"]), Table(tokens, [list(itertools.chain(*rows)) for rows in beside])]
    return fragment(*parts)


# Sentences -------------------------------------------------------------------------------------------------------------


def recovery_in_words(answer: PatchAnswer) -> tuple[str, str]:
    """Says what one patch did: the share that it recovered, or the distance that an ablation made; and over which steps."""
    over = f"over {counted(len(answer.steps), 'step')}" + (f". The patch {UNCHANGED}" if answer.unchanged else "")
    if answer.asked.ablates:
        kl, l2 = _exactly(answer.d_after, "nats"), _exactly(answer.l2_after)
        lead = f"KL(unpatched || patched) {kl}, L2 distance of the logits {l2}"
        return lead, f"mean {over}. An ablation restores nothing, so there is no recovery: this is what it changes."
    shares = {"KL": answer.recovery, "L2 distance of the logits": answer.l2_recovery}
    share = ", ".join(f"{value:.2%} of the {name}" for name, value in shares.items() if value == value)
    before, after = _exactly(answer.d_before, "nats"), _exactly(answer.d_after, "nats")
    rest = f"{over}. KL to the donor: {before} before, {after} after the patch."
    if not share:
        return "Recovery undefined", f"{rest} {upper(answer.why)}"
    return f"Recovery {share}" + (f"; undefined: {answer.why.rstrip('.')}" if answer.why else ""), rest


def _exactly(value: float, unit: str = "") -> str:
    return "exactly 0" if value == 0 else f"{value:.3g} {unit}".strip()


def question_in_words(question: Asked, heads: tuple[int, str], last_step: int) -> str:
    """Says in words what a patch moves, and from where.

    Args:
        question: The patch.
        heads: The number of heads of the site, and their name.
        last_step: The last step.
    """
    count, kind = heads
    several = f"all {count} {kind}s at once" if question.head is None else f"{kind} {numbers_in_words(question.head)}"
    place = f"{question.site} of layer {numbers_in_words(question.layer)}" + (f", {several}" if count else "")
    spots = {
        "newest": "at the newest position",
        "all": "at all positions that attention reads" if question.site in _IN_CACHE else "at all positions computed",
        "earlier": "at all positions but the newest",
    }
    positions = question.patch().positions
    where = (
        spots[positions]
        if isinstance(positions, str)
        else f"at positions {positions[0]} to {'the newest' if positions[1] is None else positions[1] - 1}"
    )
    every = f"at every step from {question.first} to {last_step}, and the distances are means over them"
    when = every if question.step == "every" else f"at step {question.step} alone"
    source = {
        "path": f"the {'cached' if question.into == 'recompute' else 'recompute'} path's",
        "prompt": "those of the other prompt, which is fed the same tokens",
        "zero": "zeros",
        "mean": "the mean over the positions of the other prompt, or without one of this prompt",
        "resample": f"rows drawn from the other prompt's positions (seed {question.seed})",
    }[question.donor]
    return f"{place}, {where}, {when}: replaced in the {question.into} path by {source}."


def numbers_in_words(number: int | tuple[int, ...] | None) -> str:
    """A layer or a head, or several, as text."""
    return ", ".join(map(str, number)) if isinstance(number, tuple) else str(number)


_IN_CACHE = ("kv", "cache_k", "cache_v")
