"""The table of sites: what each is, which axis of its tensor counts what, and which group it belongs to.

Layouts are the same for every kind of model:

==================================================  =============================================
sites                                               shape
==================================================  =============================================
resid_pre, resid_mid, resid_post, attn_out, mlp_out  ``[batch, position, width]``
embed                                               ``[batch, position, width]``, of the whole model, at layer 0
q, z                                                ``[batch, position, query_head, head_dim]``
k, v                                                ``[batch, position, kv_head, head_dim]``
result                                              ``[batch, position, query_head, width]``
post                                                ``[batch, position, neuron]``
attn_scores, pattern                                ``[batch, query_head, query, key]``
cache_k, cache_k_pre, cache_v                       ``[batch, kv_head, position, head_dim]``
router                                              ``[batch, position, expert]``
experts                                             ``[batch, position, chosen]``, whole numbers
==================================================  =============================================
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from kvinterp.models.inputs import check_known, given_list


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tensor of a site is laid out, batch first.

    Attributes:
        meaning: What the site is.
        group: ``"embedding"``, ``"residual"``, ``"attention"``, ``"mlp"``, ``"cache"`` or ``"routing"``.
        rows: The axis that numbers positions; of scores and patterns those of the queries.
        heads: The axis that numbers heads; 0, the batch's, where there are none.
        head_kind: ``"query"`` or ``"KV"``, or empty.
        keys: The axis that numbers the keys that are attended to; 0 where there is none.
    """

    meaning: str
    group: str
    rows: int = 1
    heads: int = 0
    head_kind: str = ""
    keys: int = 0

    @property
    def dimensions(self) -> int:
        """How many axes there are, the batch's among them; heads have a width, the positions of rows have none."""
        return 4 if self.heads and self.group != "rows" else 3

    @property
    def gathers(self) -> bool:
        """Whether the rows of several forwards can be put behind one another.

        Those of a pattern have more keys from step to step, and a cache shows all its rows every time.
        """
        return self.rows == 1


_residual = functools.partial(Layout, group="residual")
_projected = functools.partial(Layout, group="attention", heads=2)
_attended = functools.partial(Layout, group="attention", rows=2, heads=1, head_kind="query", keys=3)
_cached = functools.partial(Layout, group="cache", rows=2, heads=1, head_kind="KV")
_routed = functools.partial(Layout, group="routing")

LAYOUTS: dict[str, Layout] = {
    "embed": Layout(
        "what the token embedding gives, before positions are added (the whole model's, at layer 0)", "embedding"
    ),
    "resid_pre": _residual("residual stream entering the block"),
    "resid_mid": _residual("residual stream between attention and MLP"),
    "resid_post": _residual("residual stream leaving the block"),
    "attn_out": _residual("what attention adds to the residual stream"),
    "mlp_out": _residual("what the MLP adds to the residual stream"),
    "q": _projected("queries before RoPE, after the norm on queries if there is one", head_kind="query"),
    "k": _projected("keys of the new positions before RoPE, after the norm on keys if there is one", head_kind="KV"),
    "v": _projected("values as projected for the new positions", head_kind="KV"),
    "z": _projected("attention's output per head, before the output projection", head_kind="query"),
    "result": _projected("what each head adds to attention's output: z times its part of W_O", head_kind="query"),
    "post": Layout("neurons of the MLP, behind activation and gate: what its down projection reads", "mlp"),
    "attn_scores": _attended("attention scores, masked, before the softmax"),
    "pattern": _attended("attention probabilities after the softmax"),
    "cache_k": _cached("keys of every position as attention reads them, after RoPE"),
    "cache_k_pre": _cached("keys of every position before RoPE"),
    "cache_v": _cached("values of every position as attention reads them"),
    "router": _routed("logits of the router, one per expert (mixtures of experts)"),
    "experts": _routed("the experts that the router chose, by number (mixtures of experts)"),
}
SITES: dict[str, str] = {site: layout.meaning for site, layout in LAYOUTS.items()}
ROWS = "cache_positions"
"""No site to ask for: it is recorded beside others where a policy may let go of rows, ``[batch, kv_head, row]``."""
LAYOUTS[ROWS] = Layout("absolute positions of the rows in the cache", "rows", rows=2, heads=1, head_kind="KV")
RESIDUAL_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "residual")
CACHE_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "cache")
ROUTING_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "routing")
ATTENDED_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.keys)
GROUPS = {"kv": ("cache_k", "cache_v"), "resid": ("resid_pre", "resid_mid", "resid_post"), "routing": ROUTING_SITES}
"""Names for several sites."""


def layout_of(site: str) -> Layout:
    """The layout of a site, or that which the sites of a group share."""
    return LAYOUTS[GROUPS.get(site, (site,))[0]]


def listed_names(names: str | Sequence[str]) -> list[str]:
    """The names of one text with commas, or of a list; InputError where they are neither."""
    if isinstance(names, str):
        return [part.strip() for part in names.split(",") if part.strip()]
    return given_list("sites", names, "names such as 'resid_post,kv', or a list of them")


def expand_sites(sites: str | Sequence[str]) -> tuple[str, ...]:
    """Expands groups (``kv``, ``resid``) and checks names, keeping the order given.

    Args:
        sites: Names, or one comma-separated text such as ``"resid_post,pattern,kv"``.

    Raises:
        InputError: A name is not a site; the near names are offered.
    """
    expanded: list[str] = []
    for name in listed_names(sites):
        check_known("site", name, [*SITES, *GROUPS])
        expanded += [site for site in GROUPS.get(name, (name,)) if site not in expanded]
    return tuple(expanded)
