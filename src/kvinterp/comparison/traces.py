"""Compares two traces that were recorded one after the other, or on two machines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvinterp.comparison.cache_errors import CACHE_ERRORS
from kvinterp.comparison.choices import chance
from kvinterp.comparison.comparison import Comparison
from kvinterp.comparison.recordable import COMPARED
from kvinterp.comparison.rows import of_example
from kvinterp.comparison.tables import Differences
from kvinterp.errors import InputError
from kvinterp.models.attaching import Site
from kvinterp.models.inputs import check_choice, check_instance
from kvinterp.models.sites import CACHE_SITES, LAYOUTS, ROWS
from kvinterp.paths.vocabulary import padding_of
from kvinterp.recording import Trace


def compare_traces(a: Trace, b: Trace, cache_errors: str = "aggregated") -> Comparison:
    """Compares two traces that were recorded with ``logits="keep"``, for instance on two machines.

    Residual sites and patterns are compared at the newest position, of those recorded with ``positions="all"`` too; cache
    sites where they were recorded with ``positions="all"``.

    Args:
        a: The leading trace.
        b: The other.
        cache_errors: As for :func:`kvinterp.compare`.

    Raises:
        InputError: They are not of the same prompt, hold no logits, or were recorded with different heads.
    """
    check_choice("cache_errors", cache_errors, tuple(CACHE_ERRORS))
    for name, trace in (("a", a), ("b", b)):
        check_instance(name, trace, Trace, "a trace, which kv.run(..., logits='keep') makes")
    if a.prompt != b.prompt:
        raise InputError(
            f"the traces have different prompts ({len(a.prompt)} and {len(b.prompt)} tokens): give the same one."
        )
    thinned = {
        side: trace for side, trace in zip("ab", (a, b), strict=True) if any(site == ROWS for site, _ in trace.records)
    }
    for trace in thinned.values():
        _check_rows(trace)
    if a.logits is None or b.logits is None:
        raise InputError("a trace holds no logits: run it with logits='keep'.")
    count = min(len(a.tokens), len(b.tokens))
    layers = sorted({layer for _, layer in a.records} & {layer for _, layer in b.records})
    heads = _head_labels(a.heads, b.heads, "query heads", (a, b), ("pattern",))
    kv_heads = _head_labels(a.kv_heads, b.kv_heads, "KV heads", (a, b), CACHE_SITES)
    differences = Differences(layers, heads, kv_heads, cache_errors)
    padding = padding_of((a.logits[:count], b.logits[:count]))
    flips = np.flatnonzero(np.asarray(a.tokens[:count]) != np.asarray(b.tokens[:count]))
    for step in range(count):
        seen = (_shown(a, step), _shown(b, step))
        logits = (a.logits[step : step + 1, ~padding], b.logits[step : step + 1, ~padding])
        after = int(flips.size > 0 and step > flips[0])
        differences.add(step, [0], len(a.prompt) + step, logits, seen, torch.tensor([after]))
    matched = a.fed[: count - 1] == b.fed[: count - 1]
    about = {
        **a.provenance,
        "paths": {"a": a.path, "b": b.path},
        "protocol": "matched" if matched else "free",
        "strategy": a.provenance.get("strategy", "unknown"),
        "provenance_b": b.provenance,
        "derived": sorted({*a.derived, *b.derived} & {"pattern"}),
        "lets_go": list(thinned),
    }
    chosen = (np.asarray(a.tokens[:count]), np.asarray(b.tokens[:count]))
    decided = {
        f"probability_{side}": chance(logits[:count], torch.from_numpy(tokens).to(logits.device)).cpu().numpy()
        for side, logits, tokens in zip("ab", (a.logits, b.logits), chosen, strict=True)
    }
    return of_example(0, "0", a.prompt, differences.frames([0]), chosen, ("", ""), about, decided)


def _check_rows(trace: Trace) -> None:
    """Refuses a trace of a path that lets go of rows where it does not say of which, or of too few heads to tell whose."""
    newest = any(kept[0].dim() == 1 for (site, _), kept in trace.records.items() if site == ROWS and kept)
    if newest or ((trace.heads or trace.kv_heads) and any(site == "pattern" for site, _ in trace.records)):
        how = "with positions='all'" if newest else "with every head"
        raise InputError(
            f"path {trace.path} lets go of rows, so the caches and patterns of its trace cannot be lined up by position: "
            f"record it {how}, or compare the paths with compare()."
        )


def _shown(trace: Trace, step: int) -> dict[Site, Tensor]:
    if step not in trace.steps:
        return {}
    index = trace.steps.index(step)
    seen = {}
    for (site, layer), kept in trace.records.items():
        if site == ROWS:
            seen[site, layer] = kept[index][None]
        if site not in COMPARED:
            continue
        # A cache is compared whole, everything else at the newest position.
        layout, tensor, whole = LAYOUTS[site], kept[index][None], site in CACHE_SITES
        if not whole and tensor.dim() == layout.dimensions:
            tensor = tensor.select(layout.rows, -1)
        if tensor.dim() == layout.dimensions - (not whole):
            seen[site, layer] = tensor
        if site == "pattern" and (ROWS, layer) in trace.records:
            rows = trace.records[ROWS, layer][index][None]
            keys = tensor.new_zeros(*tensor.shape[:2], len(trace.prompt) + step)
            seen[site, layer] = keys.scatter(2, rows.repeat_interleave(tensor.shape[1] // rows.shape[1], 1), tensor)
    return seen


def _head_labels(
    one: Sequence[int] | None, other: Sequence[int] | None, what: str, traces: Sequence[Trace], sites: Sequence[str]
) -> Sequence[int]:
    """The heads that the traces' records of some sites hold, which must be the same ones."""
    counts = [next((kept[0].shape[0] for (s, _), kept in t.records.items() if s in sites and kept), None) for t in traces]
    if None in counts:
        return ()
    first, second = (range(count or 0) if held is None else held for held, count in zip((one, other), counts, strict=True))
    if list(first) != list(second):
        raise InputError(
            f"the traces hold different {what} ({_shown_heads(first)} and {_shown_heads(second)}): record the same ones."
        )
    return first


def _shown_heads(heads: Sequence[int]) -> str:
    return f"0 to {heads[-1]}" if isinstance(heads, range) and heads else ", ".join(map(str, heads))
