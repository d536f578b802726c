"""Conversion of traces and recorders to TransformerLens's ``ActivationCache``, and back to
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hook_names import HOOKS, hook_name, hook_of
from kvinterp.models.sites import LAYOUTS


def cache_of(
    records: Mapping[HookPoint, Tensor], model: Any = None, more: Mapping[str, Tensor] | None = None
) -> Any:
    """Makes an ``ActivationCache`` of one forward.

    Args:
        records: For each site and layer a tensor with the batch, of all positions or of the newest
            without their axis.
        model: The model that some methods of the cache need, or None.
        more: Tensors of hooks that are no sites, by name.

    Raises:
        InputError: No recorded site has a hook.
    """
    from transformer_lens import ActivationCache

    tensors = {
        hook_name(site, layer): tensor
        if tensor.dim() == LAYOUTS[site].dimensions
        else tensor.unsqueeze(LAYOUTS[site].row_axis)
        for (site, layer), tensor in records.items()
        if site in HOOKS
    }
    if not tensors:
        raise InputError(
            f"what was recorded holds nothing that a hook of TransformerLens shows: record one of {', '.join(HOOKS)}, as in "
            "record='resid_post,pattern'."
        )
    return ActivationCache({**(more or {}), **tensors}, getattr(model, "model", model))


def is_activation_cache(value: object) -> bool:
    """Whether a value is an ``ActivationCache`` of any version of TransformerLens, without
    importing it.
    """
    return type(value).__name__ == "ActivationCache" and isinstance(
        getattr(value, "cache_dict", None), Mapping
    )


def records_of(cache: Any, batched: bool = False) -> dict[HookPoint, Tensor]:
    """Returns the tensors of an ``ActivationCache`` by site and layer, without the batch (of one)
    unless ``batched``.

    Raises:
        InputError: It holds no site, or several prompts without ``batched``.
        UnsupportedError: A tensor is not of the shape that its site has here.
    """
    records: dict[HookPoint, Tensor] = {}
    for name, tensor in cache.cache_dict.items():
        try:
            hook_point = hook_of(name)
        except InputError:
            # A hook without a site, such as that of a norm's scale.
            continue
        if hook_point is None or hook_point[1] is None or hook_point[0] not in HOOKS:
            continue
        site, layer = hook_point[0], int(hook_point[1])
        rows = tensor if cache.has_batch_dim else tensor[None]
        if rows.shape[0] != 1 and not batched:
            raise InputError(
                f"the cache holds {rows.shape[0]} prompts: give that of one, such as cache of tokens[:1]."
            )
        if rows.dim() != LAYOUTS[site].dimensions:
            raise UnsupportedError(
                f"{name} has the shape {tuple(tensor.shape)}, and {site} has {LAYOUTS[site].dimensions} axes here: leave it out, "
                "with names_filter."
            )
        records[site, layer] = rows if batched else rows[0]
    if not records:
        raise InputError(
            f"the cache holds no hook at which a site is: expected some of {', '.join(HOOKS.values())}."
        )
    return records
