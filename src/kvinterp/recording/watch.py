"""Turns what hooks and the cache show into one stream of named sites, whatever the kind of model.

Most sites are a hook on a module. The cache sites are not: what attention reads comes from the store, and the keys on the
other side of RoPE come from a hook (HookedTransformer, whose cache holds them unrotated) or from the projections of every
position so far (transformers, whose cache holds them rotated).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.adapter import CACHE_SITES, Listener, Site
from kvinterp.policies import Place

__all__ = ["Sink", "Watch"]

Sink = Callable[[str, int, int, Tensor], "Tensor | None"]
"""Called with site, layer, the absolute position of the first key (0 for other sites) and the tensor."""


class Watch:
    """Hears the wanted sites of one path's forwards and hands each to a sink.

    Args:
        adapter: The model.
        wanted: The sites.
        sink: What hears them.
        positions: ``"all"``, or ``"newest"`` where the sink keeps the newest row alone, so that no other is derived.

    Attributes:
        places: The hooks to attach.
        listeners: What those hooks call.
    """

    def __init__(self, adapter: Adapter, wanted: Iterable[Site], sink: Sink, positions: str = "all") -> None:
        self.sink, self._newest = sink, positions == "newest"
        self.listeners: dict[Site, Listener] = {}
        self._reads: dict[int, list[str]] = {}
        self._keys_before_rope: dict[int, list[Tensor]] = {}
        self._rotated_in_cache = adapter.facts.cached_keys_rotated
        for site, layer in sorted(wanted, key=lambda place: place[0] in CACHE_SITES):
            if site in CACHE_SITES:
                self._watch_cache(adapter, site, layer)
            else:
                adapter.tap(site, layer)
                self.listeners[site, layer] = self._tell(site, layer)

    @property
    def places(self) -> list[Site]:
        """The hooks to attach."""
        return list(self.listeners)

    def begin_pass(self) -> None:
        """A forward that starts from position 0 follows: what was gathered over earlier positions is forgotten."""
        self._keys_before_rope.clear()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Hears what attention is about to read from the store."""
        changed = False
        for site in self._reads.get(place.layer, ()):
            place.check_known(site)
            if site == "cache_v":
                new = self.sink(site, place.layer, place.start, values)
                values, changed = (values, changed) if new is None else (new, True)
            elif site == "cache_k_pre" and self._rotated_in_cache:
                pieces = self._keys_before_rope[place.layer]
                gathered = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
                self.sink(site, place.layer, place.start, gathered[:, :, place.start :])
            else:
                new = self.sink(site, place.layer, place.start, keys)
                keys, changed = (keys, changed) if new is None else (new, True)
        return (keys, values) if changed else None

    def _tell(self, site: str, layer: int) -> Listener:
        def listener(tensor: Tensor) -> Tensor | None:
            return self.sink(site, layer, 0, tensor)

        # Read by the adapter: a function takes attributes, and wrapping one keeps them.
        listener.newest_row = self._newest  # type: ignore[attr-defined]
        return listener

    def _watch_cache(self, adapter: Adapter, site: str, layer: int) -> None:
        if not adapter.attention_only:
            raise UnsupportedError(
                f"site {site!r} needs a cache of keys and values in every layer, and {adapter.facts.architecture} keeps "
                "other state in some: record resid_post, attn_out or mlp_out instead."
            )
        hooked_rotation = site == "cache_k" and not self._rotated_in_cache and adapter.supports("cache_k", layer)
        if hooked_rotation:
            self.listeners["cache_k", layer] = self._tell("cache_k", layer)
            return
        self._reads.setdefault(layer, []).append(site)
        if site == "cache_k_pre" and self._rotated_in_cache:
            self._gather_keys(adapter, layer)

    def _gather_keys(self, adapter: Adapter, layer: int) -> None:
        adapter.tap("k", layer)
        tell = self._tell("k", layer) if ("k", layer) in self.listeners else None

        def gather(tensor: Tensor) -> Tensor | None:
            self._keys_before_rope.setdefault(layer, []).append(tensor.transpose(1, 2))
            return tell(tensor) if tell is not None else None

        self.listeners["k", layer] = gather
