"""Sweeps: the same patch at every layer, head or block of positions, with controls for the
answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from kvinterp.common import words
from kvinterp.common.checks import (
    among,
    check_choice,
    check_known,
    check_text,
    check_unread,
    check_whole,
)
from kvinterp.common.progress import each
from kvinterp.errors import InputError, located, out_of_memory
from kvinterp.models import Adapter, wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE, pair_for
from kvinterp.models.hook_names import layers_with, one_site
from kvinterp.models.inputs import chosen_layers, encode_all
from kvinterp.models.provenance import provenance
from kvinterp.models.threads import own_threads
from kvinterp.patching.distances import DISTANCES, check_finite, distances_of, name_of
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import (
    PATCHED_CACHE,
    Patch,
    Positions,
    Where,
    check_patch_site,
    heads_at,
    positions_of,
)
from kvinterp.patching.side_by_side import (
    PlannedPatch,
    Setting,
    advance_beside,
    other_prompt,
    two_paths,
)
from kvinterp.patching.table import Sweep, Tables
from kvinterp.paths import ExecutionPath

log = logging.getLogger("kvinterp")

SWEEPS = {
    "single": "one layer at a time",
    "cumulative": "layers 0 to l together",
    "cumulative-from": "layers l to the last together",
    "heads": "one head of one layer at a time (query heads, or KV heads for k, v and the cache)",
    "kv-heads": "one KV head of one layer's cache at a time",
    "blocks": "one block of positions at a time, in all layers",
}
DIRECTIONS = {
    "into-recompute": "the cached path's tensors are put into the recompute path",
    "into-cached": "the recompute path's tensors are put into the cached path, where they persist through K and V",
}
STREAM = ("resid_pre", "resid_mid", "resid_post")
"""Sites that are the whole residual stream: a patch there undoes everything before it in the same
rows.
"""
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2604.15409, section 5.2: hidden states of the cached path are put into the recompute
    # path at the first decode step, one layer at a time and cumulatively, on the examples with the
    # highest KL, 32 free-running steps. How many examples is not said in the text we have; ten is
    # our choice.
    "paper": {
        "site": "resid_post",
        "over": "single,cumulative",
        "direction": "into-recompute",
        "steps": "first",
        "protocol": "free",
        "max_new_tokens": 32,
        "examples": 10,
        "distance": "kl,l2",
    },
    "matched": {
        "site": "resid_post",
        "over": "single,cumulative",
        "direction": "into-recompute",
        "steps": "every",
        "protocol": "matched",
        "max_new_tokens": 32,
    },
}


def sweep(
    model: Any,
    prompts: Any,
    site: words.PatchSite | str = "resid_post",
    over: words.Over | str = "single",
    *,
    direction: words.Direction | str = "into-recompute",
    steps: str | tuple[int, ...] = "every",
    protocol: words.Protocol | str = "matched",
    positions: Where | None = None,
    layers: Iterable[int] | int | None = None,
    max_new_tokens: int = 32,
    distance: words.Distance | str | Callable[..., Any] = "l2,kl",
    answers: Sequence[str | int] | None = None,
    examples: int | None = None,
    only: Sequence[int] | None = None,
    block: int = 16,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    controls: words.Controls | str = "quick",
    logits: words.Kept | str = "discard",
    stop: words.Stop | str = "end of sequence",
    batch_size: int = 1,
    progress: words.Progress | str = "bar",
) -> Sweep:
    """Patches one place at a time and measures how much of the difference between the paths each
    patch recovers.

    A cumulative sweep of the residual stream into the recompute path gives no more than its last
    layer. The patch at layer l replaces its rows whole, no other row reads what they were before,
    and nothing is carried to the next step. So the patch of layers 0 to l gives the bits of the
    patch of layer l alone, and only that one runs; a test compares the two. In the same way every
    patch of layers l to the last equals the patch of the last layer.

    Every row of the forward reads K and V patched into the recompute path, not the newest row
    alone. So a layer's patch also changes what later layers compute for earlier positions. To put
    back a layer's K and V and nothing else, sweep into the cached path, or into the recompute path
    from that layer to the last (``"cumulative-from"``).

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        site: What to patch: kv, cache_k, cache_v, resid_post, attn_out, ... (kvinterp list sites).
        over: Which patches to make: single (one layer each), cumulative, cumulative-from, heads,
            kv-heads or blocks (of positions).

            Several with commas between, such as ``"single,cumulative"``, share their runs; see
            SWEEPS.
        direction: Which path receives the patch: into-recompute or into-cached.
        steps: Which decode steps to patch: every, first, or step numbers with commas.

            The first is step 1; numbers are a tuple.
        protocol: matched: both paths get the same tokens. free: each gets its own.

            Matched, all runs are fed the cached path's tokens, and D is measured over the patched
            steps; free, over all steps.
        positions: ``"newest"`` (default; ``"all"`` for the cache), ``"all"``, ``"earlier"`` or
            ``(start, stop)``.
        layers: Patch only in these layers, such as 0,2,-1. Default: all.
        max_new_tokens: The most tokens to decode per prompt.
        distance: How far apart the paths are, by l2, kl, margin or logit_difference; several with
            commas, the first one leads.

            ``"kl"`` is in nats, donor against patched; ``"l2"`` is of the logits;
            ``"logit_difference"`` is of two answers (TransformerLens's ``logits_to_logit_diff``,
            how far it is from the donor's). Figures and summaries use the first. KL alone misleads
            where a difference has the size of rounding, because the step whose next token is least
            certain makes up most of it; so L2 is always measured. Or a function of the logits
            ``[batch, position, vocab]`` of one row and step, like TransformerLens's metrics: its
            distance is the difference from its value on the donor's logits.
        answers: For logit_difference, given twice: the right answer, then the wrong one, one token
            each.

            In Python a list of the two, as texts or ids.
        examples: Patch only this many prompts: those with the highest KL.

            That is the KL between the paths; see :func:`highest_kl`.
        only: The numbers of the prompts to sweep, in a resumed or sharded run.
        block: Positions in a block, for ``over="blocks"``.
        cached: Path A, which decodes from a cache, such as cached+int8; it chooses the tokens.
        recompute: Path B, which computes the whole prefix again.
        controls: Which controls to run: quick, all (planted causes too, which need the model in
            float64) or none.

            ``"quick"``: the path itself, another prompt, the floor, all positions, all layers
            together; ``"all"`` also localises each planted cause, once a model.
        logits: ``"keep"`` keeps the full-vocabulary logits of every run and step; ``"discard"``
            does not.
        stop: ``"end of sequence"`` (of the unpatched cached path, or at the length) or
            ``"length"``.
        batch_size: The most patches in one forward pass. Batching is used only where it gives the
            same bits.

            A forward holds patches of one layer into the recompute path, of any layers into the
            cached path (matched protocol only). A check shows that each keeps the bits it has alone
            (docs/laws.md, law 9).
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: An argument names something that does not exist, or does not fit the others.
        NonFiniteError: NaN or Inf appeared in the logits of an example.
        UnsupportedError: This kind of model cannot give the site.

    Example:
        >>> paper = kv.sweep(model, prompts, **kv.patching.PRESETS["paper"])  # doctest: +SKIP
        >>> paper.aggregate()[["sweep", "layer", "mean"]]  # doctest: +SKIP
    """
    adapter, batch_size = wrap(model), check_whole("batch_size", batch_size)
    site, layers = one_site(adapter, site, layers)
    names = [] if callable(distance) else str(distance).split(",")
    for name, value, choices in (
        ("direction", direction, DIRECTIONS),
        ("protocol", protocol, words.Protocol),
        *(("distance", name.strip(), (*DISTANCES, LOGIT_DIFFERENCE)) for name in names),
        ("controls", controls, words.Controls),
        ("logits", logits, words.Kept),
        ("stop", stop, words.Stop),
        ("progress", progress, words.Progress),
    ):
        check_choice(name, value, choices)
    tokens = encode_all(adapter, prompts, max_new_tokens)
    paths = two_paths(cached, recompute, "a sweep")
    spot = positions_of(
        ("all" if site in PATCHED_CACHE else "newest") if positions is None else positions
    )
    shortest, longest = (function(map(len, tokens)) + max_new_tokens - 1 for function in (min, max))
    planned = _planned_patches(adapter, site, over, direction, spot, steps, layers, block, longest)
    if batch_size > 1 and direction == "into-cached" and protocol == "free":
        log.info(
            "batch_size=%d is not used: fed each its own tokens, patched cached paths go one by one",
            batch_size,
        )
    pair = pair_for(adapter, name_of(distance) if callable(distance) else distance, answers)
    if "blocks" not in over:
        check_unread(
            "block", block, 16, f"over={over!r} has no blocks; leave it out, or sweep over='blocks'"
        )
    measures = distances_of(distance, pair)
    setting = Setting(
        adapter, *paths, direction, protocol, measures, max_new_tokens, logits, stop, batch_size
    )
    _check_reach(setting, planned[0], shortest)
    swept = list(range(len(tokens)))
    if examples is not None:
        swept = _examples_of_highest_kl(setting, tokens, examples, progress)
    if only is not None:
        swept = among("only", only, swept)
    tables = Tables(setting, str(steps))
    if controls != "none":
        planned += _control_patches(adapter, planned, spot, steps)
    with located(f"model {adapter.facts.name}, {direction}"), own_threads(adapter):
        for example in each(swept, "patching", "prompt", progress):
            other = other_prompt(tokens, example, adapter.facts.vocabulary)
            try:
                advanced = advance_beside(setting, planned, tokens[example], other)
            except (RuntimeError, MemoryError) as error:
                if setting.batch_size == 1 or not out_of_memory(error):
                    raise
                log.warning(
                    "out of memory with %d patches in a batch: they go one by one",
                    setting.batch_size,
                )
                setting = dataclasses.replace(setting, batch_size=1)
                advanced = advance_beside(setting, planned, tokens[example], other)
            check_finite(advanced.distances, f"example {example}")
            tables.add(example, len(tokens[example]), planned, advanced)
        if controls == "all" and adapter.attention_only:
            # Few sweeps ask for these, and so few load what splits a difference.
            from kvinterp.patching.localising import planted_controls

            tables.controls += planted_controls(adapter, tokens[swept[0]], swept[0])
        about = provenance(adapter, max_new_tokens=max_new_tokens)
    settings = {
        "site": site, "sweep": over, "direction": direction, "protocol": protocol, "steps": str(steps),
        "distance": next(iter(measures)), "distances": list(measures),
        **({} if pair is None else {"answers": adapter.pieces(pair)}),
        "paths": {"cached": str(paths[0]), "recompute": str(paths[1])}, "positions": str(spot),
        "work": dict(tables.work),
        **about,
    }  # fmt: skip
    recovery, by_step, checks = (
        pd.DataFrame(rows) for rows in (tables.recovery, tables.steps, tables.controls)
    )
    return Sweep(recovery, by_step, checks, settings, tables.logits)


def highest_kl(
    model: Any,
    prompts: Any,
    count: int,
    *,
    protocol: str = "free",
    max_new_tokens: int = 32,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    progress: str = "bar",
) -> list[int]:
    """Finds the prompts whose paths differ most, by KL(cached || recompute) averaged over the steps
    after the prefill.

    Args:
        model: A model of any kind, or an adapter.
        prompts: A list of prompts.
        count: How many prompts to return; all if there are fewer.
        protocol: ``"free"`` (as in arXiv 2604.15409) or ``"matched"``.
        max_new_tokens: Most steps.
        cached: The cached path.
        recompute: The recompute path.
        progress: ``"bar"`` or ``"none"``.

    Returns:
        Their numbers in the list, the highest KL first; of two equal ones the earlier first.

    Raises:
        InputError: An argument does not fit the model or the others.
    """
    adapter = wrap(model)
    check_choice("protocol", protocol, words.Protocol)
    check_choice("progress", progress, words.Progress)
    tokens = encode_all(adapter, prompts, max_new_tokens)
    paths = two_paths(cached, recompute, "a sweep")
    setting = Setting(
        adapter, *paths, "into-recompute", protocol, distances_of("kl"), max_new_tokens
    )
    return _examples_of_highest_kl(setting, tokens, count, progress)


def _examples_of_highest_kl(
    setting: Setting, tokens: Sequence[Sequence[int]], count: int, progress: str
) -> list[int]:
    count = check_whole("examples", count, hint=", or None for all")
    if count >= len(tokens):
        return list(range(len(tokens)))
    unpatched = dataclasses.replace(
        setting, direction="into-recompute", distances=distances_of("kl"), logits="discard"
    )
    means: list[float] = []
    with located(f"model {setting.adapter.facts.name}"), own_threads(setting.adapter):
        for prompt in each(tokens, "choosing", "prompt", progress):
            after_prefill = advance_beside(unpatched, [], prompt, prompt).distances[0, 1:, 0]
            check_finite(after_prefill, f"example {len(means)}")
            means.append(float(after_prefill.mean()) if len(after_prefill) else 0.0)
    return sorted(range(len(tokens)), key=lambda example: -means[example])[:count]


def _check_reach(setting: Setting, plan: PlannedPatch, shortest: int) -> None:
    """Raises InputError if the sweep would patch nothing in some prompt."""
    patch, cached, max_new_tokens = plan.patch, setting.cached, setting.max_new_tokens
    prompt_length = shortest - max_new_tokens + 1
    if not any(patch.active(step) for step in range(max_new_tokens)):
        raise InputError(
            f"steps={patch.steps!r} patches nothing within max_new_tokens={max_new_tokens}, where the last step is "
            f"{max_new_tokens - 1}: decode more tokens or name an earlier step."
        )
    if patch.active(0) and cached.chunk is not None:
        raise InputError(
            f"step 0 was named, which path {cached} computes in pieces: use a path without chunk."
        )
    if patch.starts_at >= shortest:
        raise InputError(
            f"position {patch.starts_at} does not exist: the shortest prompt has {prompt_length} tokens "
            f"and with max_new_tokens={max_new_tokens} never holds more than {shortest} positions."
        )
    if plan.labels["sweep"] != "blocks" and not setting.reaches(patch, prompt_length):
        raise InputError(
            f"positions={patch.positions!r} of {patch.site!r} patches nothing: a decode step of the cached path computes the "
            "newest position only; sweep into the recompute path, kv, or the newest position."
        )


def _planned_patches(
    adapter: Adapter,
    site: str,
    over: str,
    direction: str,
    positions: Positions,
    steps: str | tuple[int, ...],
    layers: Iterable[int] | int | None,
    block: int,
    length: int,
) -> list[PlannedPatch]:
    check_patch_site(site)
    facts, swept = adapter.facts, layers_with(adapter, site, chosen_layers(adapter, layers))
    shadowed = direction == "into-recompute" and site in STREAM and positions in ("newest", "all")

    def add(
        where: Sequence[int], layer: int, head: int | None = None, spot: Positions = positions
    ) -> None:
        # Only the last of several patches of the stream has an effect; see the docstring of
        # sweep().
        effective = layers_with(adapter, site, where)[-1 if shadowed and spot == positions else 0 :]
        patch = Patch(site, tuple(effective), None if head is None else (head,), spot, steps)
        planned.append(PlannedPatch({"sweep": name, **_labels(patch, layer)}, patch))

    planned: list[PlannedPatch] = []
    layers_of = {
        "single": lambda layer: [layer],
        "cumulative": lambda layer: range(layer + 1),
        "cumulative-from": lambda layer: range(layer, facts.layers),
    }
    for name in map(
        str.strip, check_text("over", over, "'single' or 'single,cumulative'").split(",")
    ):
        check_known("sweep", name, SWEEPS)
        if name in layers_of:
            for layer in swept:
                add(layers_of[name](layer), layer)
        elif name == "blocks":
            check_whole("block", block)
            for start in range(0, length, block):
                add(swept, -1, spot=(start, min(start + block, length)))
        else:
            if name == "kv-heads" and facts.heads_of(site)[1] != "KV head":
                raise InputError(
                    f"sweep 'kv-heads' needs a site with KV heads, and {site!r} was given: use kv, cache_k, cache_v, k or v."
                )
            for layer, head in itertools.product(
                swept, range(heads_at(adapter, site, f"sweep {name!r}"))
            ):
                add([layer], layer, head)
    # Raises InputError if a patch does not fit the model.
    PatchHook(adapter, [plan.patch for plan in planned])
    return planned


def _control_patches(
    adapter: Adapter,
    planned: Sequence[PlannedPatch],
    positions: Positions,
    steps: str | tuple[int, ...],
) -> list[PlannedPatch]:
    middle, swept = adapter.facts.layers // 2, [plan.patch for plan in planned]
    spots = {
        "self": (middle, "newest"),
        "other-prompt": (middle, "newest"),
        "floor": (adapter.facts.layers - 1, "newest"),
        "all-positions": (middle, "all"),
    }
    controls = [
        PlannedPatch(_labels(patch, layer), patch, name)
        for name, (layer, spot) in spots.items()
        for patch in [Patch("resid_post", (layer,), None, spot, steps)]
    ]
    layers = sorted({at for patch in swept for at in patch.layers or ()})
    together = Patch(swept[0].site, tuple(layers), None, positions, steps)
    return [*controls, PlannedPatch(_labels(together, -1), together, "together")]


def _labels(patch: Patch, layer: int) -> dict[str, Any]:
    """The columns that say what a patch moves; -1 in those that do not vary."""
    spot = patch.positions
    positions = spot if isinstance(spot, str) else f"{spot[0]}:{'' if spot[1] is None else spot[1]}"
    return {
        "site": patch.site,
        "layer": layer,
        "head": patch.heads[0] if patch.heads else -1,
        "positions": positions,
    }
