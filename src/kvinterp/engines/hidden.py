"""The hidden states that another engine gave beside its log-probs: whether they are what their
names say, to rounding.

They are compared with our float64. The null is that of the same run: our own states in the engine's
precision, and with every result rounded once more, to a bit fewer too. An array that is nearer to
another site or layer of ours is misaligned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvinterp.auditing.checks import Check
from kvinterp.auditing.verdict import Verdict
from kvinterp.common.numbers import listed, number
from kvinterp.engines.log_probs import changed
from kvinterp.engines.matching import listed_lines, match_sites
from kvinterp.engines.ways import PRECISIONS, Way, nulls
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.attaching import HookPoint
from kvinterp.recording import Trace, record

SITES = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
"""The sites that have the width of the residual stream, among which an array is looked for."""
ORDER = {
    site: rank
    for rank, site in enumerate(
        ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    )
}


def with_hidden_states(
    adapter: Adapter, trace: Trace, verdict: Verdict, allow: Sequence[str]
) -> Verdict:
    """Adds to a verdict on log-probs what is to be said of the hidden states beside them; as it was
    where there are none.

    Args:
        adapter: The model.
        trace: What the engine gave.
        verdict: The verdict on its log-probs.
        allow: Words that shall not fail.
    """
    given, left = _given(adapter, trace)
    if not given and not left:
        return verdict
    beside = verdict.given.get("beside", verdict.given.get("declared"))
    precision = next(
        (precision for precision in PRECISIONS if precision.name == beside), PRECISIONS[0]
    )
    word, why, layer, site = "", "", None, ""
    if given:
        word, why, layer, site = _judged(adapter, trace, given, precision)
    why += (
        f"; not judged: {listed(left)}, which no forward here has as rows of the residual stream's width"
        * bool(left)
    )
    why = why.removeprefix("; ")
    status = "failed" if word else "passed" if given else "not run"
    checks = (*verdict.checks, Check("hidden states", status, why))
    lines = [*verdict.reading.splitlines(), f"  hidden states: {why}"]
    if not word or verdict.exit_code == 1:
        return dataclasses.replace(verdict, checks=checks, reading="\n".join(lines))
    bad = word not in allow
    declared = f"declared {verdict.provenance['dtype'].replace('not given', 'no dtype')}"
    head = f"{'FAIL' if bad else 'PASS'}  {word}  another engine's hidden states against {adapter.facts.name}, {declared}"
    lines = [
        head,
        f"  {why}",
        f"  its log-probs: {verdict.verdict}: {lines[1].strip()}",
        *lines[2:-1],
    ]
    return dataclasses.replace(
        verdict, verdict=word, first_layer=layer, tensor=site, checks=checks, reading="\n".join(lines),
        allowed="no" if bad else "yes",
    )  # fmt: skip


def _given(adapter: Adapter, trace: Trace) -> tuple[dict[HookPoint, Tensor], list[str]]:
    """The arrays of the residual stream's width, ``[step, width]``, and the names of the others."""
    width = adapter.facts.width
    arrays, left = dict[HookPoint, Tensor](), list[str]()
    for hook_point, rows in trace.records.items():
        fits = bool(rows) and all(row.dim() == 1 and len(row) == width for row in rows)
        if fits:
            arrays[hook_point] = torch.stack(list(rows))
        else:
            left.append(f"{hook_point[0]} of layer {hook_point[1]}")
    return arrays, left


def _states(
    adapter: Adapter, trace: Trace, way: Way, sites: Sequence[str]
) -> dict[HookPoint, Tensor]:
    """Our own states along a way at the positions of the trace's steps, from one forward without a
    cache.
    """
    model = adapter.at(dtype_named(way.dtype))
    ids, cut = [*trace.prompt, *trace.fed], len(trace.prompt)
    tokens = torch.tensor([ids], device=model.device)
    with changed(model.model, cut, way), record(model, list(sites), positions="all") as kept:
        model.forward(tokens)
    rows = torch.tensor([cut - 1 + step for step in trace.steps])
    return {hook_point: kept[hook_point][0].cpu()[rows].double() for hook_point in kept}


def _judged(
    adapter: Adapter, trace: Trace, given: Mapping[HookPoint, Tensor], precision: Way
) -> tuple[str, str, int | None, str]:
    """Returns word ("" where they pass), sentence, and the first layer and site that is off."""
    sites = [site for site in SITES if adapter.supports(site)]
    exact = _states(adapter, trace, Way("float64"), sites)
    matches = match_sites(exact, dict(given)).table
    wrong = matches[(matches["named"] != "yes") & (matches["sure"] == "yes")]
    if len(wrong):
        where = min(
            (
                hook_point
                for hook_point in given
                if f"{hook_point[0]} {hook_point[1]}" in set(wrong["theirs"])
            ),
            key=lambda p: p[1],
        )
        return "misaligned", " ".join(listed_lines(wrong)), where[1], where[0]
    others, fewer = nulls(precision)
    plain = [way for way in (precision, *others, *fewer) if not way.path and way.fed == "whole"]
    own = [_states(adapter, trace, way, sites) for way in plain]

    def error(rows: Tensor, hook_point: HookPoint) -> float:
        return float((rows.double() - exact[hook_point]).norm() / exact[hook_point].norm())

    table = [
        (
            hook_point,
            error(rows, hook_point),
            max(error(states[hook_point], hook_point) for states in own),
        )
        for hook_point, rows in sorted(
            given.items(), key=lambda pair: (pair[0][1], ORDER.get(pair[0][0], 0))
        )
        if hook_point in exact
    ]
    off = [row for row in table if not row[1] <= row[2]]
    n = f"n = {len(trace.steps)} rows of {len(table)} arrays in {precision.name}"
    if off:
        (site, layer), mine, limit = off[0]
        said = (
            f"{len(off)} of {len(table)} arrays are further off than rounding, first {site} of layer {layer}: {number(mine)} of "
            f"its length, where the furthest of our nulls is {number(limit)} ({n})"
        )
        return "unexplained", said, layer, site
    hook_point, mine, limit = max(table, key=lambda row: row[1] / max(row[2], 1e-300))
    return "", (
        f"all {len(table)} arrays are what their names say, to rounding: the furthest, "
        f"{hook_point[0]} of layer {hook_point[1]}, is "
        f"{number(mine)} of its length off, where the furthest of our nulls is {number(limit)} ({n})"
    ), None, ""  # fmt: skip
