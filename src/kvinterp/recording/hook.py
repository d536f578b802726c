"""Hooks that look into a path while it runs, and the mapping of module hooks and caches to named
sites for every kind of model.

Most sites are a hook on a module. The cache sites are not: what attention reads comes from the
store. The keys on the other side of RoPE come from a hook (HookedTransformer, whose cache holds
unrotated keys) or from the projections of every position so far (transformers, whose cache holds
rotated keys).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from einops import repeat
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint, Listener
from kvinterp.models.caches import CacheRows, gather_rows
from kvinterp.models.sites import CACHE_SITES, LAYOUTS

LOGITS: HookPoint = ("logits", -1)
"""The hook point of the newest position's logits ``[batch, vocab]``, which a hook may replace."""


class PathHook:
    """Base of everything that looks into a path while it runs: recorders, comparisons, patches.
    Every method does nothing.

    Attributes:
        listeners: For each site and layer the function that is called with its tensor; a tensor it
            returns replaces that one.
    """

    listeners: Mapping[HookPoint, Listener] = {}

    @property
    def hook_points(self) -> list[HookPoint]:
        """The sites and layers that need a hook on the model."""
        return [hook_point for hook_point in self.listeners if hook_point != LOGITS]

    @property
    def reads(self) -> bool:
        """Whether :meth:`on_read` must be called even if no policy evicts rows."""
        return type(self).on_read is not PathHook.on_read

    def begin_step(self, step: int) -> None:
        """Called before the forwards of a step."""

    def begin_pass(self) -> None:
        """Called before a forward from position 0."""

    def on_read(
        self, cache_rows: CacheRows, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Called with the keys and values that attention is about to read; what it returns replaces
        them.
        """
        return None


class SiteHook(PathHook):
    """Calls :meth:`see`, which a subclass defines, with the tensors of some sites of one path's
    forwards.

    Args:
        adapter: The model.
        hook_points: The sites and layers.
        positions: ``"all"``, or ``"newest"`` if :meth:`see` uses the newest row alone, so that no
            other is derived.
        evicted: What is done where a policy has evicted rows. ``"refuse"``: patterns are spread
            over all positions, and a cache site is an error; ``"spread"``: patterns too, and
            :meth:`see` aligns the cache sites by the rows that the :class:`CacheRows` name;
            ``"as read"``: patterns and cache sites come with the rows that are left.

    Raises:
        UnsupportedError: This kind of model cannot give a site.
    """

    def __init__(
        self,
        adapter: Adapter,
        hook_points: Iterable[HookPoint],
        positions: str = "all",
        evicted: str = "refuse",
    ) -> None:
        self._newest, self._align, self._whole = (
            positions == "newest",
            evicted != "as read",
            evicted == "refuse",
        )
        self.listeners: dict[HookPoint, Listener] = {}
        self._reads: dict[int, list[str]] = {}
        self._keys_before_rope: dict[int, list[Tensor]] = {}
        self._cache_rows: dict[int, CacheRows] = {}
        self._rotated_in_cache, self._device = adapter.facts.cached_keys_rotated, adapter.device
        for site, layer in sorted(hook_points, key=lambda hook_point: hook_point[0] in CACHE_SITES):
            if site in CACHE_SITES:
                self._listen_to_cache(adapter, site, layer)
            else:
                adapter.tap(site, layer)
                self.listeners[site, layer] = self._listener(site, layer)

    @property
    def reads(self) -> bool:
        """Whether it shows a site of the cache."""
        return bool(self._reads) or type(self).on_read is not SiteHook.on_read

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Called with the tensor of a site; does nothing unless a subclass defines it.

        Args:
            site: Its name.
            layer: The layer.
            start: The absolute position of the first key of a cache site, 0 for other sites.
            tensor: The path's own tensor, not a copy. Copy what you keep: some models go on
                computing in it (Falcon adds attention to the MLP's output, Gemma 4 scales its
                stream).
        """

    def rows_left(self, cache_rows: CacheRows, positions: Tensor) -> None:
        """Called with the positions of a layer's rows where a policy may have let go of some,
        before its cache sites.
        """

    def begin_pass(self) -> None:
        """Forgets the keys and rows of earlier positions, because a forward from position 0
        follows.
        """
        self._keys_before_rope.clear()
        self._cache_rows.clear()

    def on_read(self, cache_rows: CacheRows, keys: Tensor, values: Tensor) -> None:
        """Shows the cache sites that attention is about to read from the store; changes nothing."""
        if cache_rows.positions_left is not None:
            self.rows_left(cache_rows, cache_rows.positions_left)
            if self._align:
                self._cache_rows[cache_rows.layer] = cache_rows
        for site in self._reads.get(cache_rows.layer, ()):
            (cache_rows.check_whole if self._whole else cache_rows.check_known)(site)
            if site == "cache_k_pre" and self._rotated_in_cache:
                pieces = self._keys_before_rope[cache_rows.layer]
                gathered = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
                rows = (
                    gathered[:, :, cache_rows.start :]
                    if cache_rows.positions_left is None
                    else gather_rows(gathered, cache_rows.positions_left)
                )
            else:
                rows = values if site == "cache_v" else keys
            self._show(site, cache_rows.layer, cache_rows.start, rows)

    def _show(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Passes a tensor to :meth:`see`. On a model spread over several devices it is copied to
        the device of the tokens.
        """
        if tensor.device != self._device:
            layout = LAYOUTS[site]
            needed = (
                tensor.narrow(layout.row_axis, -1, 1)
                if self._newest and layout.group != "cache"
                else tensor
            )
            tensor = needed.to(self._device)
        self.see(site, layer, start, tensor)

    def _listener(self, site: str, layer: int) -> Listener:
        def listener(tensor: Tensor) -> None:
            self._show(
                site,
                layer,
                0,
                self._aligned(site, layer, tensor) if layer in self._cache_rows else tensor,
            )

        # models/attaching.py then derives the pattern of the newest query's row alone.
        listener.newest_row = self._newest  # type: ignore[attr-defined]
        return listener

    def _aligned(self, site: str, layer: int, tensor: Tensor) -> Tensor:
        """Spreads a pattern over absolute positions if a policy evicted rows: those positions get
        no attention.
        """
        cache_rows = self._cache_rows[layer]
        if not LAYOUTS[site].keys or cache_rows.positions_left is None:
            return tensor
        group = tensor.shape[1] // cache_rows.positions_left.shape[1]
        rows = repeat(
            cache_rows.positions_left,
            "batch kv_head key -> batch (kv_head group) query key",
            group=group,
            query=tensor.shape[2],
        )
        whole = tensor.new_full(
            (*tensor.shape[:3], cache_rows.stop), 0.0 if site == "pattern" else -torch.inf
        )
        return whole.scatter(3, rows, tensor)

    def _listen_to_cache(self, adapter: Adapter, site: str, layer: int) -> None:
        if not adapter.attention_only:
            raise UnsupportedError(
                f"site {site!r} needs a cache of keys and values in every layer, and {adapter.facts.architecture} keeps "
                "other state in some: record resid_post, attn_out or mlp_out instead."
            )
        # This cache holds unrotated keys: those that attention reads come from a hook at cache_k.
        if site == "cache_k" and not self._rotated_in_cache and adapter.supports("cache_k", layer):
            self.listeners["cache_k", layer] = self._listener("cache_k", layer)
            return
        self._reads.setdefault(layer, []).append(site)
        if site == "cache_k_pre" and self._rotated_in_cache:
            self._gather_keys(adapter, layer)

    def _gather_keys(self, adapter: Adapter, layer: int) -> None:
        adapter.tap("k", layer)
        show = self._listener("k", layer) if ("k", layer) in self.listeners else None

        def gather(tensor: Tensor) -> None:
            # A copy: a model may turn its keys in the memory that it showed.
            self._keys_before_rope.setdefault(layer, []).append(tensor.transpose(1, 2).clone())
            if show is not None:
                show(tensor)

        self.listeners["k", layer] = gather
