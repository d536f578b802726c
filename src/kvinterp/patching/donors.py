"""Where a patch takes from: a trace's rows, by step and absolute position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvinterp.errors import InputError, UnsupportedError, unexpected
from kvinterp.inputs import check_instance, chosen_layers, token_ids
from kvinterp.models import Adapter
from kvinterp.models.sites import LAYOUTS, ROWS
from kvinterp.patching.patch import Patch, stored_sites
from kvinterp.recording import Recorder, Trace

__all__ = ["check_donor", "donor_trace", "rows_of"]


def check_donor(adapter: Adapter, patch: Patch, donor: Trace) -> None:
    """Refuses a donor that does not hold what a patch moves.

    Raises:
        InputError: It lacks a site, a layer or a step, or is of another tokenisation.
    """
    for site in stored_sites(adapter, patch.site):
        for layer in chosen_layers(adapter, patch.layers):
            if (site, layer) not in donor.records:
                have = ", ".join(sorted({s for s, _ in donor.records})) or "nothing"
                raise InputError(
                    f"the donor trace holds no {site!r} of layer {layer} (it recorded {have}): run the donor with "
                    f"record={site!r}."
                )
    named = patch.steps if isinstance(patch.steps, tuple) else (1,) if patch.steps == "first" else ()
    missing = next((step for step in named if step not in donor.steps), None)
    if missing is not None:
        raise _no_step(donor, missing)
    wrong = next((t for t in donor.prompt if t >= adapter.facts.vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"the donor trace holds token id {wrong}, which {adapter.facts.name} does not have: it was made with "
            "another tokenisation; run the donor with the same model."
        )


def _no_step(donor: Trace, step: int) -> InputError:
    shown = ", ".join(map(str, donor.steps[:8])) + (", ..." if len(donor.steps) > 8 else "")
    return InputError(
        f"the donor trace did not record step {step} (it has {shown or 'none'}): run it for as many steps, or name "
        "the steps to patch, such as steps=(0,)."
    )


def rows_of(donor: Trace, site: str, layer: int, step: int) -> tuple[int, Tensor]:
    """The donor's rows at a step with the absolute position of the first, gathered over steps for a cached donor."""
    if step not in donor.steps:
        raise _no_step(donor, step)
    index = donor.steps.index(step)
    kept = donor.records[site, layer]
    layout = LAYOUTS[site]
    rows = layout.rows
    if (ROWS, layer) in donor.records and not layout.gathers:
        raise UnsupportedError(
            f"the donor's {site} cannot be moved: path {donor.path} lets go of rows, so positions cannot be matched: patch q, k, "
            "v or z, or give a donor that keeps all rows."
        )
    if kept[index].dim() < layout.dimensions - 1:
        # Recorded at the newest position: one row, without the dimension; and never that of the batch.
        return len(donor.prompt) + step - 1, kept[index].unsqueeze(rows - 1)[None]
    here = kept[index]
    held = len(donor.prompt) + step
    if site == "pattern" and here.shape[-1] > held:
        raise UnsupportedError(
            f"the donor's pattern at layer {layer} has {here.shape[-1]} keys in a context of {held} positions, as with a "
            "static cache, so keys cannot be matched: record it with a cache that grows."
        )
    if layout.gathers and donor.path.startswith("cached") and list(donor.steps[: index + 1]) == list(range(step + 1)):
        here = torch.cat(kept[: index + 1], rows - 1)
        # A refresh computes rows anew that earlier steps had.
        here = here.narrow(rows - 1, here.shape[rows - 1] - held, held)
    return len(donor.prompt) + step - here.shape[rows - 1], here[None]


def donor_trace(recorder: Recorder, prompt: Sequence[int], fed: Sequence[int] = ()) -> Trace:
    """What :func:`kvinterp.record` kept of the user's own forwards, as a trace that patches can take from.

    Args:
        recorder: What recorded them, one prompt at a time.
        prompt: Token ids of the first forward.
        fed: Token ids fed after it, one a forward (alone with a cache, or behind the whole prefix without one).

    Raises:
        InputError: The forwards were of several prompts at once, or are not as many as the tokens say.

    Example:
        >>> with kv.record(model, "resid_pre", positions="all") as clean:  # doctest: +SKIP
        ...     model(clean_tokens)
        >>> donor = donor_trace(clean, clean_tokens[0].tolist())  # doctest: +SKIP
    """
    check_instance(
        "recorder", recorder, Recorder, "what kv.record(...) gave: with kv.record(model, 'resid_pre') as recorder"
    )
    prompt, fed = _token_ids("prompt", prompt), _token_ids("fed", fed)
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
    if any(tensor.shape[0] != 1 for kept in recorder.kept.values() for tensor in kept):
        raise InputError("the recorded forwards hold several prompts at once: record one prompt at a time.")
    # Every row from position 0 in a later forward means that it ran without a cache.
    rows = [kept[-1].shape[1] for (site, _), kept in recorder.kept.items() if LAYOUTS[site].gathers]
    cached = bool(fed) and recorder.positions == "all" and bool(rows) and rows[0] == 1
    records = {place: [tensor[0] for tensor in kept] for place, kept in recorder.kept.items()}
    form = "cached" if cached else "recompute"
    return Trace(form, tuple(prompt), (), tuple(fed), records, steps)


def _token_ids(name: str, given: object) -> list[int]:
    if isinstance(given, Tensor) and given.dim() == 2 and given.shape[0] == 1:
        given = given[0]
    tokens = token_ids(given)
    if tokens is None:
        raise unexpected(name, given, "a list of token ids")
    return tokens
