"""Finds the sites in the module tree of a transformers model, and checks that each tensor is what
its site means.

Architectures share names more than they share meanings: one scales what attention returns before it
is added, another returns it with the residual stream added already, a third fuses its projections
in an order of its own. So when a site inside a block is first asked for, a forward of a few tokens
checks the identities that define the sites; a site that breaks its identity is refused, with the
reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import torch
from einops import repeat
from torch import Tensor, nn

from kvinterp.errors import UnsupportedError
from kvinterp.models.adapter import Adapter, ModelInfo, NotingStore
from kvinterp.models.attaching import HookPoint
from kvinterp.models.hooks import hooks_suspended, tap_hooks
from kvinterp.models.sites import LAYOUTS
from kvinterp.models.taps import Tap, router_tap

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "fc2")
QUERY, KEY, VALUE = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
FUSED = ("qkv_proj", "c_attn")
QUERY_NORM, KEY_NORM = (
    ("q_norm", "q_layernorm", "query_layernorm"),
    ("k_norm", "k_layernorm", "key_layernorm"),
)
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj")
DOWN = ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "fc_out", "w2")
# The norm whose input is the residual stream between attention and MLP, in the order in which the
# names are tried.
BEFORE_MLP = ("pre_feedforward_layernorm", "ln_2", "post_attention_layernorm", "final_layer_norm")

INSIDE = tuple(
    site for site, layout in LAYOUTS.items()
    if layout.group in ("residual", "attention", "mlp") and site not in ("resid_pre", "resid_post", "result")
)  # fmt: skip
"""Sites that a module inside a block shows; ``result`` is computed from z."""
ROUNDING = 2.0**-6
"""The largest rounding of a sum of two or three numbers, in 16 bits or with a cast inside, relative
to their sizes.
"""


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            return child
    return None


class NativeSites:
    """Finds sites by the names of transformers' modules.

    Args:
        blocks: The decoder's blocks.
        facts: The model's facts.
        parallel: Whether the config says that attention and MLP read the same residual stream.
    """

    def __init__(self, blocks: nn.ModuleList, facts: ModelInfo, parallel: bool) -> None:
        self.blocks, self.facts, self.parallel = blocks, facts, parallel

    def find(self, site: str, layer: int) -> Tap:
        """Finds the module of a site by its name alone.

        Raises:
            UnsupportedError: No module has a name of this site.
        """
        if site.startswith("cache_"):
            raise UnsupportedError(
                f"site {site!r} has no module in a transformers model: it is read from the cache."
            )
        block = self.blocks[layer]
        if site in ("resid_pre", "resid_post"):
            return Tap(block, "input" if site == "resid_pre" else "output")
        attention, mlp = _child(block, ATTENTION), _child(block, MLP)
        if site == "router":
            return router_tap(mlp, layer, self.facts.architecture)
        if site == "post":
            down = None if mlp is None else _child(mlp, DOWN)
            if down is None:
                why = f"layer {layer} ({type(block).__name__}) has no MLP with one down projection ({', '.join(DOWN)})"
                raise self.lacks(site, why)
            return Tap(down, "input")
        if attention is None or not self.facts.query_heads:
            raise self.lacks(site, f"layer {layer} ({type(block).__name__}) has no attention")
        if site in ("attn_scores", "pattern"):
            if self.facts.attention not in ("eager", "sdpa"):
                raise UnsupportedError(
                    f"site {site!r} cannot be derived under attention {self.facts.attention!r}, a kernel that torch only "
                    "hands tensors to: load the model with attention='sdpa', beside which it is derived, or with 'eager' "
                    "(attn_implementation=... in transformers), or use kind='hooked' or 'bridge'."
                )
            if self.facts.attention == "eager":
                return Tap(attention, "softmax")
            return Tap(attention, "fused", self.facts.query_heads)
        post_norms = hasattr(block, "post_feedforward_layernorm")
        if site == "attn_out":
            norms = (
                "post_self_attn_layernorm",
                *(("post_attention_layernorm",) if post_norms else ()),
            )
            return Tap(_child(block, norms) or attention)
        if site == "mlp_out":
            after = _child(block, ("post_mlp_layernorm", "post_feedforward_layernorm")) or mlp
            if after is None:
                raise self.lacks(
                    site, f"{type(block).__name__} has no module named {' or '.join(MLP)}"
                )
            return Tap(after)
        if site == "resid_mid":
            norm = _child(block, BEFORE_MLP)
            if self.parallel or norm is None:
                raise self.lacks(
                    "resid_mid",
                    f"{type(block).__name__} has no residual stream between attention and MLP",
                )
            if post_norms and not hasattr(block, "pre_feedforward_layernorm"):
                raise self.lacks(
                    "resid_mid",
                    f"{type(block).__name__} normalises after the MLP only, so no module sees it",
                )
            return Tap(norm, "input")
        if site == "z":
            output = _child(attention, OUTPUT)
            if output is None:
                raise self.lacks(
                    site, f"{type(attention).__name__} has no module named {' or '.join(OUTPUT)}"
                )
            return Tap(output, "input", self.facts.query_heads)
        projected, norm = self.projected(site, attention), self.norm(site, attention)
        return projected if norm is None else Tap(norm, heads=projected.heads)

    def projected(self, site: str, attention: nn.Module) -> Tap:
        """Finds queries, keys or values where they leave the projection."""
        facts = self.facts
        heads = facts.query_heads if site == "q" else facts.kv_heads
        single = _child(attention, {"q": QUERY, "k": KEY, "v": VALUE}[site])
        if single is not None:
            return Tap(single, heads=heads)
        fused = _child(attention, FUSED)
        if fused is None:
            raise self.lacks(site, f"{type(attention).__name__} has no separate projection for it")
        query, rest = facts.query_heads * facts.head_dim, facts.kv_heads * facts.head_dim
        start = {"q": 0, "k": query, "v": query + rest}[site]
        return Tap(fused, heads=heads, span=(start, start + (query if site == "q" else rest)))

    @staticmethod
    def norm(site: str, attention: nn.Module) -> nn.Module | None:
        """Finds the norm on queries or on keys, where an architecture has one."""
        return _child(attention, {"q": QUERY_NORM, "k": KEY_NORM}.get(site, ()))

    def lacks(self, site: str, why: str, not_there: tuple[str, ...] = ()) -> UnsupportedError:
        """The error for a site that is not there, with the sites to record instead."""
        have = [
            s
            for s in ("resid_pre", "resid_post", "attn_out", "mlp_out")
            if s != site and s not in not_there
        ]
        return UnsupportedError(
            f"site {site!r} is not there in {self.facts.architecture}: {why}. Record {', '.join(have)} instead, "
            "or use kind='hooked' or 'bridge' if TransformerLens has this architecture."
        )


# Whether a tensor is what its site means ----------------------------------------------------------


@dataclasses.dataclass
class Checked:
    """The result of the check, by one forward of a few tokens.

    Attributes:
        refused: The reason for each site and layer whose tensor is not what the site means.
        head_major: The norms on queries and keys whose input is
            ``[batch, head, position, head_dim]``.
    """

    refused: dict[HookPoint, str] = dataclasses.field(default_factory=dict)
    head_major: set[HookPoint] = dataclasses.field(default_factory=set)


class _Tensors:
    """The tensors of every site and layer in one forward, and the inputs of the norms on queries
    and keys; on one device.
    """

    def __init__(self, adapter: Adapter, sites: NativeSites) -> None:
        self.facts = adapter.facts
        # Another number than that of the heads, so that the dimensions can be told apart.
        self.count = next(
            n for n in (5, 7, 11) if n not in (self.facts.query_heads, self.facts.kv_heads)
        )
        self.taps: dict[HookPoint, Tap] = {}
        for layer in range(self.facts.layers):
            for site in ("resid_pre", "resid_post", *INSIDE):
                try:
                    self.taps[site, layer] = sites.find(site, layer)
                except UnsupportedError:
                    continue
        self.raw: dict[tuple[str, int], list[Tensor]] = {}
        self.device, noting = adapter.device, NotingStore(adapter)
        tokens = torch.arange(3, 3 + self.count, device=self.device)[None] % self.facts.vocabulary
        # Asked before the hooks are on: it may run the model.
        store = noting if adapter.attention_only else None
        with torch.no_grad(), hooks_suspended(adapter.model), contextlib.ExitStack() as stack:
            for (site, layer), tap in self.taps.items():
                kept: list[tuple[Tap, str, Tap | None]] = [(tap, site, None)]
                attention = _child(sites.blocks[layer], ATTENTION)
                norm = None if attention is None else sites.norm(site, attention)
                if norm is not None and attention is not None and tap.module is norm:
                    projected = sites.projected(site, attention)
                    kept += (
                        (Tap(norm, "input"), f"{site} into its norm", None),
                        (projected, f"{site} projected", projected),
                    )
                for hooked, name, layout in kept:
                    for handle in tap_hooks(
                        hooked, site, functools.partial(self._keep, (name, layer), layout)
                    ):
                        stack.callback(handle.remove)
            adapter.forward(tokens, store)
        self.read = {layer: (keys, values) for layer, keys, values in noting.noted}

    def _keep(self, hook_point: HookPoint, layout: Tap | None, raw: Tensor) -> None:
        """Keeps a copy of a tensor, in the layout of a tap or as it is."""
        tensor = raw if layout is None else layout.get(raw)
        self.raw.setdefault(hook_point, []).append(tensor.detach().to(self.device, copy=True))

    def __getitem__(self, hook_point: HookPoint) -> Tensor | None:
        """A site in the common layout; None where it was not found, or did not appear exactly
        once.
        """
        tensors = self.raw.get(hook_point, [])
        return (
            self.taps[hook_point].get(tensors[0])
            if hook_point in self.taps and len(tensors) == 1
            else None
        )


def check_sites(adapter: Adapter, sites: NativeSites) -> Checked:
    """Runs a few tokens, without the hooks of others, and checks the identities that define the
    sites inside the blocks.
    """
    tensors, checked = _Tensors(adapter, sites), Checked()
    for site, layer in tensors.taps:
        times = len(tensors.raw.get((site, layer), []))
        if site in INSIDE and times != 1:
            where = (
                "no module of this layer shows it"
                if times == 0
                else f"its module runs {times} times in one forward"
            )
            checked.refused[site, layer] = where
        elif LAYOUTS[site].group == "mlp" and tensors.raw[site, layer][0].dim() == 2:
            checked.refused[site, layer] = "its tensor has no dimension for the batch there"
    for layer in range(adapter.facts.layers):
        reasons = {
            **_check_residual(tensors, layer),
            **_check_projections(tensors, layer, checked),
            **_check_patterns(tensors, layer),
        }
        for site, why in reasons.items():
            if (site, layer) in tensors.taps:
                checked.refused.setdefault((site, layer), why)
    return checked


def _check_residual(tensors: _Tensors, layer: int) -> Mapping[str, str]:
    """Checks that attention and MLP return what is added to the residual stream; returns the
    reasons for those that do not.
    """
    before, after = tensors["resid_pre", layer], tensors["resid_post", layer]
    attention, mid, mlp = (tensors[site, layer] for site in ("attn_out", "resid_mid", "mlp_out"))
    why = "what its {} returns is not what is added to the residual stream"
    reasons = {"attn_out": why.format("attention"), "mlp_out": why.format("MLP")}
    if before is None or after is None:
        return dict.fromkeys(
            ("attn_out", "resid_mid", "mlp_out"), "its blocks do not run once in a forward"
        )
    if mid is None:
        return {} if _adds_up(after, before, attention, mlp) else reasons
    rows = {
        site: "its tensor has no dimension for the batch there"
        for site, tensor in (("resid_mid", mid), ("mlp_out", mlp))
        if tensor is not None and tensor.dim() == 2
    }
    mid = mid.reshape(before.shape) if mid.numel() == before.numel() else mid
    if _adds_up(mid, before, attention):
        reasons.pop("attn_out")
    if _adds_up(after, mid, mlp):
        reasons.pop("mlp_out")
    if len(reasons) == 2 and (mid.shape != before.shape or torch.equal(mid, before)):
        reasons["resid_mid"] = "no module sees the residual stream between attention and MLP"
    return reasons | rows


def _adds_up(total: Tensor, *parts: Tensor | None) -> bool:
    addends = [part for part in parts if part is not None]
    if len(addends) < len(parts) or any(part.shape != total.shape for part in addends):
        return False
    sizes = sum(part.abs().double() for part in (total, *addends))
    difference = (total.double() - sum(part.double() for part in addends)).abs()
    # Where a model overflows nothing can be said, and NaN compares as false.
    return not bool((difference > ROUNDING * sizes).any())


def _check_projections(tensors: _Tensors, layer: int, checked: Checked) -> Mapping[str, str]:
    """Checks queries, keys, values and z against what attention reads; notes head-major norms;
    returns the reasons against.
    """
    facts = tensors.facts
    reasons = {}
    q, k, v, z = (tensors[site, layer] for site in ("q", "k", "v", "z"))
    for site, tensor in (("q", q), ("k", k)):
        if tensor is None or (f"{site} projected", layer) not in tensors.raw:
            continue
        (entering,), (projected,) = (
            tensors.raw[f"{site} into its norm", layer],
            tensors.raw[f"{site} projected", layer],
        )
        rows = projected.reshape(tensors.count, -1)
        if entering.dim() == 4 and _same_rows(entering.transpose(1, 2), rows):
            checked.head_major.add((site, layer))
        elif not _same_rows(entering, rows):
            reasons[site] = (
                "it is changed between its projection and its norm, so that none is seen as it is before RoPE"
            )
    q, k = (
        tensor.transpose(1, 2)
        if tensor is not None and (site, layer) in checked.head_major
        else tensor
        for site, tensor in (("q", q), ("k", k))
    )
    keys, values = tensors.read.get(layer, (None, None))
    if v is not None and values is not None and not _alike(v.transpose(1, 2), values):
        reasons["v"] = (
            "the values that attention reads are not those that its projection gives in this place"
        )
    # RoPE rotates position 0 by nothing, so there a key points the same way before and after it.
    if (
        k is not None
        and keys is not None
        and not (k.transpose(1, 2).shape == keys.shape and _same_way(k[0, 0], keys[0, :, 0]))
    ):
        reasons["k"] = "the keys that attention reads are not those found before RoPE"
    fused = ("q", layer) in tensors.taps and tensors.taps["q", layer].span is not None
    width = facts.head_dim if k is None else k.shape[-1]
    if q is not None and q.shape[1:] != (tensors.count, facts.query_heads, width):
        reasons["q"] = f"its projection gives {q.shape[-1]} numbers a head where keys have {width}"
    if fused and reasons:
        reasons |= dict.fromkeys(("q", "k", "v"), "its fused projection has an order of its own")
    # The first position attends to itself alone, so there every head gives its value, or less of it
    # beside a sink.
    first = (
        values[0, :, 0] if values is not None else None if v is None or "v" in reasons else v[0, 0]
    )
    if z is not None and first is not None and facts.query_heads % first.shape[0] == 0:
        repeated = repeat(
            first, "kv_head dim -> (kv_head group) dim", group=facts.query_heads // first.shape[0]
        )
        if repeated.shape != z[0, 0].shape or not _same_way(z[0, 0], repeated):
            reasons["z"] = (
                "what enters its output projection is not what the heads read, but gated or normalised"
            )
    return reasons


def _same_rows(tensor: Tensor, rows: Tensor) -> bool:
    return _alike(tensor.reshape(tensor.shape[0] * tensor.shape[1], -1), rows)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and not bool(
        ((a - b).abs().double() > ROUNDING * (a.abs() + b.abs()).double()).any()
    )


def _same_way(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    dot = (a * b).sum(-1)
    return not bool((dot < 0.98 * (a.norm(dim=-1) * b.norm(dim=-1))).any())


def _check_patterns(tensors: _Tensors, layer: int) -> Mapping[str, str]:
    """Checks the shapes of scores and patterns; returns the reasons for those that are others."""
    expected = (1, tensors.facts.query_heads, tensors.count, tensors.count)
    reasons = {}
    for site in ("attn_scores", "pattern"):
        tensor = tensors[site, layer]
        if tensor is not None and tuple(tensor.shape) != expected:
            extra = tensor.dim() == 4 and tensor.shape[-1] == tensors.count + 1
            what = "scores are" if tensors.taps[site, layer].side == "fused" else "softmax is over"
            why = (
                f"its {what} a tensor of shape {tuple(tensor.shape)} where {expected} was expected"
            )
            reasons[site] = (
                "its softmax has a column for an attention sink besides the keys" if extra else why
            )
    return reasons
