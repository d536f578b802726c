"""Others' names: TransformerLens's hooks (``blocks.1.attn.hook_pattern``) and modules of transformers (``model.layers.3.mlp``).

Each says site and layer, wherever a site is taken. Modules are known by the names that transformers gives them; that one is what
the site means is checked where the model is at hand.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvinterp.errors import InputError, shown, unexpected, unknown
from kvinterp.models.attaching import Site
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.native_sites import ATTENTION, DOWN, KEY, MLP, OUTPUT, QUERY, VALUE
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
_POST_ATTENTION = {"ln1_post", "post_self_attn_layernorm"}
_POST_MLP = {"ln2_post", "post_feedforward_layernorm", "post_mlp_layernorm"}
_QK_NORMS = {"q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"}
"""Norms behind which a site is, and not where the module's name says."""
_NAME = re.compile(r"(?:blocks\.(\d{1,6})\.)?([\w.]*hook_\w+)")
_MODULE = re.compile(r"((?:\w+\.)*(?:layers|h)\.(\d{1,6})((?:\.\w+)*?))(?:\.(input|output))?(?:\.0)?")
"""A block of transformers or a module in it, and nnsight's ``.input`` or ``.output`` behind it."""
Names = str | Sequence[str] | Callable[[str], bool]
"""Names of sites, groups, hooks and modules; or TransformerLens's ``names_filter``, a function of a hook's name."""


def hook_of(name: object) -> tuple[str, int | None] | None:
    """The site and the layer of a hook's name; the layer None where it names none; None for what is no hook's name.

    Args:
        name: Such as ``blocks.1.attn.hook_pattern``, or ``hook_resid_post``, of every layer; or a module's such as
            ``model.layers.3.mlp`` or nnsight's ``transformer.h.0.mlp.output``.

    Raises:
        InputError: It is a hook's or a module's name, and no site is there.
    """
    module = module_of(name)
    if module is not None:
        return module[1:]
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


def module_of(name: object) -> tuple[str, str, int] | None:
    """The module's own path, the site and the layer of a name such as ``model.layers.3.mlp``; None for what is none.

    Raises:
        InputError: It is a module in a block, and no site is there.
    """
    found = _MODULE.fullmatch(re.sub(r"\[(\d+)\]", r".\1", name.strip())) if isinstance(name, str) else None
    if found is None:
        return None
    path, layer, inside, side = found.groups()
    side = side or "output"
    parent, _, last = inside.strip(".").rpartition(".")
    site = None
    if not inside:
        site = {"input": "resid_pre", "output": "resid_post"}[side]
    elif not parent and side == "output":
        site = "attn_out" if last in ATTENTION else "mlp_out" if last in MLP else None
    elif parent in ATTENTION:
        of = {"output": {**dict.fromkeys(QUERY, "q"), **dict.fromkeys(KEY, "k"), **dict.fromkeys(VALUE, "v")}}
        site = of.get(side, dict.fromkeys(OUTPUT, "z")).get(last)
    elif parent in MLP and side == "input":
        site = "post" if last in DOWN else None
    if site is None:
        known = (*ATTENTION, *MLP, *(f"{of}.{part}" for of in ATTENTION for part in (*QUERY, *KEY, *VALUE)))
        near = difflib.get_close_matches(inside.strip("."), known, 1)
        guess = f"did you mean {path.removesuffix(inside)}.{near[0]}? " if near and near[0] != inside.strip(".") else ""
        raise InputError(
            f"no site is at the {side} of module {shown(name)}: {guess}expected a block, its attention or MLP, attention's "
            "q_proj, k_proj, v_proj or o_proj.input, or mlp.down_proj.input, as in model.layers.3.mlp; see `kvinterp list sites`."
        )
    return path, site, int(layer)


def check_module(adapter: Any, name: object) -> None:
    """Raises InputError where a module's name is that of no module, or what the module shows is not what the site means."""
    found = module_of(name)
    if found is None:
        return
    path, site, layer = found
    chosen_layers(adapter, [layer])
    # A hooked model has no modules of these names; what stands behind them in a block of its own says the same.
    inside = {part.rpartition(".")[2] for part, _ in adapter.blocks[layer].named_modules()}
    behind = {"attn_out": _POST_ATTENTION, "mlp_out": _POST_MLP, "q": _QK_NORMS, "k": _QK_NORMS}.get(site, set()) & inside
    if "post_feedforward_layernorm" in inside and site == "attn_out":
        behind = behind | {"post_attention_layernorm"}
    if adapter.kind == "native":
        modules = dict(adapter.model.named_modules())
        # A user's variable may be called model, and a wrapper's child too.
        paths = [path, *(path.split(".", cut)[cut] for cut in range(1, path.count(".")))]
        own = next((modules[each] for each in paths if each in modules), None)
        if own is None:
            raise InputError(
                f"module {shown(name)} is not there in {adapter.facts.architecture}: name one of named_modules()."
            )
        if not behind and adapter.tap(site, layer).module is not own:
            behind = {"another module"}
    if behind:
        raise InputError(
            f"module {shown(name)} is not what {site!r} means in {adapter.facts.architecture}, which is behind "
            f"{' and '.join(sorted(behind))}: give site {site!r} with layers=({layer},)."
        )


def names_of(adapter: Adapter, names: Names) -> list[str]:
    """The names that were given, or those of the hooks that a ``names_filter`` takes; modules checked.

    Raises:
        InputError: The function takes no hook at which a site is, or a module is not what its site means.
    """
    if not callable(names):
        given = listed_names(names)
        for name in given:
            check_module(adapter, name)
        return given
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
        check_module(adapter, name)
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
        names: Names of sites, groups, hooks and modules, or a ``names_filter``.
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
