"""TransformerLens's ``ActivationCache``: made of a trace, and read as what was recorded of one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.attaching import Site
from kvinterp.models.hook_names import HOOKS, hook_name, hook_of
from kvinterp.models.sites import LAYOUTS


def activation_cache(
    records: Mapping[Site, Sequence[Tensor]], steps: Sequence[int], step: int, path: str, model: Any = None
) -> Any:
    """An ``ActivationCache`` of one step of a trace.

    Args:
        records: What the trace holds.
        steps: The steps it recorded.
        step: The step.
        path: The path's text form. Of a cached one with all positions the rows that earlier steps computed are put in front.
        model: The model that the cache's own methods ask, or None.

    Raises:
        InputError: The step was not recorded, or nothing that a hook shows.
    """
    if isinstance(step, bool) or step not in steps:
        raise InputError(f"step={step!r} was not recorded: expected one of {', '.join(map(str, steps)) or 'none'}.")
    at = list(steps).index(step)
    found: dict[Site, Tensor] = {}
    for (site, layer), kept in records.items():
        if site not in HOOKS:
            continue
        layout, here = LAYOUTS[site], kept[at]
        newest = here.dim() < layout.dimensions - 1
        if not newest and layout.gathers and path.startswith("cached") and list(steps[: at + 1]) == list(range(step + 1)):
            here = torch.cat(list(kept[: at + 1]), 0)
        found[site, layer] = here[None]
    return cache_of(found, model)


def cache_of(records: Mapping[Site, Tensor], model: Any = None) -> Any:
    """An ``ActivationCache`` of one forward.

    Args:
        records: For each site and layer a tensor with the batch, of all positions or of the newest without their axis.
        model: The model that the cache's own methods ask, or None.

    Raises:
        InputError: None of it is what a hook shows.
    """
    from transformer_lens import ActivationCache

    found = {
        hook_name(site, layer): here if here.dim() == LAYOUTS[site].dimensions else here.unsqueeze(LAYOUTS[site].rows)
        for (site, layer), here in records.items()
        if site in HOOKS
    }
    if not found:
        raise InputError(
            f"what was recorded holds nothing that a hook of TransformerLens shows: record one of {', '.join(HOOKS)}, as in "
            "record='resid_post,pattern'."
        )
    return ActivationCache(found, getattr(model, "model", model))


def is_activation_cache(given: object) -> bool:
    """Whether it is an ``ActivationCache``, of whatever version of TransformerLens; it need not be imported for that."""
    return type(given).__name__ == "ActivationCache" and isinstance(getattr(given, "cache_dict", None), Mapping)


def records_of(cache: Any, batched: bool = False) -> dict[Site, Tensor]:
    """What an ``ActivationCache`` holds at the sites that there are: of one prompt without its batch, or with the batch.

    Raises:
        InputError: It holds none, or several prompts.
        UnsupportedError: A tensor is not of the shape that its site has here.
    """
    found: dict[Site, Tensor] = {}
    for name, tensor in cache.cache_dict.items():
        try:
            place = hook_of(name)
        except InputError:
            # A hook without a site, such as that of a norm's scale.
            continue
        if place is None or place[1] is None or place[0] not in HOOKS:
            continue
        site, layer = place[0], int(place[1])
        rows = tensor if cache.has_batch_dim else tensor[None]
        if rows.shape[0] != 1 and not batched:
            raise InputError(f"the cache holds {rows.shape[0]} prompts: give that of one, such as cache of tokens[:1].")
        if rows.dim() != LAYOUTS[site].dimensions:
            raise UnsupportedError(
                f"{name} has the shape {tuple(tensor.shape)}, and {site} has {LAYOUTS[site].dimensions} axes here: leave it out, "
                "with names_filter."
            )
        found[site, layer] = rows if batched else rows[0]
    if not found:
        raise InputError(f"the cache holds no hook at which a site is: expected some of {', '.join(HOOKS.values())}.")
    return found
