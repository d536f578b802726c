"""Donors of patches: a trace's rows by step and absolute position."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.common.checks import check_instance
from kvinterp.errors import InputError, UnsupportedError, unexpected
from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hook_names import hook_name
from kvinterp.models.inputs import chosen_layers, token_ids
from kvinterp.models.sites import CACHE_POSITIONS, LAYOUTS
from kvinterp.patching.ablations import Ablation, HandedRows
from kvinterp.patching.patch import Patch, stored_sites
from kvinterp.recording import Recorder, Trace
from kvinterp.recording.activation_cache import is_activation_cache, records_of


def check_donor(adapter: Adapter, patch: Patch, donor: Trace | Ablation | HandedRows) -> None:
    """Refuses a donor without the tensors that a patch moves.

    Raises:
        InputError: It lacks a site, a layer or a step, or its prompt was tokenised otherwise.
    """
    if isinstance(donor, Ablation):
        return
    layers = chosen_layers(adapter, patch.layers)
    tensors: Mapping[HookPoint, Any] = donor.records
    for site, layer in itertools.product(stored_sites(adapter, patch.site), layers):
        if isinstance(donor, HandedRows):
            name, remedy = donor.name, f"let run_with_cache keep {hook_name(site, layer)}"
        else:
            name, remedy = "donor trace", f"run the donor with record={site!r}"
        # A tensor and a function fit every site.
        if (site, layer) not in tensors and (tensors or isinstance(donor, Trace)):
            have = ", ".join(sorted({hook_point[0] for hook_point in tensors})) or "nothing"
            raise InputError(
                f"the {name} holds no {site!r} of layer {layer} (it has {have}): {remedy}."
            )
    if not isinstance(donor, Trace):
        return
    steps = (
        patch.steps if isinstance(patch.steps, tuple) else (1,) if patch.steps == "first" else ()
    )
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
    """The absolute position of the first row, and the donor's rows at a step, gathered over steps
    for a cached donor.
    """
    if step not in donor.steps:
        raise _missing_step(donor, step)
    index = donor.steps.index(step)
    record, layout = donor.records[site, layer], LAYOUTS[site]
    tensor, rows, length = record[index], layout.row_axis, len(donor.prompt) + step
    if (CACHE_POSITIONS, layer) in donor.records and not layout.gathers:
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
    if (
        layout.gathers
        and donor.path.startswith("cached")
        and list(donor.steps[: index + 1]) == list(range(step + 1))
    ):
        tensor = torch.cat(record[: index + 1], rows - 1)
        # After a refresh the newest rows replace those of earlier steps.
        tensor = tensor.narrow(rows - 1, tensor.shape[rows - 1] - length, length)
    return length - tensor.shape[rows - 1], tensor[None]


def donor_trace(recorder: Any, prompt: Sequence[int], fed: Sequence[int] = ()) -> Trace:
    """Makes a trace, as the donor of patches, of the user's own forwards that
    :func:`kvinterp.record` recorded.

    Args:
        recorder: The recorder, of one prompt at a time, or TransformerLens's ``ActivationCache`` of
            one forward of the prompt.
        prompt: Token ids of the first forward.
        fed: Token ids fed after it, one a forward (alone with a cache, or after the whole prefix
            without one).

    Raises:
        InputError: A forward had several prompts, or the number of forwards does not fit the
            tokens.

    Example:
        >>> with kv.record(model, "resid_pre", positions="all") as clean:  # doctest: +SKIP
        ...     model(clean_tokens)
        >>> donor = donor_trace(clean, clean_tokens[0].tolist())  # doctest: +SKIP
    """
    prompt, fed = _token_ids("prompt", prompt), _token_ids("fed", fed)
    if is_activation_cache(recorder):
        return _trace_of_activation_cache(recorder, prompt, fed)
    check_instance(
        "recorder",
        recorder,
        Recorder,
        "what kv.record(...) gave: with kv.record(model, 'resid_pre') as recorder",
    )
    recorder.end_step()
    steps = tuple(recorder.recorded_steps)
    if not steps:
        raise InputError(
            "nothing was recorded: run the model within kv.record(...), and call donor_trace() after it."
        )
    if not prompt:
        raise InputError("prompt=[] was given: expected the token ids of the first forward.")
    if len(steps) != 1 + len(fed):
        raise InputError(
            f"{len(steps)} forwards were recorded, and a prompt with {len(fed)} tokens fed after it takes {1 + len(fed)}: "
            "give the tokens that were fed, one for each forward after the first."
        )
    if any(tensor.shape[0] != 1 for record in recorder.kept.values() for tensor in record):
        raise InputError(
            "the recorded forwards hold several prompts at once: record one prompt at a time."
        )
    # A later forward with all rows from position 0 ran without a cache.
    rows = [
        record[-1].shape[1] for (site, _), record in recorder.kept.items() if LAYOUTS[site].gathers
    ]
    cached = fed and recorder.positions == "all" and rows[:1] == [1]
    records = {
        hook_point: [tensor[0] for tensor in record] for hook_point, record in recorder.kept.items()
    }
    return Trace("cached" if cached else "recompute", tuple(prompt), (), tuple(fed), records, steps)


def _trace_of_activation_cache(cache: Any, prompt: list[int], fed: list[int]) -> Trace:
    records = records_of(cache)
    if fed:
        raise InputError(
            "fed was given with an ActivationCache, which is of one forward: leave it out."
        )
    (site, _), tensor = next(iter(records.items()))
    rows = tensor.shape[LAYOUTS[site].row_axis - 1]
    if rows != len(prompt):
        raise InputError(
            f"the cache holds {rows} positions, and the prompt has {len(prompt)} tokens: give those it was made of."
        )
    return Trace(
        "recompute",
        tuple(prompt),
        (),
        (),
        {hook_point: [tensor] for hook_point, tensor in records.items()},
        (0,),
    )


def _token_ids(name: str, ids: object) -> list[int]:
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    tokens = token_ids(ids)
    if tokens is None:
        raise unexpected(name, ids, "a list of token ids")
    return tokens
