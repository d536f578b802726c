"""Keeps what was asked, at the query position that was asked, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvinterp.common.checks import check_instance, check_whole, whole_number
from kvinterp.errors import InputError, shown, unexpected
from kvinterp.models import Adapter
from kvinterp.models.attaching import Site
from kvinterp.models.caches import Place
from kvinterp.models.hook_names import Names, place_of, places_of, sites_of
from kvinterp.models.inputs import chosen_heads, chosen_layers, chosen_steps
from kvinterp.models.sites import ATTENDED_SITES, CACHE_SITES, LAYOUTS, ROWS
from kvinterp.recording.hook import SiteHook
from kvinterp.recording.trace import stacked

WITH_ROWS = (*CACHE_SITES, *ATTENDED_SITES)
"""Beside these the positions of the rows are recorded where a policy may let go of some."""


class Recorder(SiteHook):
    """Records sites of one path, step by step.

    Used by ``run`` and ``compare``, and by :func:`kvinterp.record` around a user's own forwards.

    Args:
        adapter: The model.
        sites: Names of sites, groups, or TransformerLens's hooks (``blocks.1.attn.hook_pattern``), as a list or
            comma-separated.
        layers: Layers to keep (default: all).
        heads: Query heads to keep of q, z, attn_scores and pattern (default: all).
        kv_heads: KV heads to keep of k, v and the cache sites (default: all).
        steps: Decode steps to keep (default: all). Step 0 is the prefill.
        positions: ``"newest"``, or -1 (the last query position; for cache sites the last key), or ``"all"``.

    Attributes:
        heads: The query heads that are kept, None for all.
        kv_heads: The KV heads that are kept, None for all.
        derived: The sites that are worked out beside a kernel that does not show them (SDPA).

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
        check_instance("adapter", adapter, Adapter, "a model that kv.wrap() or kv.load_model() made")
        if whole_number(positions) == -1:
            positions = "newest"
        if positions not in ("newest", "all"):
            raise unexpected("positions", positions, "'newest' or 'all', of which you then take the positions you want")
        self.adapter, self.positions = adapter, positions
        self.sites, places = places_of(adapter, sites, layers)
        self.derived = tuple(filter(adapter.derives, self.sites))
        self.layers = tuple(sorted({layer for _, layer in places})) if places else chosen_layers(adapter, layers)
        self.steps = None if steps is None else frozenset(chosen_steps(steps))
        self.heads = chosen_heads(heads, adapter.facts.query_heads, "query head")
        self.kv_heads = chosen_heads(kv_heads, adapter.facts.kv_heads, "KV head")
        self._heads = {
            kind: None if chosen is None else torch.tensor(chosen)
            for kind, chosen in (("query", self.heads), ("KV", self.kv_heads), ("", None))
        }
        self.kept: dict[Site, list[Tensor]] = {place: [] for place in places}
        self.recorded_steps: list[int] = []
        self._pieces: dict[Site, list[Tensor]] = {}
        self._on = self._begun = False
        super().__init__(adapter, self.kept, positions, rows="any")

    def __repr__(self) -> str:
        """What it keeps, in one line."""
        name, kept = self.adapter.facts.name, max(map(len, self.kept.values()), default=0)
        sites = (f"{site} (derived)" if site in self.derived else site for site in self.sites)
        return f"<Recorder of {', '.join(sites)} in {len(self.layers)} layers of {name}: {kept} forwards kept>"

    @property
    def kept_bytes(self) -> int:
        """Bytes of everything kept so far."""
        return sum(t.numel() * t.element_size() for tensors in self.kept.values() for t in tensors)

    @property
    def reads(self) -> bool:
        """Whether it keeps a site of the cache; of which rows that is, is told where some may be missing."""
        return bool(self._reads)

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.end_step()
        self._begun = True
        self._on = self.steps is None or step in self.steps
        if self._on:
            self.recorded_steps.append(step)

    def end_step(self) -> None:
        """Puts together what one step showed; a chunked prefill shows a site once a chunk."""
        for place, pieces in self._pieces.items():
            self.kept.setdefault(place, []).append(pieces[0] if len(pieces) == 1 else self._joined(place[0], pieces))
        self._pieces = {}
        self._on = self._begun = False

    def popped(self) -> list[Tensor]:
        """Ends the step and hands over what it showed, site by site, keeping none of it."""
        self.end_step()
        return [kept.pop() for kept in self.kept.values() if kept]

    def forget_step(self) -> None:
        """Forgets the step that ended last."""
        self.recorded_steps.pop()
        for kept in self.kept.values():
            kept.pop()

    def abandon_step(self) -> bool:
        """Forgets a step that was begun and never ended, because its forward was cut off; whether there was one."""
        begun = self._begun
        if self._on:
            self.recorded_steps.pop()
        self._pieces = {}
        self._on = self._begun = False
        return begun

    def keep(self, site: str, layer: int, tensor: Tensor) -> None:
        """Keeps a site that no hook shows, of the step that was begun."""
        self._bring(site, layer, 0, tensor)

    def unheard(self) -> list[Site]:
        """What is to be kept and was not shown since the step was begun."""
        return [place for place in self.kept if place not in self._pieces]

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Hears what attention reads from the cache, and of which rows where a policy may have let go of some."""
        if place.rows is not None and any((site, place.layer) in self.kept for site in WITH_ROWS):
            self._bring(ROWS, place.layer, place.start, place.rows)
        super().on_read(place, keys, values)

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Keeps the rows and heads that were asked for, in a step that was."""
        if not self._on:
            return
        layout, newest = LAYOUTS[site], self.positions == "newest"
        if newest:
            tensor = tensor.select(layout.rows, -1)
        if (chosen := self._heads[layout.head_kind]) is not None:
            # Where the axis of rows is gone, those behind it have moved up.
            axis = layout.heads - (newest and layout.heads > layout.rows)
            tensor = tensor.index_select(axis, chosen.to(tensor.device))
        self._pieces.setdefault((site, layer), []).append(tensor.clone())

    def _joined(self, site: str, pieces: list[Tensor]) -> Tensor:
        if self.positions == "newest" or site in CACHE_SITES or site == ROWS:
            return pieces[-1]
        if not LAYOUTS[site].keys:
            return torch.cat(pieces, 1)
        # A piece's newest key is its newest query's; a sliding window lets go of the oldest ones.
        ends = list(itertools.accumulate(piece.shape[2] for piece in pieces))
        fill = 0.0 if site == "pattern" else -torch.inf
        around = [(end - piece.shape[3], ends[-1] - end) for piece, end in zip(pieces, ends, strict=True)]
        return torch.cat([nn.functional.pad(p, room, value=fill) for p, room in zip(pieces, around, strict=True)], 2)

    def keys(self) -> list[Site]:
        """The sites and layers that are kept, each by which :meth:`__getitem__` takes it."""
        return list(self.kept)

    def __iter__(self) -> Iterator[Site]:
        """As :meth:`keys`."""
        return iter(self.kept)

    def __contains__(self, place: object) -> bool:
        """Whether a site at a layer, or a hook by its name, is kept."""
        return self._place(place) in self.kept

    def __len__(self) -> int:
        """How many sites and layers are kept."""
        return len(self.kept)

    def values(self) -> list[Tensor]:
        """What :meth:`__getitem__` gives of each."""
        return [self[place] for place in self.kept]

    def items(self) -> list[tuple[Site, Tensor]]:
        """Each beside its site and layer."""
        return [(place, self[place]) for place in self.kept]

    def _place(self, given: object) -> object:
        """A site and its layer, which counts from the last where it is negative."""
        place = place_of(given)
        layer = whole_number(place[1]) if isinstance(place, tuple) and len(place) == 2 else None
        if layer is not None and -self.adapter.facts.layers <= layer < 0:
            return place[0], layer + self.adapter.facts.layers  # type: ignore[index]
        return place

    def __getitem__(self, place: Site | str) -> Tensor:
        """What was kept of a site at a layer (-1: the last), or of a hook or module by its name, with the batch in front.

        Of one forward its tensor; of several they are stacked, ``[forward, batch, ...]``, and ragged lengths padded with NaN
        (positions with -1). :attr:`kept` has them one by one.
        """
        place = cast(Site, self._place(place))
        if place not in self.kept:
            have = ", ".join(f"({s!r}, {layer})" for s, layer in self.kept)
            raise InputError(f"nothing was recorded as {shown(place)}: expected a site and a layer, one of {have}.")
        kept = self.kept[place]
        if not kept:
            raise InputError(f"{shown(place)} was recorded of no forward yet: run the model within kv.record(...) first.")
        return kept[0] if len(kept) == 1 else stacked(kept)

    def stack_activation(self, site: str, layer: int = -1) -> Tensor:
        """A site of all layers that were kept, stacked in front, as TransformerLens's cache does.

        Args:
            site: A site, or a hook's name without its layer.
            layer: How many layers, from the first that was kept; all for -1.
        """
        (name,) = sites_of(site)
        layers = sorted(at for of, at in self.kept if of == name)
        layers = layers if layer == -1 else layers[: check_whole("layer", layer)]
        return torch.stack([self[name, at] for at in layers or [0]])

    def to_activation_cache(self, forward: int = -1, model: Any = None) -> Any:
        """One forward as TransformerLens's ``ActivationCache``, by the names of its hooks, with the batch.

        Args:
            forward: Which forward; the last unless given.
            model: The model that the cache's own methods ask; the one that was recorded unless given.

        Raises:
            InputError: No such forward was recorded, or nothing that a hook shows.
        """
        from kvinterp.recording.activation_cache import cache_of

        count = min(map(len, self.kept.values()), default=0)
        if not -count <= forward < count:
            raise InputError(
                f"forward={forward!r} was not recorded: {count} were; give a number from 0, or -1 for the last."
            )
        here = {place: kept[forward] for place, kept in self.kept.items()}
        return cache_of(here, self.adapter.model if model is None else model)
