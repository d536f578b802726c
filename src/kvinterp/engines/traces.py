"""Compares two traces, recorded one after the other, on two machines, or made of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import repeat
from torch import Tensor

from kvinterp.common import words
from kvinterp.common.checks import check_choice, check_instance
from kvinterp.comparison.comparison import Comparison
from kvinterp.comparison.recordable import COMPARED
from kvinterp.comparison.rows import comparison_of_example, token_probability
from kvinterp.comparison.tables import Differences
from kvinterp.engines.matching import misnamed
from kvinterp.engines.two_models import FORWARD, beside_float64
from kvinterp.errors import InputError
from kvinterp.models.attaching import HookPoint
from kvinterp.models.sites import CACHE_POSITIONS, CACHE_SITES, LAYOUTS
from kvinterp.paths.vocabulary import padding_of
from kvinterp.recording import Trace


def compare_traces(a: Trace, b: Trace, cache_errors: str = "aggregated") -> Comparison:
    """Compares two traces that were recorded with ``logits="keep"``, for instance on two machines.

    Residual sites and patterns are compared at the newest position, also if they were recorded with
    ``positions="all"``; cache sites only if they were recorded with ``positions="all"``.

    Traces made by :meth:`kvinterp.Trace.from_arrays` are compared by log-probs, at the tokens that
    both sides give; the column ``compared`` of the steps says how many. Where these are not the
    whole vocabulary, KL and JS, which need it, are NaN. If both traces hold the same text, their
    tokens are not compared: which token was drawn says nothing about what was computed.

    Args:
        a: The leading trace.
        b: The trace it is compared with.
        cache_errors: As for :func:`kvinterp.compare`.

    Raises:
        InputError: The traces have different prompts, no logits, or records of different heads.
    """
    check_choice("cache_errors", cache_errors, words.CacheErrors)
    for name, trace in (("a", a), ("b", b)):
        check_instance(name, trace, Trace, "a trace, which kv.run(..., logits='keep') makes")
    if a.prompt != b.prompt:
        raise InputError(
            f"the traces have different prompts ({len(a.prompt)} and {len(b.prompt)} tokens): give the same one."
        )
    evicting = {
        side: trace
        for side, trace in zip("ab", (a, b), strict=True)
        if any(site == CACHE_POSITIONS for site, _ in trace.records)
    }
    for trace in evicting.values():
        _check_rows(trace)
    if a.logits is None or b.logits is None:
        raise InputError("a trace holds no logits: run it with logits='keep'.")
    count = min(len(a.tokens), len(b.tokens))
    layers = sorted({layer for _, layer in a.records} & {layer for _, layer in b.records})
    heads = _head_labels(a.heads, b.heads, "query heads", (a, b), ("pattern",))
    kv_heads = _head_labels(a.kv_heads, b.kv_heads, "KV heads", (a, b), CACHE_SITES)
    differences = Differences(layers, heads, kv_heads, cache_errors)
    matched = a.fed[: count - 1] == b.fed[: count - 1]
    from_arrays = next((trace for trace in (a, b) if trace.ids is not None), None)
    rows = (
        (a.logits[:count], b.logits[:count])
        if from_arrays is None
        else _aligned_logprobs(a, b, count)
    )
    padding = padding_of(rows)
    sides = (from_arrays, from_arrays) if from_arrays is not None and matched else (a, b)
    tokens = (np.asarray(sides[0].tokens[:count]), np.asarray(sides[1].tokens[:count]))
    flips = np.flatnonzero(tokens[0] != tokens[1])
    for step in range(count):
        tensors = (_tensors_at(a, step), _tensors_at(b, step))
        logits = (rows[0][step : step + 1, ~padding], rows[1][step : step + 1, ~padding])
        after = int(flips.size > 0 and step > flips[0])
        differences.add(step, [0], len(a.prompt) + step, logits, tensors, torch.tensor([after]))
    about = {
        **_NOT_GIVEN,
        **b.provenance,
        **a.provenance,
        **_sides(a, b),
        "first": _first_different(a, b) if matched else {},
        "protocol": "matched" if matched else "free",
        "strategy": a.provenance.get("strategy", "unknown"),
        "provenance_b": b.provenance,
        "derived": sorted({*a.derived, *b.derived} & {"pattern"}),
        "lets_go": list(evicting),
        "matches": []
        if from_arrays is None
        else misnamed(*((a, b) if from_arrays is b else (b, a))),
    }
    if matched and from_arrays is None and _unlike(a, b):
        about["two_models"] = beside_float64(a, b, count)
    frames, ids = differences.frames([0]), [*map(torch.from_numpy, tokens)]
    if from_arrays is None:
        by_side = [
            token_probability(logits, side.to(logits.device)).cpu()
            for logits, side in zip(rows, ids, strict=True)
        ]
    else:
        frames["steps"] = _with_common_tokens(frames["steps"], *rows)
        by_side = [
            logprobs[torch.arange(count), side].exp()
            for logprobs, side in zip(rows, ids, strict=True)
        ]
    probabilities = {
        f"probability_{side}": values.numpy() for side, values in zip("ab", by_side, strict=True)
    }
    return comparison_of_example(0, "0", a.prompt, frames, tokens, ("", ""), about, probabilities)


def _sides(a: Trace, b: Trace) -> dict[str, Any]:
    """The provenance's names of the two paths, each with its model if the models differ."""
    paths, models = (
        {"a": a.path, "b": b.path},
        [str(trace.provenance.get("model", "")) for trace in (a, b)],
    )
    if "" in models or not _unlike(a, b):
        return {"paths": paths}
    kinds = [str(trace.provenance.get("kind", "")) for trace in (a, b)]
    if models[0] != models[1]:
        of_models = {
            side: f"{path} of {model}"
            for (side, path), model in zip(paths.items(), models, strict=True)
        }
        return {
            "paths": of_models,
            "model": " and ".join(models),
            "kind": " and ".join(dict.fromkeys(kinds)),
        }
    of_kinds = {
        side: f"{path} ({kind})" for (side, path), kind in zip(paths.items(), kinds, strict=True)
    }
    return {"paths": of_kinds, "kind": " and ".join(kinds)}


def _unlike(a: Trace, b: Trace) -> bool:
    """Whether two traces are of two models, or of one that two libraries run."""
    return any(a.provenance.get(name) != b.provenance.get(name) for name in ("model", "kind"))


def _first_different(a: Trace, b: Trace) -> dict[str, Any]:
    """The first tensor, in the order of the computation, that both recorded with different bits:
    site, layer and error.
    """
    both = [
        hook_point
        for hook_point in a.records
        if hook_point in b.records and hook_point[0] in FORWARD
    ]
    for site, layer in sorted(
        both, key=lambda hook_point: (hook_point[1], FORWARD.index(hook_point[0]))
    ):
        if _equal(a, b, (site, layer)):
            continue
        pairs = zip(a.records[site, layer], b.records[site, layer], strict=False)
        errors = [
            float((y.double() - x.double()).norm() / x.double().norm())
            for x, y in pairs
            if x.shape == y.shape
        ]
        last = max(map(FORWARD.index, (site, "v")))
        same = [
            name
            for name in FORWARD[: last + 1]
            if (name, layer) in both and _equal(a, b, (name, layer))
        ]
        return {
            "site": site,
            "layer": layer,
            "error": max(errors, default=float("nan")),
            "same": same,
        }
    return {}


def _equal(a: Trace, b: Trace, hook_point: HookPoint) -> bool:
    return all(
        torch.equal(*pair)
        for pair in zip(a.records[hook_point], b.records[hook_point], strict=False)
    )


_NOT_GIVEN = {
    name: f"{name} not given"
    for name in ("model", "kind", "dtype", "attention", "weights", "device", "threads")
}


def _aligned_logprobs(a: Trace, b: Trace, count: int) -> tuple[Tensor, Tensor]:
    """``[step, token]`` of both traces, log-probs in float64, NaN where none is given."""
    widths = [int(t.ids.max()) + 1 if t.ids is not None else t.logits.shape[1] for t in (a, b)]  # type: ignore
    whole = [t.ids is None or t.ids.dim() == 1 for t in (a, b)]
    width = max(widths)
    if any(full and size < width for full, size in zip(whole, widths, strict=True)):
        raise InputError(
            f"the traces are of {widths[0]:,} and {widths[1]:,} tokens: give two of one vocabulary."
        )

    def rows(trace: Trace) -> Tensor:
        logits = trace.logits[:count].cpu().double()  # type: ignore[index]
        if trace.ids is None:
            return logits.log_softmax(-1)
        ids = trace.ids.expand(len(trace.tokens), -1)[:count]
        return logits.new_full((count, width), torch.nan).scatter(1, ids, logits)

    return rows(a), rows(b)


def _with_common_tokens(steps: pd.DataFrame, a: Tensor, b: Tensor) -> pd.DataFrame:
    """Adds to the table of steps how many tokens both sides give and, where not all, the metrics
    over those tokens.
    """
    steps, gap = steps.sort_values("step", ignore_index=True), b - a
    filled = [side.masked_fill(side.isnan(), -torch.inf) for side in (a, b)]
    best = [side.topk(min(2, side.shape[1])) for side in filled]
    top, most = best[0].indices[:, :1], gap.abs().nan_to_num(-1.0).amax(-1)
    margins = [side.values[:, 0] - side.values[:, -1] for side in best]
    columns = {
        "max_abs_logit": most.masked_fill(most < 0, torch.nan),
        "rms_logit": gap.square().nanmean(-1).sqrt(),
        "top1_agree": filled[0].argmax(-1) == filled[1].argmax(-1),
        "margin_a": margins[0].masked_fill(margins[0].isinf(), torch.nan),
        "margin_b": margins[1].masked_fill(margins[1].isinf(), torch.nan),
        "top_probability_difference": (b.gather(1, top).exp() - a.gather(1, top).exp())[:, 0],
    }
    compared = (~gap.isnan()).sum(-1)
    part = (compared < gap.shape[1]).numpy()
    for name, values in columns.items():
        steps.loc[part, name] = values.numpy()[part]
    return steps.assign(compared=compared.numpy())


def _check_rows(trace: Trace) -> None:
    """Refuses the trace of an evicting path if it lacks the rows' positions, or the heads that they
    belong to.
    """
    newest = any(
        record[0].dim() == 1
        for (site, _), record in trace.records.items()
        if site == CACHE_POSITIONS and record
    )
    if newest or (
        (trace.heads or trace.kv_heads) and any(site == "pattern" for site, _ in trace.records)
    ):
        remedy = "with positions='all'" if newest else "with every head"
        raise InputError(
            f"path {trace.path} lets go of rows, so the caches and patterns of its trace cannot be lined up by position: "
            f"record it {remedy}, or compare the paths with compare()."
        )


def _tensors_at(trace: Trace, step: int) -> dict[HookPoint, Tensor]:
    if step not in trace.steps:
        return {}
    index = trace.steps.index(step)
    tensors = {}
    for (site, layer), record in trace.records.items():
        if site == CACHE_POSITIONS:
            tensors[site, layer] = record[index][None]
        if site not in COMPARED:
            continue
        # A cache is compared whole, everything else at the newest position.
        layout, tensor, whole = LAYOUTS[site], record[index][None], site in CACHE_SITES
        if not whole and tensor.dim() == layout.dimensions:
            tensor = tensor.select(layout.row_axis, -1)
        if tensor.dim() == layout.dimensions - (not whole):
            tensors[site, layer] = tensor
        if site == "pattern" and (CACHE_POSITIONS, layer) in trace.records:
            rows = trace.records[CACHE_POSITIONS, layer][index][None]
            keys = tensor.new_zeros(*tensor.shape[:2], len(trace.prompt) + step)
            rows = repeat(
                rows,
                "batch kv_head key -> batch (kv_head group) key",
                group=tensor.shape[1] // rows.shape[1],
            )
            tensors[site, layer] = keys.scatter(2, rows, tensor)
    return tensors


def _head_labels(
    a: Sequence[int] | None,
    b: Sequence[int] | None,
    what: str,
    traces: Sequence[Trace],
    sites: Sequence[str],
) -> Sequence[int]:
    """The heads that both traces recorded at some sites; they must be the same."""
    counts = [
        next((r[0].shape[0] for (site, _), r in t.records.items() if site in sites and r), None)
        for t in traces
    ]
    if None in counts:
        return ()
    first, second = (
        range(count or 0) if heads is None else heads
        for heads, count in zip((a, b), counts, strict=True)
    )
    if list(first) != list(second):
        names = [
            f"0 to {h[-1]}" if isinstance(h, range) and h else ", ".join(map(str, h))
            for h in (first, second)
        ]
        raise InputError(
            f"the traces hold different {what} ({' and '.join(names)}): record the same ones."
        )
    return first
