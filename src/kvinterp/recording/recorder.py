"""Keeps what was asked, at the query position that was asked, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kvinterp.errors import InputError, shown
from kvinterp.inputs import check_choice, check_instance, chosen_heads, chosen_layers, chosen_steps, is_among
from kvinterp.models import Adapter, expand_sites
from kvinterp.models.adapter import CACHE_SITES, Site
from kvinterp.policies import Place
from kvinterp.recording.watch import Watch

__all__ = ["HEADS", "Recorder"]

# Which dimension of the common layout numbers heads, and whether they are query or KV heads.
HEADS = {
    "q": (2, "query"),
    "z": (2, "query"),
    "k": (2, "kv"),
    "v": (2, "kv"),
    "attn_scores": (1, "query"),
    "pattern": (1, "query"),
    "cache_k": (1, "kv"),
    "cache_k_pre": (1, "kv"),
    "cache_v": (1, "kv"),
}
POSITION_LAST_BUT_ONE = {"attn_scores", "pattern", "cache_k", "cache_k_pre", "cache_v"}


class Recorder:
    """Records sites of one path, step by step.

    Used by ``run`` and ``compare``, and by :func:`kvinterp.record` around a user's own forwards.

    Args:
        adapter: The model.
        sites: Site names or groups, as a list or comma-separated.
        layers: Layers to keep; all unless said.
        heads: Query heads to keep of q, z, attn_scores and pattern; all unless said.
        kv_heads: KV heads to keep of k, v and the cache sites; all unless said.
        steps: Decode steps to keep; all unless said. Step 0 is the prefill.
        positions: ``"newest"`` (the last query position; for cache sites the last key) or ``"all"``.

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
        sites: str | Sequence[str],
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        kv_heads: Iterable[int] | None = None,
        steps: Iterable[int] | None = None,
        positions: str = "newest",
    ) -> None:
        check_instance("adapter", adapter, Adapter, "a model that kv.wrap() or kv.load_model() made")
        check_choice("positions", positions, ("newest", "all"))
        self.adapter, self.positions = adapter, positions
        self.sites = expand_sites(sites)
        self.derived = tuple(filter(adapter.derives, self.sites))
        self.layers = chosen_layers(adapter, layers)
        self.steps = None if steps is None else frozenset(chosen_steps(steps))
        self.heads = chosen_heads(heads, adapter.facts.query_heads, "query head")
        self.kv_heads = chosen_heads(kv_heads, adapter.facts.kv_heads, "KV head")
        self._heads = {
            kind: None if chosen is None else torch.tensor(chosen)
            for kind, chosen in (("query", self.heads), ("kv", self.kv_heads))
        }
        self.kept: dict[Site, list[Tensor]] = {(s, layer): [] for s in self.sites for layer in self.layers}
        self.recorded_steps: list[int] = []
        self._pieces: dict[Site, list[Tensor]] = {}
        self._on = self._begun = False
        self.watch = Watch(adapter, self.kept, self._keep, positions)

    def __repr__(self) -> str:
        """What it keeps, in one line."""
        name, kept = self.adapter.facts.name, max(map(len, self.kept.values()), default=0)
        sites = (f"{site} (derived)" if site in self.derived else site for site in self.sites)
        return f"<Recorder of {', '.join(sites)} in {len(self.layers)} layers of {name}: {kept} forwards kept>"

    @property
    def places(self) -> list[Site]:
        """The hooks it needs."""
        return self.watch.places

    @property
    def kept_bytes(self) -> int:
        """Bytes of everything kept so far."""
        return sum(t.numel() * t.element_size() for tensors in self.kept.values() for t in tensors)

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
            self.kept[place].append(pieces[0] if len(pieces) == 1 else self._joined(place[0], pieces))
        self._pieces = {}
        self._on = self._begun = False

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

    def begin_pass(self) -> None:
        """A forward from position 0 follows."""
        self.watch.begin_pass()

    def keep(self, site: str, layer: int, tensor: Tensor) -> None:
        """Keeps a site that no hook shows, of the step that was begun."""
        self._keep(site, layer, 0, tensor)

    def unheard(self) -> list[Site]:
        """What is to be kept and was not shown since the step was begun."""
        return [place for place in self.kept if place not in self._pieces]

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Hears what attention reads from the cache; changes nothing."""
        self.watch.on_read(place, keys, values)
        return None

    def _keep(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        if not self._on:
            return
        if self.positions == "newest":
            tensor = tensor[:, :, -1] if site in POSITION_LAST_BUT_ONE else tensor[:, -1]
        dim_kind = HEADS.get(site)
        if dim_kind is not None and (chosen := self._heads[dim_kind[1]]) is not None:
            dim = dim_kind[0] - (1 if self.positions == "newest" and dim_kind[0] == 2 else 0)
            tensor = tensor.index_select(dim, chosen.to(tensor.device))
        self._pieces.setdefault((site, layer), []).append(tensor.clone())

    def _joined(self, site: str, pieces: list[Tensor]) -> Tensor:
        if self.positions == "newest" or site in CACHE_SITES:
            return pieces[-1]
        if site not in ("attn_scores", "pattern"):
            return torch.cat(pieces, 1)
        # A piece's newest key is its newest query's; a sliding window lets go of the oldest ones.
        ends = list(itertools.accumulate(piece.shape[2] for piece in pieces))
        fill = 0.0 if site == "pattern" else -torch.inf
        around = [(end - piece.shape[3], ends[-1] - end) for piece, end in zip(pieces, ends, strict=True)]
        return torch.cat([nn.functional.pad(p, room, value=fill) for p, room in zip(pieces, around, strict=True)], 2)

    def __getitem__(self, place: Site) -> list[Tensor]:
        """What was kept of a site at a layer, a tensor a step."""
        if not is_among(place, self.kept):
            have = ", ".join(f"({s!r}, {layer})" for s, layer in self.kept)
            raise InputError(
                f"nothing was recorded as {shown(place)}: expected a site and a layer, one of {have}; each gives a list with one "
                "tensor a forward."
            )
        return self.kept[place]
