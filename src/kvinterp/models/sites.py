"""The table of sites: what each is, which group it belongs to, its axes, and what TransformerLens calls it.

Whatever else is known of a site is read from its row. Axes are the same for every kind of model, the batch in front of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from kvinterp.common.checks import check_known, given_list


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a site is, and how its tensor is laid out.

    Attributes:
        meaning: What the site is.
        group: ``"embedding"``, ``"residual"``, ``"attention"``, ``"mlp"``, ``"cache"`` or ``"routing"``.
        axes: What each axis behind the batch's numbers, with commas.
        hook: TransformerLens's hook in a block, or in the whole model for the embedding; empty where it has none by which the
            site is found.
    """

    meaning: str
    group: str
    axes: str
    hook: str = ""

    @functools.cached_property
    def _axes(self) -> list[str]:
        return ["batch", *self.axes.split(", ")]

    @functools.cached_property
    def rows(self) -> int:
        """The axis that numbers positions; of scores and patterns those of the queries."""
        return next(at for at, axis in enumerate(self._axes) if axis in ("position", "query", "row"))

    @functools.cached_property
    def heads(self) -> int:
        """The axis that numbers heads; 0, the batch's, where there are none."""
        return next((at for at, axis in enumerate(self._axes) if axis.endswith("_head")), 0)

    @functools.cached_property
    def head_kind(self) -> str:
        """``"query"`` or ``"KV"``, or empty."""
        return {"query_head": "query", "kv_head": "KV"}.get(self._axes[self.heads], "")

    @functools.cached_property
    def keys(self) -> int:
        """The axis that numbers the keys that are attended to; 0 where there is none."""
        return self._axes.index("key") if "key" in self._axes else 0

    @functools.cached_property
    def dimensions(self) -> int:
        """How many axes there are, the batch's among them."""
        return len(self._axes)

    @property
    def gathers(self) -> bool:
        """Whether the rows of several forwards can be put behind one another.

        Those of a pattern have more keys from step to step, and a cache shows all its rows every time.
        """
        return self.rows == 1


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
    "router": Layout("logits of the router, one per expert (mixtures of experts)", "routing", "position, expert"),
    "experts": Layout("the experts that the router chose, by number (mixtures of experts)", "routing", "position, chosen"),
}  # fmt: skip
SITES: dict[str, str] = {site: layout.meaning for site, layout in LAYOUTS.items()}
ROWS = "cache_positions"
"""No site to ask for: it is recorded beside others where a policy may let go of rows, ``[batch, kv_head, row]``."""
LAYOUTS[ROWS] = Layout("absolute positions of the rows in the cache", "rows", "kv_head, row")
RESIDUAL_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "residual")
CACHE_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "cache")
ROUTING_SITES = tuple(site for site, layout in LAYOUTS.items() if layout.group == "routing")
WITHIN_MLP = tuple(site for site, layout in LAYOUTS.items() if layout.group in ("mlp", "routing"))
"""What is within an MLP: a layer may have none of it, where another has."""
MLP_SITES = ("mlp_out", *WITHIN_MLP)
"""What is of the MLP, and so behind ``resid_mid``."""
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
