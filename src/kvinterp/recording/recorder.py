"""Keeps what was asked, at the query position that was asked, and nothing else."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.errors import InputError
from kvinterp.models import Adapter, expand_sites, wrap
from kvinterp.models.adapter import CACHE_SITES, Site
from kvinterp.policies import Place
from kvinterp.recording.watch import Watch, chosen_heads, chosen_layers, chosen_steps

__all__ = ["Recorder", "record"]

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

    Used by ``run`` and ``compare``, and by :func:`record` around a user's own forwards.

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
        if positions not in ("newest", "all"):
            raise InputError(f"positions={positions!r} was given: expected 'newest' or 'all'.")
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
        if place not in self.kept:
            have = ", ".join(f"{s} at {layer}" for s, layer in self.kept)
            raise InputError(f"nothing was recorded as {place!r}: expected one of {have}.")
        return self.kept[place]


@contextlib.contextmanager
def record(
    model: Any,
    sites: str | Sequence[str],
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    positions: str = "newest",
) -> Iterator[Recorder]:
    """Records the user's own forwards on anyone's model; each call of the model is one step.

    A forward that an error or an interruption cuts off is no step, and leaves nothing in what is kept.

    Cache sites are read from the cache that the user's forward used or returned.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        sites: As for :class:`Recorder`.
        layers: As for :class:`Recorder`.
        heads: As for :class:`Recorder`.
        kv_heads: As for :class:`Recorder`.
        positions: As for :class:`Recorder`.

    Yields:
        The recorder; ``recorder["resid_post", 3]`` is a list with one tensor a forward.

    Example:
        >>> with kvinterp.record(model, "resid_post,pattern") as seen:  # doctest: +SKIP
        ...     model(tokens)
        >>> seen["pattern", 0][0].shape  # doctest: +SKIP
    """
    adapter = wrap(model)
    recorder = Recorder(adapter, sites, layers, heads, kv_heads, None, positions)
    from_cache = [p for p in recorder.kept if p[0] in CACHE_SITES and p not in recorder.watch.listeners]

    hooks = contextlib.ExitStack()

    def before(*_: Any) -> None:
        if recorder.abandon_step():
            # After a KeyboardInterrupt torch calls no hook that would undo what the cut off forward began.
            hooks.close()
            hooks.enter_context(adapter.attached(recorder.places))
        recorder.begin_step(len(recorder.recorded_steps))
        recorder.begin_pass()

    signature = inspect.signature(adapter.model.forward)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        for site, layer in from_cache:
            tensor = adapter.read_cache(site, layer, arguments, output)
            if tensor is None:
                raise InputError(
                    f"site {site!r} was asked for, but this forward used no cache that holds it: call the model with "
                    f"a cache ({'past_kv_cache' if adapter.kind == 'hooked' else 'past_key_values or use_cache=True'})."
                )
            recorder._keep(site, layer, 0, tensor)
        recorder.end_step()

    with contextlib.ExitStack() as stack:
        stack.callback(recorder.abandon_step)
        stack.enter_context(hooks)
        hooks.enter_context(adapter.attached(recorder.places))
        stack.callback(adapter.model.register_forward_pre_hook(before).remove)
        stack.callback(adapter.model.register_forward_hook(after, with_kwargs=True).remove)
        stack.enter_context(adapter.listening({place: [heard] for place, heard in recorder.watch.listeners.items()}))
        yield recorder
