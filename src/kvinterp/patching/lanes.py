"""Lanes: paths that advance step by step beside each other, some giving tensors, some taking them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.adapter import CACHE_SITES, Site
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.watcher import PatchWatcher
from kvinterp.paths import ExecutionPath, Runner, Watcher, path_named
from kvinterp.policies import Place
from kvinterp.recording import Watch

__all__ = ["Donor", "PureLane", "RunnerLane", "two_paths"]


def two_paths(
    cached: str | ExecutionPath, recompute: str | ExecutionPath, what: str, dtype: str | None = None
) -> tuple[ExecutionPath, ExecutionPath]:
    """Both paths by name, checked, and in another dtype where one is given.

    Raises:
        InputError: The first is no cached path, or the second no recompute path in one piece.
    """
    paths = path_named(cached), path_named(recompute)
    if paths[0].form != "cached" or paths[1].form != "recompute" or paths[1].chunk is not None:
        raise InputError(
            f"{what} needs a cached and an unchunked recompute path, and {paths[0]} and {paths[1]} were given."
        )
    if dtype is None:
        return paths
    return dataclasses.replace(paths[0], dtype=dtype), dataclasses.replace(paths[1], dtype=dtype)


class Donor:
    """A watcher that holds what its path shows at this step, whole, for patches to take from.

    Args:
        adapter: The model the donor path runs.
        wanted: Sites and layers to hold.
        prompt_length: Tokens in its prompt.
        gather: Sites of which the rows of all steps are kept, so that a cached path can give earlier positions too.
    """

    def __init__(self, adapter: Adapter, wanted: Iterable[Site], prompt_length: int, gather: Collection[str] = ()) -> None:
        self.watch = Watch(adapter, dict.fromkeys(wanted), self._see)
        self.places, self.listeners = self.watch.places, self.watch.listeners
        self.prompt_length, self.gather = prompt_length, frozenset(gather)
        self.end = prompt_length
        self._now: dict[Site, Tensor] = {}
        self._rows: dict[Site, list[Tensor]] = {}

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.end = self.prompt_length + step
        self._now.clear()

    def begin_pass(self) -> None:
        """A forward from position 0 follows: rows gathered before are computed anew."""
        self.watch.begin_pass()
        self._rows.clear()

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """Hears what attention reads."""
        self.watch.on_read(place, keys, values)

    def window(self, site: str, layer: int) -> tuple[int, Tensor]:
        """The tensor of a site at this step and the absolute position of its first row."""
        rows = 2 if site in CACHE_SITES or site == "pattern" else 1
        gathered = self._rows.get((site, layer))
        tensor = self._now[site, layer] if gathered is None else torch.cat(gathered, 1)
        return self.end - tensor.shape[rows], tensor

    def window_aligned_to(self, end: int, site: str, layer: int) -> tuple[int, Tensor]:
        """As :meth:`window`, with positions shifted so that its newest is the newest of a context of ``end``."""
        start, tensor = self.window(site, layer)
        return start + end - self.end, tensor

    def _see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        # A view would be enough but for the cache, whose memory a patch may write into.
        self._now[site, layer] = tensor.clone() if site in CACHE_SITES else tensor
        if site in self.gather:
            self._rows.setdefault((site, layer), []).append(tensor)


class RunnerLane:
    """A path advanced by a :class:`Runner`: the cached one, which carries state, or a donor."""

    def __init__(
        self, adapter: Adapter, path: ExecutionPath, prompt: Sequence[int], room: int, watchers: Sequence[Watcher] = ()
    ) -> None:
        device = adapter.at(dtype_named(path.dtype)).device
        self._runner = Runner(adapter, path, torch.tensor([list(prompt)], device=device), room, watchers)
        self._device = device

    def __enter__(self) -> RunnerLane:
        self._runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.__exit__(kind, error, trace)

    def advance(self, token: int | None) -> Float[Tensor, " vocab"]:
        """Logits of the next step."""
        return self._runner.advance(None if token is None else torch.tensor([token], device=self._device))[0]


class PureLane:
    """A recompute path with patches: a pure function of its tokens, so steps without a patch are looked up."""

    def __init__(self, pure: PureRecompute, prompt: Sequence[int], watcher: PatchWatcher | None) -> None:
        self.pure, self.tokens, self.watcher = pure, list(prompt), watcher
        self.step = -1

    def __enter__(self) -> PureLane:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def advance(self, token: int | None) -> Float[Tensor, " vocab"]:
        """Logits of the next step."""
        self.step += 1
        if token is not None:
            self.tokens.append(token)
        if self.watcher is None or not self.watcher.active(self.step):
            return self.pure.logits(self.tokens)
        return self.pure.patched(self.tokens, self.step, self.watcher)
