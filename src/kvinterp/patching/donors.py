"""Donors of patches: a trace's rows by step and absolute position, and ablations made of other prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.common.checks import check_instance, check_seed, check_whole
from kvinterp.errors import InputError, NonFiniteError, UnsupportedError, unexpected
from kvinterp.models import Adapter, wrap
from kvinterp.models.attaching import Site
from kvinterp.models.hook_names import hook_name, site_of
from kvinterp.models.inputs import chosen_layers, listed, token_ids
from kvinterp.models.sites import LAYOUTS, ROWS, listed_names
from kvinterp.patching.ablations import Ablation, HandedRows
from kvinterp.patching.patch import Patch, check_patch_site, stored_sites
from kvinterp.paths import run
from kvinterp.recording import Recorder, Trace
from kvinterp.recording.activation_cache import is_activation_cache, records_of


def check_donor(adapter: Adapter, patch: Patch, donor: Trace | Ablation | HandedRows) -> None:
    """Refuses a donor without the tensors that a patch moves.

    Raises:
        InputError: It lacks a site, a layer or a step, or its prompt was tokenised otherwise.
    """
    layers = chosen_layers(adapter, patch.layers)
    tensors: Mapping[Site, Any] = donor.pool if isinstance(donor, Ablation) else donor.records
    for site, layer in itertools.product(stored_sites(adapter, patch.site), layers):
        if isinstance(donor, Ablation):
            name = f"{donor.name} donor"
            remedy = f"make it with that site, kv.{donor.name}_donor(model, prompts, {site!r})"
        elif isinstance(donor, HandedRows):
            name, remedy = donor.name, f"let run_with_cache keep {hook_name(site, layer)}"
        else:
            name, remedy = "donor trace", f"run the donor with record={site!r}"
        # Zeros, a tensor and a function fit every site.
        if (site, layer) not in tensors and (tensors or isinstance(donor, Trace)):
            have = ", ".join(sorted({place[0] for place in tensors})) or "nothing"
            raise InputError(f"the {name} holds no {site!r} of layer {layer} (it has {have}): {remedy}.")
    if not isinstance(donor, Trace):
        return
    steps = patch.steps if isinstance(patch.steps, tuple) else (1,) if patch.steps == "first" else ()
    missing = next((step for step in steps if step not in donor.steps), None)
    if missing is not None:
        raise _missing_step(donor, missing)
    wrong = next((t for t in donor.prompt if t >= adapter.facts.vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"the donor trace holds token id {wrong}, which {adapter.facts.name} does not have: it was made with "
            "another tokenisation; run the donor with the same model."
        )


def _missing_step(donor: Trace, step: int) -> InputError:
    steps = ", ".join(map(str, donor.steps[:8])) + (", ..." if len(donor.steps) > 8 else "")
    return InputError(
        f"the donor trace did not record step {step} (it has {steps or 'none'}): run it for as many steps, or name "
        "the steps to patch, such as steps=(0,)."
    )


def rows_of(donor: Trace, site: str, layer: int, step: int) -> tuple[int, Tensor]:
    """The absolute position of the first row, and the donor's rows at a step, gathered over steps for a cached donor."""
    if step not in donor.steps:
        raise _missing_step(donor, step)
    index = donor.steps.index(step)
    record, layout = donor.records[site, layer], LAYOUTS[site]
    tensor, rows, length = record[index], layout.rows, len(donor.prompt) + step
    if (ROWS, layer) in donor.records and not layout.gathers:
        raise UnsupportedError(
            f"the donor's {site} cannot be moved: path {donor.path} lets go of rows, so positions cannot be matched: patch q, k, "
            "v or z, or give a donor that keeps all rows."
        )
    if tensor.dim() < layout.dimensions - 1:
        # Recorded at the newest position only: one row, without the dimension of rows.
        return length - 1, tensor.unsqueeze(rows - 1)[None]
    if site == "pattern" and tensor.shape[-1] > length:
        raise UnsupportedError(
            f"the donor's pattern at layer {layer} has {tensor.shape[-1]} keys in a context of {length} positions, as with a "
            "static cache, so keys cannot be matched: record it with a cache that grows."
        )
    if layout.gathers and donor.path.startswith("cached") and list(donor.steps[: index + 1]) == list(range(step + 1)):
        tensor = torch.cat(record[: index + 1], rows - 1)
        # After a refresh the newest rows replace those of earlier steps.
        tensor = tensor.narrow(rows - 1, tensor.shape[rows - 1] - length, length)
    return length - tensor.shape[rows - 1], tensor[None]


def donor_trace(recorder: Any, prompt: Sequence[int], fed: Sequence[int] = ()) -> Trace:
    """Makes a trace, as the donor of patches, of the user's own forwards that :func:`kvinterp.record` recorded.

    Args:
        recorder: The recorder, of one prompt at a time, or TransformerLens's ``ActivationCache`` of one forward of the prompt.
        prompt: Token ids of the first forward.
        fed: Token ids fed after it, one a forward (alone with a cache, or after the whole prefix without one).

    Raises:
        InputError: A forward had several prompts, or the number of forwards does not fit the tokens.

    Example:
        >>> with kv.record(model, "resid_pre", positions="all") as clean:  # doctest: +SKIP
        ...     model(clean_tokens)
        >>> donor = donor_trace(clean, clean_tokens[0].tolist())  # doctest: +SKIP
    """
    prompt, fed = _token_ids("prompt", prompt), _token_ids("fed", fed)
    if is_activation_cache(recorder):
        return _trace_of_activation_cache(recorder, prompt, fed)
    check_instance(
        "recorder", recorder, Recorder, "what kv.record(...) gave: with kv.record(model, 'resid_pre') as recorder"
    )
    recorder.end_step()
    steps = tuple(recorder.recorded_steps)
    if not steps:
        raise InputError("nothing was recorded: run the model within kv.record(...), and call donor_trace() after it.")
    if not prompt:
        raise InputError("prompt=[] was given: expected the token ids of the first forward.")
    if len(steps) != 1 + len(fed):
        raise InputError(
            f"{len(steps)} forwards were recorded, and a prompt with {len(fed)} tokens fed after it takes {1 + len(fed)}: "
            "give the tokens that were fed, one for each forward after the first."
        )
    if any(tensor.shape[0] != 1 for record in recorder.kept.values() for tensor in record):
        raise InputError("the recorded forwards hold several prompts at once: record one prompt at a time.")
    # A later forward with all rows from position 0 ran without a cache.
    rows = [record[-1].shape[1] for (site, _), record in recorder.kept.items() if LAYOUTS[site].gathers]
    cached = fed and recorder.positions == "all" and rows[:1] == [1]
    records = {place: [tensor[0] for tensor in record] for place, record in recorder.kept.items()}
    return Trace("cached" if cached else "recompute", tuple(prompt), (), tuple(fed), records, steps)


def _trace_of_activation_cache(cache: Any, prompt: list[int], fed: list[int]) -> Trace:
    records = records_of(cache)
    if fed:
        raise InputError("fed was given with an ActivationCache, which is of one forward: leave it out.")
    (site, _), tensor = next(iter(records.items()))
    rows = tensor.shape[LAYOUTS[site].rows - 1]
    if rows != len(prompt):
        raise InputError(
            f"the cache holds {rows} positions, and the prompt has {len(prompt)} tokens: give those it was made of."
        )
    return Trace("recompute", tuple(prompt), (), (), {place: [tensor] for place, tensor in records.items()}, (0,))


def _token_ids(name: str, ids: object) -> list[int]:
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    tokens = token_ids(ids)
    if tokens is None:
        raise unexpected(name, ids, "a list of token ids")
    return tokens


# Ablations -------------------------------------------------------------------------------------------------------------


def mean_donor(
    model: Any, prompts: Any, sites: str | Sequence[str], layers: Iterable[int] | int | None = None, *, first: int = 0
) -> Ablation:
    """Makes a donor of patches that gives the mean of some prompts' rows, over all positions of all prompts.

    Every row counts the same, so a longer prompt counts more. With one prompt it is the mean over its positions.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list; they need not be of equal length.
        sites: Sites to be patched: names of PATCH_SITES or of TransformerLens's hooks, except the pattern, whose rows have as
            many keys as positions. Keys in a cache carry their position after RoPE, which their mean loses; ablate ``k`` for the
            mean before RoPE.
        layers: Layers (default: all).
        first: The first position that counts; 1 leaves out position 0, where many models have an attention sink.

    Raises:
        InputError: An argument names something that does not exist, or no position is left.
        UnsupportedError: This model does not show the site, or its rows have no mean.

    Example:
        >>> mean = kv.mean_donor(model, prompts, "z")  # doctest: +SKIP
        >>> with kv.patched(model, kv.Patch("z", (3,), heads=(1,), positions="all", donor=mean)):  # doctest: +SKIP
        ...     model(tokens)
    """
    return Ablation("mean", _pool(model, prompts, sites, layers, first))


def resample_donor(
    model: Any,
    prompts: Any,
    sites: str | Sequence[str],
    layers: Iterable[int] | int | None = None,
    *,
    seed: int = 0,
    first: int = 0,
) -> Ablation:
    """Makes a donor of patches that gives rows drawn at random from other prompts.

    For each position one prompt and position is drawn, the same in all layers and at all sites. To resample position by
    position, use a trace of another prompt of the same length as the donor.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list, other than the one to be patched; they need not be of equal length.
        sites: As for :func:`mean_donor`.
        layers: As for :func:`mean_donor`.
        seed: Seeds the draws.
        first: As for :func:`mean_donor`.

    Raises:
        InputError: An argument names something that does not exist, or no position is left.
        UnsupportedError: This model does not show the site, or its rows cannot be exchanged.
    """
    return Ablation("resample", _pool(model, prompts, sites, layers, first), check_seed(seed))


def _pool(
    model: Any, prompts: Any, sites: str | Sequence[str], layers: Iterable[int] | int | None, first: int
) -> dict[Site, Tensor]:
    adapter, first = wrap(model), check_whole("first", first, 0)
    places = [site_of(name) if isinstance(name, str) else (name, None) for name in listed_names(sites)]
    if not places:
        raise InputError("sites=[] was given: expected at least one name, such as 'z'.")
    names, hook_layers = zip(*places, strict=True)
    if layers is None and all(hook_layers):
        layers = sorted({layer for of_hook in hook_layers for layer in of_hook})
    for name in names:
        check_patch_site(name)
    if "pattern" in names:
        raise UnsupportedError(
            "the rows of a pattern have as many keys as there are positions, so that those of one position do not fit another: "
            "ablate it with donor='zero', or give the trace of another prompt of the same length."
        )
    recorded = tuple(dict.fromkeys(stored for name in names for stored in stored_sites(adapter, name)))
    items, _ = listed(prompts, adapter.tokenizer)
    traces = run(adapter, items, "recompute", max_new_tokens=1, record=recorded, layers=layers, positions="all")
    failure = next((trace.failure for trace in traces if trace.failure), "")
    if failure:
        raise NonFiniteError(failure)
    if first >= max(len(trace.prompt) for trace in traces):
        raise InputError(f"first={first} leaves no position of the prompts given: give a smaller one, or longer prompts.")
    pool: dict[Site, Tensor] = {}
    for site, layer in traces[0].records:
        if site != ROWS:
            axis = LAYOUTS[site].rows - 1
            tensors = [trace.records[site, layer][0].tensor_split([first], axis)[1] for trace in traces]
            pool[site, layer] = torch.cat(tensors, axis)
    return pool
