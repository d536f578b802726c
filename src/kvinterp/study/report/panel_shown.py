"""What the panel shows, as plain data and as a picture: the choices and the answer, every word of them made here."""

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


def choices(models: Iterable[str], bench: PatchBench | None, asked: Asked | None) -> dict[str, Any]:
    """Every choice there is, each as [value, what it is called, what it means]."""
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
    if bench is None or asked is None:
        return offered
    count, kind = bench.adapter.facts.heads_of(asked.site)
    last = len(bench.fed)
    pieces = bench.adapter.pieces([*bench.prompt, *bench.fed])
    texts = [f"fed {piece!r}" for piece in pieces[len(bench.prompt) :]]
    at = asked.positions
    spans = [(at[0], at[1] or len(pieces))] if isinstance(at, tuple) else []
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
        "distances": [
            [name, f"{before:.4g}", f"{after:.4g}", "undefined" if math.isnan(share) else f"{share:.2%}"]
            for name, before, after, share in map(distances.__getitem__, order)
        ],
        "lists": lists,
        "step": f"Most likely tokens at step {answer.shown_step}{', where the KL is largest' * (len(answer.steps) > 1)}",
        "seconds": f"answered in {answer.seconds:.2f} s",
    }


def plain(value: Any) -> Any:
    """The value as JSON has it: a tuple becomes a list."""
    return list(value) if isinstance(value, tuple) else value


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


# The picture -----------------------------------------------------------------------------------------------------------


def picture(asked: Mapping[str, Any], answer: Mapping[str, Any], error: str) -> str:
    """The panel as it stands, for a page that has no kernel: its answer may be empty, all is escaped."""
    parts: list[Any] = [
        Text("A picture of the panel as it last stood. To change it, run the cell in a notebook."),
        Text(asked["prompt"], "Prompt:"),
    ]
    if asked["donor"] not in ("path", "zero") and asked["other"]:
        parts.append(Text(asked["other"], "Other prompt:"))
    if error:
        parts.append(Text(error, look="alert"))
    if answer:
        head = map(Column, ("distance", "before", "after", "recovery"))
        parts += [Text(answer["rest"], answer["lead"]), Text(answer["said"]), Table([*head], answer["distances"])]
        lists = answer["lists"]
        tokens = [Column(name) for found in lists for name in (found["title"], "probability", "logit")]
        beside = zip(*(found["rows"] for found in lists), strict=True)
        parts += [Text(answer["step"]), Table(tokens, [list(itertools.chain(*rows)) for rows in beside])]
    return fragment(*parts)


# Sentences -------------------------------------------------------------------------------------------------------------


def recovery_said(answer: PatchAnswer) -> tuple[str, str]:
    """What one patch by hand did: the share that it recovered, or the distance that an ablation made, and what it is of."""
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


def asked_said(asked: Asked, heads: tuple[int, str], last_step: int) -> str:
    """What a patch by hand moves, and from where, in words; "all" is said with how many ``heads`` the site has of which kind."""
    count, kind = heads
    head = (
        "" if not count else f", all {count} {kind}s at once" if asked.head is None else f", {kind} {said_of(asked.head)}"
    )
    spots = {
        "newest": "at the newest position",
        "all": "at all positions that attention reads" if asked.site in _IN_CACHE else "at all positions computed",
        "earlier": "at all positions but the newest",
    }
    positions = asked.patch().positions
    where = (
        spots[positions]
        if isinstance(positions, str)
        else f"at positions {positions[0]} to {'the newest' if positions[1] is None else positions[1] - 1}"
    )
    every = f"at every step from {asked.first} to {last_step}, and the distances are means over them"
    when = every if asked.step == "every" else f"at step {asked.step} alone"
    giving = {
        "path": f"the {'cached' if asked.into == 'recompute' else 'recompute'} path's",
        "prompt": "those of the other prompt, which is fed the same tokens",
        "zero": "zeros",
        "mean": "the mean over the positions of the other prompt, or without one of this prompt",
        "resample": f"rows drawn from the other prompt's positions (seed {asked.seed})",
    }[asked.donor]
    return f"{asked.site} of layer {said_of(asked.layer)}{head}, {where}, {when}: replaced in the {asked.into} path by {giving}."


def said_of(number: int | tuple[int, ...] | None) -> str:
    """A layer or a head, or several."""
    return ", ".join(map(str, number)) if isinstance(number, tuple) else str(number)


_IN_CACHE = ("kv", "cache_k", "cache_v")
