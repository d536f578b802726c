"""TransformerLens's names of hooks (``blocks.1.attn.hook_pattern``): each says site and layer, wherever a site is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvinterp.errors import InputError, shown, unexpected, unknown
from kvinterp.models.attaching import Site
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import LAYOUTS, WITHIN_MLP, expand_sites, listed_names

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter

HOOKS = {site: layout.hook for site, layout in LAYOUTS.items() if layout.hook}
"""The hook of each site within a block, :data:`WHOLE` apart; cache sites are no hook's, but for the rotated keys."""
WHOLE = ("embed",)
"""Sites that are the whole model's, and stand at layer 0."""
HOOKS_READ = {hook: site for site, hook in HOOKS.items()} | {
    "attn.hook_rot_k": "cache_k",
    # What a TransformerBridge calls them.
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "attn.hook_out": "attn_out",
    "mlp.hook_out": "mlp_out",
    "mlp.out.hook_in": "post",
    "embed.hook_out": "embed",
    "mlp.gate.hook_out": "router",
    "mlp.hook_expert_indices": "experts",
}
"""The site of each hook that is read, those of :data:`HOOKS` and others' names for the same."""
_MEANT = {
    "hook_pos_embed": "blocks.0.hook_resid_pre, the residual stream that enters the first block",
    "ln_final.hook_normalized": "hook_resid_post of the last block, which the final norm reads",
    "ln_final.hook_scale": "hook_resid_post of the last block, which the final norm reads",
    "attn.hook_rot_q": "attn.hook_q, the queries before RoPE",
    "mlp.hook_expert_weights": "mlp.hook_expert_indices, the experts that were chosen",
    "mlp.hook_pre": "mlp.hook_post, the neurons behind the activation",
    "ln1.hook_normalized": "hook_resid_pre, which the first norm reads",
    "ln2.hook_normalized": "hook_resid_mid, which the second norm reads",
}
"""What a hook that no site is may have been meant for."""
_NAME = re.compile(r"(?:blocks\.(\d{1,6})\.)?([\w.]*hook_\w+)")
Names = str | Sequence[str] | Callable[[str], bool]
"""Names of sites, groups and hooks; or TransformerLens's ``names_filter``, a function of a hook's name."""


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
    site = HOOKS_READ.get(hook) or HOOKS_READ.get(f"attn.{hook}")
    if site is None:
        meant = _MEANT.get(hook) or _MEANT.get(f"attn.{hook}")
        if meant is not None:
            raise InputError(f"no site is at hook {shown(name)}: use {meant}.")
        raise unknown(
            "hook", str(name), [f"blocks.{layer or 0}.{known}" for known in HOOKS_READ], "Every other hook is no site here."
        )
    return site, 0 if layer is None and site in WHOLE else None if layer is None else int(layer)


def hook_name(site: str, layer: int) -> str:
    """What TransformerLens calls a site at a layer; of one that it has no hook for the site's own name in its place."""
    return HOOKS[site] if site in WHOLE else f"blocks.{layer}.{HOOKS.get(site, site)}"


def names_of(adapter: Adapter, names: Names) -> list[str]:
    """The names of a text or a list, or those of the hooks that a ``names_filter`` takes.

    Raises:
        InputError: The function takes no hook at which a site is.
    """
    if not callable(names):
        return listed_names(names)
    every = list(dict.fromkeys(hook_name(site, layer) for site in HOOKS for layer in range(adapter.facts.layers)))
    if not (taken := _taken(names, every)):
        raise InputError(
            f"the names_filter takes no hook at which a site is: expected some of {', '.join(HOOKS.values())}."
        )
    # A filter takes of the hooks that there are.
    return [name for name in taken if adapter.supports(*hook_of(name))] or taken  # type: ignore[misc]


def _taken(names: Callable[[str], Any], every: list[str]) -> list[str]:
    try:
        return [name for name in every if names(name)]
    except (TypeError, ValueError) as error:
        raise unexpected("names_filter", names, "a function of a hook's name") from error


def one_site(adapter: Adapter, name: Any, layers: Iterable[int] | int | None) -> tuple[Any, Iterable[int] | int | None]:
    """The one site that a name or a ``names_filter`` means, and its layers or those that were given, None where none are said.

    Raises:
        InputError: The function takes hooks of several sites, or other layers were given than those that are said.
    """
    if not callable(name):
        site, own = site_of(name) if isinstance(name, str) else (name, None)
    else:
        places = [place for each in names_of(adapter, name) if (place := hook_of(each)) is not None]
        sites = list(dict.fromkeys(site for site, _ in places))
        if len(sites) > 1:
            raise InputError(f"the names_filter takes {', '.join(sites)}: one site is patched at a time.")
        site, own = sites[0], tuple(layer for _, layer in places if layer is not None)
    if layers is None or own is None or site in WHOLE:
        return site, own if layers is None else layers
    chosen = chosen_layers(adapter, layers)
    if not set(chosen) <= set(own):
        of = "the names_filter takes layers" if callable(name) else f"hook {name!r} is of layer"
        raise InputError(f"{of} {', '.join(map(str, own))}, and layers={list(chosen)} was given: leave layers out.")
    return site, chosen


def site_of(name: str) -> tuple[str, tuple[int, ...] | None]:
    """The site that a name says, and the layers, None where it says none; the name itself where it is no hook's."""
    found = hook_of(name)
    if found is None:
        return name, (0,) if name in WHOLE else None
    return found[0], None if found[1] is None else (found[1],)


def place_of(place: object) -> object:
    """The site and layer of a hook's name; anything else as it is."""
    found = hook_of(place)
    return place if found is None or found[1] is None else found


def sites_of(names: Names) -> tuple[str, ...]:
    """The sites of names of sites, groups and hooks, each once.

    Raises:
        InputError: A name is none.
    """
    if callable(names):
        names = _taken(names, [hook_name(site, 0) for site in HOOKS])
    return expand_sites([site_of(name)[0] if isinstance(name, str) else name for name in listed_names(names)])


def places_of(
    adapter: Adapter, names: Names, layers: Iterable[int] | int | None = None
) -> tuple[tuple[str, ...], list[Site]]:
    """Every site and layer that names mean.

    Args:
        adapter: The model.
        names: Names of sites, groups and hooks, or a ``names_filter``.
        layers: The layers of those that name none (default: all).

    Returns:
        The sites, and the places, site by site and layer by layer.

    Raises:
        InputError: A name is none, or a layer does not exist or is not among ``layers``.
    """
    names = names_of(adapter, names)
    chosen, sites = chosen_layers(adapter, layers), sites_of(names)
    at: Mapping[str, set[int]] = {site: set() for site in sites}
    for name in names:
        site, own = site_of(name)
        where = chosen if own is None else chosen_layers(adapter, own)
        if site not in WHOLE and not set(where) <= set(chosen):
            raise InputError(
                f"hook {name!r} is of layer {where[0]}, which is not among layers={list(chosen)}: leave layers out."
            )
        for each in expand_sites([site]):
            at[each].update(where)
    return sites, [(site, layer) for site in sites for layer in layers_with(adapter, site, sorted(at[site]))]


def layers_with(adapter: Any, site: str, layers: Sequence[int]) -> Sequence[int]:
    """Of these layers those that have a site, where some may not: models have dense layers beside those with experts.

    Where none has it all are returned, so that whoever asks the model for one hears why.
    """
    if site in WHOLE:
        return [0]
    found = [layer for layer in layers if adapter.supports(site, layer)] if site in WITHIN_MLP else []
    return found or layers
