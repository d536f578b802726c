"""The recorder: keeps the tensors of chosen sites, layers, heads, steps and positions, and nothing
else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvinterp.common.checks import check_instance, check_whole, whole_number
from kvinterp.errors import InputError, UnsupportedError, shown, unexpected
from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint
from kvinterp.models.caches import CacheRows
from kvinterp.models.hook_names import Names, hook_point_of, hook_points_of, sites_of
from kvinterp.models.inputs import chosen_heads, chosen_layers, chosen_steps
from kvinterp.models.sites import ATTENDED_SITES, CACHE_POSITIONS, CACHE_SITES, LAYOUTS
from kvinterp.recording.activation_cache import cache_of
from kvinterp.recording.hook import SiteHook
from kvinterp.recording.trace import stacked

WITH_ROWS = (*CACHE_SITES, *ATTENDED_SITES)
"""The sites for which the positions of the rows are recorded too where a policy may evict some."""


class Recorder(SiteHook):
    """Records sites of one path, step by step.

    Used by ``run`` and ``compare``, and by :func:`kvinterp.record` around a user's own forwards.

    Args:
        adapter: The model.
        sites: Names of sites, groups, or TransformerLens's hooks (``blocks.1.attn.hook_pattern``),
            as a list or comma-separated.
        layers: Layers to keep (default: all).
        heads: Query heads to keep of q, z, result, attn_scores and pattern (default: all).
        kv_heads: KV heads to keep of k, v and the cache sites (default: all).
        steps: Decode steps to keep (default: all). Step 0 is the prefill.
        positions: ``"newest"``, or -1 (the last query position; for cache sites the last key), or
            ``"all"``.

    Attributes:
        heads: The query heads that are kept; None for all.
        kv_heads: The KV heads that are kept; None for all.
        derived: The sites that are computed beside a kernel that does not show them (SDPA).

    Raises:
        InputError: A site, layer, head or choice of positions does not exist.
        UnsupportedError: This kind of model cannot give a site.
    """

    def __init__(
        self,
        adapter: Adapter,
        sites: Names,
        layers: Iterable[int] | int | None = None,
        heads: Iterable[int] | None = None,
        kv_heads: Iterable[int] | None = None,
        steps: Iterable[int] | None = None,
        positions: Any = "newest",
    ) -> None:
        check_instance(
            "adapter", adapter, Adapter, "a model that kv.wrap() or kv.load_model() made"
        )
        if whole_number(positions) == -1:
            positions = "newest"
        if positions not in ("newest", "all"):
            raise unexpected(
                "positions",
                positions,
                "'newest' or 'all', of which you then take the positions you want",
            )
        if positions == "all" and adapter.loops:
            raise UnsupportedError(
                f"positions='all' was given, and blocks of {adapter.facts.name} run several times in a forward, so that a site "
                "has several tensors: leave it out to record the newest position of the last run."
            )
        self.adapter, self.positions = adapter, positions
        self.sites, hook_points = hook_points_of(adapter, sites, layers)
        self.derived = tuple(filter(adapter.derives, self.sites))
        self.layers = (
            tuple(sorted({layer for _, layer in hook_points}))
            if hook_points
            else chosen_layers(adapter, layers)
        )
        self.steps = None if steps is None else frozenset(chosen_steps(steps))
        self.heads = chosen_heads(heads, adapter.facts.query_heads, "query head")
        self.kv_heads = chosen_heads(kv_heads, adapter.facts.kv_heads, "KV head")
        self._heads = {
            kind: None if heads is None else torch.tensor(heads)
            for kind, heads in (("query", self.heads), ("KV", self.kv_heads), ("", None))
        }
        self.kept: dict[HookPoint, list[Tensor]] = {hook_point: [] for hook_point in hook_points}
        self.recorded_steps: list[int] = []
        self._pieces: dict[HookPoint, list[Tensor]] = {}
        self._on = False
        super().__init__(adapter, self.kept, positions, evicted="as read")

    def __repr__(self) -> str:
        """Names the sites, layers, model and number of forwards in one line."""
        name, count = self.adapter.facts.name, max(map(len, self.kept.values()), default=0)
        sites = (f"{site} (derived)" if site in self.derived else site for site in self.sites)
        return f"<Recorder of {', '.join(sites)} in {len(self.layers)} layers of {name}: {count} forwards kept>"

    @property
    def kept_bytes(self) -> int:
        """Bytes of everything kept so far."""
        return sum(t.nbytes for tensors in self.kept.values() for t in tensors)

    def begin_step(self, step: int) -> None:
        """Ends the step before and begins this one."""
        self.end_step()
        self._on = self.steps is None or step in self.steps
        if self._on:
            self.recorded_steps.append(step)

    def end_step(self) -> None:
        """Joins the pieces of one step; a chunked prefill shows a site once a chunk."""
        joined = [
            pieces[0] if len(pieces) == 1 else self._joined(site, pieces)
            for (site, _), pieces in self._pieces.items()
        ]
        for hook_point, tensor in zip(self._pieces, self._packed(joined), strict=True):
            self.kept.setdefault(hook_point, []).append(tensor)
        self._pieces = {}
        self._on = False

    def popped(self) -> list[Tensor]:
        """Ends the step and returns its tensors, site by site, keeping none of them."""
        self.end_step()
        return [tensors.pop() for tensors in self.kept.values() if tensors]

    def rows_left(self, cache_rows: CacheRows, positions: Tensor) -> None:
        """Keeps the positions of the rows beside the sites that are shown by row."""
        if any((site, cache_rows.layer) in self.kept for site in WITH_ROWS):
            self._show(CACHE_POSITIONS, cache_rows.layer, cache_rows.start, positions)

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Keeps the chosen rows and heads of a tensor, if this step is recorded."""
        if not self._on:
            return
        layout, newest = LAYOUTS[site], self.positions == "newest"
        if newest:
            tensor = tensor.select(layout.row_axis, -1)
        if (heads := self._heads[layout.head_kind]) is not None:
            # Without the axis of rows, the axes after it move up by one.
            axis = layout.heads - (newest and layout.heads > layout.row_axis)
            tensor = tensor.index_select(axis, heads.to(tensor.device))
        # A copy, since some models go on computing in the tensor that they showed.
        self._pieces.setdefault((site, layer), []).append(tensor.clone())

    def _packed(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of a step as they are kept; a recorder of generations packs them."""
        return tensors

    def _joined(self, site: str, pieces: list[Tensor]) -> Tensor:
        if self.positions == "newest" or site in CACHE_SITES or site == CACHE_POSITIONS:
            return pieces[-1]
        if not LAYOUTS[site].keys:
            return torch.cat(pieces, 1)
        # A piece's newest key belongs to its newest query; a sliding window drops the oldest keys.
        ends = list(itertools.accumulate(piece.shape[2] for piece in pieces))
        fill = 0.0 if site == "pattern" else -torch.inf
        padding = [
            (end - piece.shape[3], ends[-1] - end) for piece, end in zip(pieces, ends, strict=True)
        ]
        return torch.cat(
            [
                nn.functional.pad(p, widths, value=fill)
                for p, widths in zip(pieces, padding, strict=True)
            ],
            2,
        )

    def keys(self) -> list[HookPoint]:
        """The keys of :meth:`__getitem__`: the sites and layers that are kept."""
        return list(self.kept)

    def __iter__(self) -> Iterator[HookPoint]:
        """Iterates over :meth:`keys`."""
        return iter(self.kept)

    def __contains__(self, hook_point: object) -> bool:
        """Whether a site at a layer, or a hook by its name, is kept."""
        return self._hook_point(hook_point) in self.kept

    def __len__(self) -> int:
        """How many sites and layers are kept."""
        return len(self.kept)

    def values(self) -> list[Tensor]:
        """The values of :meth:`__getitem__`, in the order of the keys."""
        return [self[hook_point] for hook_point in self.kept]

    def items(self) -> list[tuple[HookPoint, Tensor]]:
        """Pairs of keys and values."""
        return [(hook_point, self[hook_point]) for hook_point in self.kept]

    def _hook_point(self, name: object) -> object:
        """The site and layer of a name; a negative layer counts from the last."""
        hook_point = hook_point_of(name)
        layer = (
            whole_number(hook_point[1])
            if isinstance(hook_point, tuple) and len(hook_point) == 2
            else None
        )
        if layer is not None and -self.adapter.facts.layers <= layer < 0:
            return hook_point[0], layer + self.adapter.facts.layers  # type: ignore[index]
        return hook_point

    def __getitem__(self, hook_point: HookPoint | str) -> Tensor:
        """Returns a site at a layer (-1: the last), or a hook or module by its name, with the batch
        first.

        After one forward it is that forward's tensor. Several forwards are stacked,
        ``[forward, batch, ...]``, and ragged lengths padded with NaN (positions with -1).
        :attr:`kept` has them one by one.
        """
        hook_point = cast(HookPoint, self._hook_point(hook_point))
        if hook_point not in self.kept:
            have = ", ".join(f"({s!r}, {layer})" for s, layer in self.kept)
            raise InputError(
                f"nothing was recorded as {shown(hook_point)}: expected a site and a layer, one of {have}."
            )
        tensors = self.kept[hook_point]
        if not tensors:
            raise InputError(
                f"{shown(hook_point)} was recorded of no forward yet: run the model within kv.record(...) first."
            )
        return tensors[0] if len(tensors) == 1 else stacked(tensors)

    def stack_activation(self, site: str, layer: int = -1) -> Tensor:
        """Stacks a site of all kept layers along a new first axis, as TransformerLens's cache does.

        Args:
            site: A site, or a hook's name without its layer.
            layer: How many layers, from the first that was kept; all for -1.
        """
        (name,) = sites_of(site)
        layers = sorted(at for recorded, at in self.kept if recorded == name)
        layers = layers if layer == -1 else layers[: check_whole("layer", layer)]
        return torch.stack([self[name, at] for at in layers or [0]])

    def to_activation_cache(self, forward: int = -1, model: Any = None) -> Any:
        """Returns one forward as TransformerLens's ``ActivationCache``, by the names of its hooks,
        with the batch.

        Args:
            forward: The number of the forward; by default the last.
            model: The model that some methods of the cache need; by default the one that was
                recorded.

        Raises:
            InputError: No such forward was recorded, or no recorded site has a hook.
        """
        count = min(map(len, self.kept.values()), default=0)
        if not -count <= forward < count:
            raise InputError(
                f"forward={forward!r} was not recorded: {count} were; give a number from 0, or -1 for the last."
            )
        tensors = {hook_point: record[forward] for hook_point, record in self.kept.items()}
        return cache_of(tensors, self.adapter.model if model is None else model)
