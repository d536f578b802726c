"""What looks into a path while it runs, and how hooks and the cache become named sites, whatever the kind of model.

Most sites are a hook on a module. The cache sites are not: what attention reads comes from the store, and the keys on the
other side of RoPE come from a hook (HookedTransformer, whose cache holds them unrotated) or from the projections of every
position so far (transformers, whose cache holds them rotated).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener, Site
from kvinterp.models.caches import Place, gather_rows
from kvinterp.models.sites import CACHE_SITES, LAYOUTS

LOGITS: Site = ("logits", -1)
"""The place under which a hook hears, and may replace, the newest position's logits ``[batch, vocab]``."""


class PathHook:
    """Whatever looks into a path while it runs: a recorder, a comparer, a patch. A subclass writes only what it needs.

    Attributes:
        listeners: What is called with the tensor of each site and layer that it hears; what that returns replaces it.
        writes: Whether it may put something in the place of what it hears.
    """

    listeners: Mapping[Site, Listener] = {}
    writes: ClassVar[bool] = True

    @property
    def places(self) -> list[Site]:
        """The hooks it needs on the model."""
        return [place for place in self.listeners if place != LOGITS]

    @property
    def reads(self) -> bool:
        """Whether it is to be told of what attention reads, where no policy lets go of rows."""
        return type(self).on_read is not PathHook.on_read

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""

    def begin_pass(self) -> None:
        """A forward from position 0 follows."""

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Sees what attention is about to read, and may replace it."""
        return None


class SiteHook(PathHook):
    """Hears the wanted sites of one path's forwards; a subclass says in :meth:`see` what is done with each.

    Args:
        adapter: The model.
        wanted: The sites.
        positions: ``"all"``, or ``"newest"`` where :meth:`see` keeps the newest row alone, so that no other is derived.
        rows: ``"whole"`` where :meth:`see` lines keys up by position: patterns are then shown over all positions, and the cache
            sites not at all where a policy let go of rows; ``"said"`` where it lines the cache sites up by the rows that a
            :class:`Place` names; ``"any"`` where it takes patterns too as they are.

    Raises:
        UnsupportedError: This kind of model cannot give a site.
    """

    writes = False

    def __init__(self, adapter: Adapter, wanted: Iterable[Site], positions: str = "all", rows: str = "whole") -> None:
        self._newest, self._line_up, self._whole = positions == "newest", rows != "any", rows == "whole"
        self.listeners: dict[Site, Listener] = {}
        self._reads: dict[int, list[str]] = {}
        self._keys_before_rope: dict[int, list[Tensor]] = {}
        self._rows: dict[int, Place] = {}
        self._rotated_in_cache, self._device = adapter.facts.cached_keys_rotated, adapter.device
        for site, layer in sorted(wanted, key=lambda place: place[0] in CACHE_SITES):
            if site in CACHE_SITES:
                self._hear_cache(adapter, site, layer)
            else:
                adapter.tap(site, layer)
                self.listeners[site, layer] = self._tell(site, layer)

    @property
    def reads(self) -> bool:
        """Whether it hears a site of the cache."""
        return bool(self._reads) or type(self).on_read is not SiteHook.on_read

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Hears a site.

        Args:
            site: Its name.
            layer: The layer.
            start: The absolute position of the first key of a cache site, 0 for other sites.
            tensor: What the path computed, in its own memory: what is kept is copied now, since some models go on computing in
                it (Falcon adds attention to what its MLP returned, Gemma 4 scales its stream).
        """

    def begin_pass(self) -> None:
        """A forward from position 0 follows: what was gathered over earlier positions is forgotten."""
        self._keys_before_rope.clear()
        self._rows.clear()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Hears what attention is about to read from the store; changes nothing."""
        if self._line_up and place.rows is not None:
            self._rows[place.layer] = place
        for site in self._reads.get(place.layer, ()):
            (place.check_whole if self._whole else place.check_known)(site)
            if site == "cache_k_pre" and self._rotated_in_cache:
                pieces = self._keys_before_rope[place.layer]
                gathered = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
                rows = gathered[:, :, place.start :] if place.rows is None else gather_rows(gathered, place.rows)
            else:
                rows = values if site == "cache_v" else keys
            self._bring(site, place.layer, place.start, rows)

    def _bring(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Has a site seen, of a model that is spread over devices where the tokens are, so that layers can be put together."""
        if tensor.device != self._device:
            layout = LAYOUTS[site]
            needed = tensor.narrow(layout.rows, -1, 1) if self._newest and layout.group != "cache" else tensor
            tensor = needed.to(self._device)
        self.see(site, layer, start, tensor)

    def _tell(self, site: str, layer: int) -> Listener:
        def listener(tensor: Tensor) -> None:
            self._bring(site, layer, 0, self._lined_up(site, layer, tensor) if layer in self._rows else tensor)

        # Read by the adapter: a function takes attributes, and wrapping one keeps them.
        listener.newest_row = self._newest  # type: ignore[attr-defined]
        return listener

    def _lined_up(self, site: str, layer: int, tensor: Tensor) -> Tensor:
        """A pattern whose columns are absolute positions, where a policy let go of rows: nothing is read at those."""
        place = self._rows[layer]
        if not LAYOUTS[site].keys or place.rows is None:
            return tensor
        rows = place.rows.repeat_interleave(tensor.shape[1] // place.rows.shape[1], 1)[:, :, None].expand_as(tensor)
        whole = tensor.new_full((*tensor.shape[:3], place.stop), 0.0 if site == "pattern" else -torch.inf)
        return whole.scatter(3, rows, tensor)

    def _hear_cache(self, adapter: Adapter, site: str, layer: int) -> None:
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

        def gather(tensor: Tensor) -> None:
            # A copy: a model may turn its keys in the memory that it showed.
            self._keys_before_rope.setdefault(layer, []).append(tensor.transpose(1, 2).clone())
            if tell is not None:
                tell(tensor)

        self.listeners["k", layer] = gather
