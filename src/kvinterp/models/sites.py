"""The table of sites: the meaning, the group, the axes and TransformerLens's hook of each.

The check of names, recording, joining and comparing follow from a site's row, and so does the hook
of a bridge or a HookedTransformer; where a model of transformers has the tensor does not
(:mod:`kvinterp.models.native_sites`), and :mod:`kvinterp.common.words` lists the names for editors.
Axes are the same for every kind of model, after the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from kvinterp.common.checks import check_known, given_list


@dataclasses.dataclass(frozen=True)
class Layout:
    """The meaning of a site, and the layout of its tensor.

    Attributes:
        meaning: The meaning of the site.
        group: ``"embedding"``, ``"residual"``, ``"attention"``, ``"mlp"`` or ``"cache"``.
        axes: The axes after the batch's, separated by commas.
        hook: TransformerLens's hook in a block, or in the whole model for the embedding; empty
            where no hook leads to the site.
    """

    meaning: str
    group: str
    axes: str
    hook: str = ""

    @functools.cached_property
    def _axes(self) -> list[str]:
        return ["batch", *self.axes.split(", ")]

    @functools.cached_property
    def row_axis(self) -> int:
        """The axis of positions; for scores and patterns, of the positions of queries."""
        return next(
            at for at, axis in enumerate(self._axes) if axis in ("position", "query", "row")
        )

    @functools.cached_property
    def heads(self) -> int:
        """The axis of heads; 0, the batch's, where there are none."""
        return next((at for at, axis in enumerate(self._axes) if axis.endswith("_head")), 0)

    @functools.cached_property
    def head_kind(self) -> str:
        """``"query"`` or ``"KV"``, or empty."""
        return {"query_head": "query", "kv_head": "KV"}.get(self._axes[self.heads], "")

    @functools.cached_property
    def keys(self) -> int:
        """The axis of the keys that are attended to; 0 where there is none."""
        return self._axes.index("key") if "key" in self._axes else 0

    @functools.cached_property
    def dimensions(self) -> int:
        """The number of axes, the batch's among them."""
        return len(self._axes)

    @property
    def gathers(self) -> bool:
        """Whether the rows of several forwards can be concatenated.

        The rows of a pattern get longer from step to step, and a cache has all its rows at every
        step.
        """
        return self.row_axis == 1


_STREAM = "position, width"
_QUERIES, _KEYS = "position, query_head, head_dim", "position, kv_head, head_dim"
_ATTENDED, _CACHED = "query_head, query, key", "kv_head, position, head_dim"

LAYOUTS: dict[str, Layout] = {
    "embed": Layout("what the token embedding gives, before positions are added (the whole model's, at layer 0)", "embedding",
                    _STREAM, "hook_embed"),
    "resid_pre": Layout("residual stream entering the block", "residual", _STREAM, "hook_resid_pre"),
    "resid_mid": Layout("residual stream between attention and MLP", "residual", _STREAM, "hook_resid_mid"),
    "resid_post": Layout("residual stream leaving the block", "residual", _STREAM, "hook_resid_post"),
    "attn_out": Layout("what attention adds to the residual stream", "residual", _STREAM, "hook_attn_out"),
    "mlp_out": Layout("what the MLP adds to the residual stream", "residual", _STREAM, "hook_mlp_out"),
    "q": Layout("queries before RoPE, after the norm on queries if there is one", "attention", _QUERIES, "attn.hook_q"),
    "k": Layout("keys of the new positions before RoPE, after the norm on keys if there is one", "attention", _KEYS,
                "attn.hook_k"),
    "v": Layout("values as projected for the new positions", "attention", _KEYS, "attn.hook_v"),
    "z": Layout("attention's output per head, before the output projection", "attention", _QUERIES, "attn.hook_z"),
    "result": Layout("what each head adds to attention's output: z times its part of W_O", "attention",
                     "position, query_head, width", "attn.hook_result"),
    "post": Layout("neurons of the MLP, behind activation and gate: what its down projection reads", "mlp",
                   "position, neuron", "mlp.hook_post"),
    "attn_scores": Layout("attention scores, masked, before the softmax", "attention", _ATTENDED, "attn.hook_attn_scores"),
    "pattern": Layout("attention probabilities after the softmax", "attention", _ATTENDED, "attn.hook_pattern"),
    "cache_k": Layout("keys of every position as attention reads them, after RoPE", "cache", _CACHED),
    "cache_k_pre": Layout("keys of every position before RoPE", "cache", _CACHED),
    "cache_v": Layout("values of every position as attention reads them", "cache", _CACHED),
    "router": Layout("logits of the router, one per expert (mixtures of experts)", "mlp", "position, expert"),
}  # fmt: skip
SITES: dict[str, str] = {site: layout.meaning for site, layout in LAYOUTS.items()}
CACHE_POSITIONS = "cache_positions"
"""Not a site for users: it is recorded beside others where a policy may remove rows,
``[batch, kv_head, row]``.
"""
LAYOUTS[CACHE_POSITIONS] = Layout(
    "absolute positions of the rows in the cache", "rows", "kv_head, row"
)
RESIDUAL_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "residual")
VECTOR_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.gathers)
"""Sites that have one vector, or one a head, at each position."""
CACHE_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "cache")
WITHIN_MLP = tuple(site for site, layout in LAYOUTS.items() if layout.group == "mlp")
"""Sites inside an MLP, which some layers of a model may lack: those are left out where the others
have it. Of any other site a lack is refused.
"""
MLP_SITES = ("mlp_out", *WITHIN_MLP)
"""All sites of the MLP, which come after ``resid_mid``."""
ATTENDED_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.keys)
GROUPS = {
    "kv": ("cache_k", "cache_v"),
    "resid": ("resid_pre", "resid_mid", "resid_post"),
}
"""Names for several sites."""


def layout_of(site: str) -> Layout:
    """The layout of a site, or the one that the sites of a group share."""
    return LAYOUTS[GROUPS.get(site, (site,))[0]]


def listed_names(names: str | Sequence[str]) -> list[str]:
    """Splits a text at its commas, or takes a list; raises InputError for anything else."""
    if isinstance(names, str):
        return [part.strip() for part in names.split(",") if part.strip()]
    return given_list("sites", names, "names such as 'resid_post,kv', or a list of them")


def expand_sites(sites: str | Sequence[str]) -> tuple[str, ...]:
    """Expands groups (``kv``, ``resid``) and checks names, in the given order.

    Args:
        sites: Names, or one comma-separated text such as ``"resid_post,pattern,kv"``.

    Raises:
        InputError: A name is not a site; the message offers the near names.
    """
    expanded: list[str] = []
    for name in listed_names(sites):
        check_known("site", name, [*SITES, *GROUPS])
        expanded += [site for site in GROUPS.get(name, (name,)) if site not in expanded]
    return tuple(expanded)
