"""TransformerLens's names: a hook such as ``blocks.1.attn.hook_pattern`` says site and layer, wherever a site is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kvinterp.errors import InputError, shown, unknown
from kvinterp.inputs import Model, chosen_layers
from kvinterp.models.attaching import Site
from kvinterp.models.sites import expand_sites, listed_names

HOOKS = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "attn_scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
}
"""The hook of each site within a block; cache sites are no hook's, but for the rotated keys."""
_SITES = {hook: site for site, hook in HOOKS.items()} | {
    "attn.hook_rot_k": "cache_k",
    # What a TransformerBridge calls them.
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "attn.hook_out": "attn_out",
    "mlp.hook_out": "mlp_out",
}
_MEANT = {
    "hook_embed": "blocks.0.hook_resid_pre, the residual stream that enters the first block",
    "hook_pos_embed": "blocks.0.hook_resid_pre, the residual stream that enters the first block",
    "ln_final.hook_normalized": "hook_resid_post of the last block, which the final norm reads",
    "ln_final.hook_scale": "hook_resid_post of the last block, which the final norm reads",
    "attn.hook_rot_q": "attn.hook_q, the queries before RoPE",
    "attn.hook_result": "attn.hook_z, each head's output before the output projection",
    "mlp.hook_pre": "hook_mlp_out, what the MLP adds to the residual stream",
    "mlp.hook_post": "hook_mlp_out, what the MLP adds to the residual stream",
    "ln1.hook_normalized": "hook_resid_pre, which the first norm reads",
    "ln2.hook_normalized": "hook_resid_mid, which the second norm reads",
}
"""What a hook that no site is may have been meant for."""
_NAME = re.compile(r"(?:blocks\.(\d{1,6})\.)?([\w.]*hook_\w+)")


def hook_of(name: object) -> tuple[str, int | None] | None:
    """The site and the layer of a hook's name; the layer None where it names none; None for what is no hook's name.

    Args:
        name: Such as ``blocks.1.attn.hook_pattern``, or ``hook_resid_post``, of every layer.

    Raises:
        InputError: It is a hook's name, and no site is there.
    """
    found = _NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if found is None:
        return None
    layer, hook = found.groups()
    site = _SITES.get(hook) or _SITES.get(f"attn.{hook}")
    if site is None:
        meant = _MEANT.get(hook) or _MEANT.get(f"attn.{hook}")
        if meant is not None:
            raise InputError(f"no site is at hook {shown(name)}: use {meant}.")
        raise unknown(
            "hook", str(name), [f"blocks.{layer or 0}.{known}" for known in _SITES], "Every other hook is no site here."
        )
    return site, None if layer is None else int(layer)


def site_of(name: str) -> tuple[str, tuple[int, ...] | None]:
    """The site that a name says, and the layers, None where it says none; the name itself where it is no hook's."""
    found = hook_of(name)
    return (name, None) if found is None else (found[0], None if found[1] is None else (found[1],))


def place_of(place: object) -> object:
    """The site and layer of a hook's name; anything else as it is."""
    found = hook_of(place)
    return place if found is None or found[1] is None else found


def sites_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """The sites of names of sites, groups and hooks, each once.

    Raises:
        InputError: A name is none.
    """
    return expand_sites([site_of(name)[0] if isinstance(name, str) else name for name in listed_names(names)])


def places_of(
    adapter: Model, names: str | Sequence[str], layers: Iterable[int] | None = None
) -> tuple[tuple[str, ...], list[Site]]:
    """Every site and layer that names mean.

    Args:
        adapter: The model.
        names: Names of sites, groups and hooks.
        layers: The layers of those that name none (default: all).

    Returns:
        The sites, and the places, site by site and layer by layer.

    Raises:
        InputError: A name is none, or a layer does not exist or is not among ``layers``.
    """
    chosen, sites = chosen_layers(adapter, layers), sites_of(names)
    at: Mapping[str, set[int]] = {site: set() for site in sites}
    for name in listed_names(names):
        site, own = site_of(name)
        where = chosen if own is None else chosen_layers(adapter, own)
        if not set(where) <= set(chosen):
            raise InputError(
                f"hook {name!r} is of layer {where[0]}, which is not among layers={list(chosen)}: leave layers out."
            )
        for each in expand_sites([site]):
            at[each].update(where)
    return sites, [(site, layer) for site in sites for layer in sorted(at[site])]
