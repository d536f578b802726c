"""TransformerLens's names of hooks (``blocks.1.attn.hook_pattern``), each a site and a layer,
accepted wherever a site is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvinterp.errors import InputError, shown, unexpected, unknown
from kvinterp.models.attaching import HookPoint
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import LAYOUTS, WITHIN_MLP, expand_sites, listed_names

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter

HOOKS = {site: layout.hook for site, layout in LAYOUTS.items() if layout.hook}
"""The hook of each site, in a block but for :data:`WHOLE`; cache sites have none, except for the
rotated keys.
"""
WHOLE = ("embed",)
"""Sites of the whole model, which count as layer 0."""
HOOKS_READ = {hook: site for site, hook in HOOKS.items()} | {
    "attn.hook_rot_k": "cache_k",
    # The names of a TransformerBridge.
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "attn.hook_out": "attn_out",
    "mlp.hook_out": "mlp_out",
    "mlp.out.hook_in": "post",
    "embed.hook_out": "embed",
    "mlp.gate.hook_out": "router",
}
"""The site of each hook name that is accepted: those of :data:`HOOKS` and other names for the same
sites.
"""
_NEAREST = {
    "hook_pos_embed": "blocks.0.hook_resid_pre, the residual stream that enters the first block",
    "ln_final.hook_normalized": "hook_resid_post of the last block, which the final norm reads",
    "ln_final.hook_scale": "hook_resid_post of the last block, which the final norm reads",
    "attn.hook_rot_q": "attn.hook_q, the queries before RoPE",
    "mlp.hook_expert_indices": "mlp.gate.hook_out, the logits that experts are chosen by",
    "mlp.hook_expert_weights": "mlp.gate.hook_out, the logits that experts are chosen by",
    "mlp.hook_pre": "mlp.hook_post, the neurons behind the activation",
    "ln1.hook_normalized": "hook_resid_pre, which the first norm reads",
    "ln2.hook_normalized": "hook_resid_mid, which the second norm reads",
}
"""The nearest site for hooks that no site corresponds to."""
_NAME = re.compile(r"(?:blocks\.(\d{1,6})\.)?([\w.]*hook_\w+)")
Names = str | Sequence[str] | Callable[[str], bool]
"""Names of sites, groups and hooks; or TransformerLens's ``names_filter``, a function of a hook's
name.
"""


def hook_of(name: object) -> tuple[str, int | None] | None:
    """The site and the layer of a hook's name, the layer None where the name has none; None for
    what is no hook's name.

    Args:
        name: Such as ``blocks.1.attn.hook_pattern``, or ``hook_resid_post`` for every layer.

    Raises:
        InputError: It is the name of a hook that no site corresponds to.
    """
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        return None
    layer, hook = match.groups()
    site = HOOKS_READ.get(hook) or HOOKS_READ.get(f"attn.{hook}")
    if site is None:
        nearest = _NEAREST.get(hook) or _NEAREST.get(f"attn.{hook}")
        if nearest is not None:
            raise InputError(f"no site is at hook {shown(name)}: use {nearest}.")
        hooks = [f"blocks.{layer or 0}.{hook}" for hook in HOOKS_READ]
        raise unknown("hook", str(name), hooks, "Every other hook is no site here.")
    return site, 0 if layer is None and site in WHOLE else None if layer is None else int(layer)


def hook_name(site: str, layer: int) -> str:
    """TransformerLens's name of a site at a layer; where TransformerLens has no hook, the name of
    the site takes its place.
    """
    return HOOKS[site] if site in WHOLE else f"blocks.{layer}.{HOOKS.get(site, site)}"


def names_of(adapter: Adapter, names: Names) -> list[str]:
    """The names in a text or a list, or the names of the hooks that a ``names_filter`` accepts.

    Raises:
        InputError: The function accepts no hook that is a site.
    """
    if not callable(names):
        return listed_names(names)
    hooks = dict.fromkeys(
        hook_name(site, layer) for site in HOOKS for layer in range(adapter.facts.layers)
    )
    if not (accepted := _accepted(names, hooks)):
        raise InputError(
            f"the names_filter takes no hook at which a site is: expected some of {', '.join(HOOKS.values())}."
        )
    # The model may lack some of the hooks that the filter accepts.
    return [name for name in accepted if adapter.supports(*hook_of(name))] or accepted  # type: ignore[misc]


def _accepted(names_filter: Callable[[str], Any], hooks: Iterable[str]) -> list[str]:
    try:
        return [name for name in hooks if names_filter(name)]
    except (TypeError, ValueError) as error:
        raise unexpected("names_filter", names_filter, "a function of a hook's name") from error


def one_site(
    adapter: Adapter, name: Any, layers: Iterable[int] | int | None
) -> tuple[Any, Iterable[int] | int | None]:
    """The one site that a name or a ``names_filter`` stands for, and its layers.

    Returns:
        The site, and ``layers`` or else the layers that the name says; None where neither says any.

    Raises:
        InputError: The function accepts hooks of several sites, or ``layers`` contradicts the name.
    """
    if not callable(name):
        site, named_layers = site_of(name) if isinstance(name, str) else (name, None)
    else:
        hook_points = [
            hook_point
            for hook in names_of(adapter, name)
            if (hook_point := hook_of(hook)) is not None
        ]
        sites = list(dict.fromkeys(site for site, _ in hook_points))
        if len(sites) > 1:
            raise InputError(
                f"the names_filter takes {', '.join(sites)}: one site is patched at a time."
            )
        site, named_layers = sites[0], tuple(layer for _, layer in hook_points if layer is not None)
    if layers is None or named_layers is None or site in WHOLE:
        return site, named_layers if layers is None else layers
    numbers = chosen_layers(adapter, layers)
    if not set(numbers) <= set(named_layers):
        subject = (
            "the names_filter takes layers" if callable(name) else f"hook {name!r} is of layer"
        )
        raise InputError(
            f"{subject} {', '.join(map(str, named_layers))}, and layers={list(numbers)} was given: leave layers out."
        )
    return site, numbers


def site_of(name: str) -> tuple[str, tuple[int, ...] | None]:
    """The site that a name says, and its layers, None where the name says none; the name itself
    where it is no hook's.
    """
    hook_point = hook_of(name)
    if hook_point is None:
        return name, (0,) if name in WHOLE else None
    return hook_point[0], None if hook_point[1] is None else (hook_point[1],)


def hook_point_of(hook_point: object) -> object:
    """The site and layer of a hook's name; anything else as it is."""
    site = hook_of(hook_point)
    return hook_point if site is None or site[1] is None else site


def sites_of(names: Names) -> tuple[str, ...]:
    """The sites that names of sites, groups and hooks stand for, each once.

    Raises:
        InputError: A name is none of these.
    """
    if callable(names):
        names = _accepted(names, [hook_name(site, 0) for site in HOOKS])
    return expand_sites(
        [site_of(name)[0] if isinstance(name, str) else name for name in listed_names(names)]
    )


def hook_points_of(
    adapter: Adapter, names: Names, layers: Iterable[int] | int | None = None
) -> tuple[tuple[str, ...], list[HookPoint]]:
    """Every site and layer that names stand for.

    Args:
        adapter: The model.
        names: Names of sites, groups and hooks, or a ``names_filter``.
        layers: The layers for names that say none (default: all).

    Returns:
        The sites, and the hook points, site by site and layer by layer.

    Raises:
        InputError: A name is none of these, or a layer does not exist or is not among ``layers``.
    """
    names = names_of(adapter, names)
    default, sites = chosen_layers(adapter, layers), sites_of(names)
    layers_of: Mapping[str, set[int]] = {site: set() for site in sites}
    for name in names:
        site, named_layers = site_of(name)
        numbers = default if named_layers is None else chosen_layers(adapter, named_layers)
        if site not in WHOLE and not set(numbers) <= set(default):
            raise InputError(
                f"hook {name!r} is of layer {numbers[0]}, which is not among layers={list(default)}: leave layers out."
            )
        for member in expand_sites([site]):
            layers_of[member].update(numbers)
    return sites, [
        (site, layer)
        for site in sites
        for layer in layers_with(adapter, site, sorted(layers_of[site]))
    ]


def layers_with(adapter: Any, site: str, layers: Sequence[int]) -> Sequence[int]:
    """Selects the layers that have a site: a model may have dense layers beside layers with
    experts.

    Where no layer has the site, all are returned, so that asking the model for one raises the error
    that says why.
    """
    if site in WHOLE:
        return [0]
    having = (
        [layer for layer in layers if adapter.supports(site, layer)] if site in WITHIN_MLP else []
    )
    return having or layers
