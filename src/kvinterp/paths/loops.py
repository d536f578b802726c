"""The two loops side by side, and what runs one of them: hooks attached once, one call a step.

The loops are twins: same signature, same yields. Each yields the newest position's logits,
``[batch, vocab]``, and is sent the next token of each sequence; step 0 is the token that the prefill
decides. Before a forward from position 0 they call ``begin``. ``stores`` makes the store of the pass
that follows, which calls ``hooks`` with what attention is about to read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import KvinterpError, UnsupportedError, named, out_of_memory
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.attaching import HookPoint, Listener
from kvinterp.models.cache_kinds import Dynamic
from kvinterp.models.cached_rows import CachedRows
from kvinterp.models.sites import ATTENDED_SITES
from kvinterp.paths.forwards import HookedForwards, in_chunks
from kvinterp.paths.kernels import Native
from kvinterp.paths.model_cache import Stores, path_store, uncached
from kvinterp.paths.path import ExecutionPath, Recompute
from kvinterp.paths.smoothing import Recomputed, Smoothed
from kvinterp.paths.store import Store, policy_listeners
from kvinterp.policies import CacheRows, ComposedPolicy
from kvinterp.recording import LOGITS, PathHook

log = logging.getLogger("kvinterp")

Loop = Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]
Begin = Callable[[], None]


def cached_loop(
    adapter: Adapter,
    path: ExecutionPath,
    prompt: Int[Tensor, "batch position"],
    max_new_tokens: int,
    stores: Stores,
    hooks: Sequence[PathHook],
    begin: Begin,
) -> Loop:
    """Prefills the prompt once, then feeds one token a step against the cache; a refresh prefills
    the whole prefix anew.
    """
    tokens, begun = prompt, 0
    while True:
        begin()
        store = stores(
            adapter, path, tokens.shape[0], tokens.shape[1], max_new_tokens - begun, hooks
        )
        logits = _forward(adapter, tokens, store, path.chunk)
        steps = itertools.count(1) if path.refresh is None else range(1, path.refresh)
        fed = []
        for _ in steps:
            token = yield logits[:, -1]
            fed.append(token[:, None])
            logits = _forward(adapter, token[:, None], store, None)
        token = yield logits[:, -1]
        tokens = torch.cat([tokens, *fed, token[:, None]], 1)
        begun = tokens.shape[1] - prompt.shape[1]


def recompute_loop(
    adapter: Adapter,
    path: ExecutionPath,
    prompt: Int[Tensor, "batch position"],
    max_new_tokens: int,
    stores: Stores,
    hooks: Sequence[PathHook],
    begin: Begin,
) -> Loop:
    """Feeds the whole prefix at every step; nothing is carried from one step to the next but the
    tokens.
    """
    tokens, store = prompt, None
    while True:
        begin()
        # None where nobody reads K and V; one that keeps nothing where somebody does; in a pass in
        # pieces one that keeps them from piece to piece.
        store = uncached(adapter, path, tokens, stores, hooks, store)
        logits = _forward(adapter, tokens, store, path.chunk)
        token = yield logits[:, -1]
        tokens = torch.cat([tokens, token[:, None]], 1)


class Runner:
    """One path in motion: hooks attached once for the whole decode, one call a step.

    Args:
        adapter: The model; it is brought to the path's dtype.
        path: How to run it.
        prompt: Token ids, ``[batch, position]``.
        max_new_tokens: Most tokens that will be fed after the prompt.
        hooks: Made for ``adapter.at(path.dtype)``; they hear every forward in order.

    Attributes:
        cache: What keeps the keys and values, such as ``"DynamicCache"``; ``"none"`` where nothing
            does.
    """

    def __init__(
        self,
        adapter: Adapter,
        path: ExecutionPath,
        prompt: Tensor,
        max_new_tokens: int,
        hooks: Sequence[PathHook] = (),
    ) -> None:
        self.adapter = adapter.at(dtype_named(path.dtype))
        self.path, self.hooks = path, hooks
        self.step, self._device = -1, self.adapter.device
        # Whatever is to be found out about this model's cache is found out here, before any hook is
        # attached.
        self.cache = self._names_of_caches(prompt, max_new_tokens)
        self._read_check = self._rows_to_ask(prompt)
        self._store: Store | None = None
        listeners, hooks = self._listeners(hooks)
        self._beside: Runner | None = None
        if path.smooth is not None:
            path = self._smoothed(path, prompt, max_new_tokens)
        if path.policy.sites:
            layers = self.adapter.facts.layers
            listeners.insert(0, policy_listeners(path.policy, layers, lambda: self._store))
        self._forwards = HookedForwards(self.adapter, path.kernels.mode(self.adapter), listeners)
        loop = cached_loop if path.form == "cached" else recompute_loop
        tokens = prompt.to(self._device)
        self._loop = loop(
            self.adapter, path, tokens, max_new_tokens, self._stores, hooks, self._begin
        )

    def _names_of_caches(self, prompt: Tensor, max_new_tokens: int) -> str:
        """The names of the caches that the passes will have, each once; ``"none"`` where none keeps
        anything.

        Each is made here and thrown away: what cannot be made is refused before anything runs.
        """
        path, cached = self.path, self.path.form == "cached"
        if not cached and path.chunk is None:
            return "none"
        refreshed = cached and path.refresh and max_new_tokens
        first_steps = range(0, max_new_tokens, path.refresh or 1) if refreshed else (0,)
        batch, length = prompt.shape
        names = [
            path_store(
                self.adapter, path, batch, length + step, max_new_tokens - step if cached else 0, ()
            ).name
            for step in first_steps
        ]
        return "; ".join(dict.fromkeys(names))

    def _listeners(
        self, hooks: Sequence[PathHook]
    ) -> tuple[list[Mapping[HookPoint, Listener]], Sequence[PathHook]]:
        """The listeners of the hooks, and the hooks that are called with every read.

        Those of a site with a column a key get the columns of the keys there are. Without a memory a
        forward reads the keys it made and no others, so that nothing is cut.
        """
        listeners = [hook.listeners for hook in hooks]
        attended = {point for heard in listeners for point in heard if point[0] in ATTENDED_SITES}
        if not attended or (self.path.form != "cached" and self.path.chunk is None):
            return listeners, hooks
        columns = _FilledColumns()
        return [columns.cut(heard, attended) for heard in listeners], (columns, *hooks)

    def __enter__(self) -> Runner:
        with contextlib.ExitStack() as stack:
            if self._beside is not None:
                stack.enter_context(self._beside)
            stack.enter_context(self._forwards.attached())
            self._attached = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.close()
        self._attached.__exit__(*error)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step; the first call takes no tokens."""
        self.step += 1
        if self._beside is not None:
            self._beside.advance(tokens)
        for hook in self.hooks:
            hook.begin_step(self.step)
        forwards = self._forwards
        with self._on_given_cache(), self._asking():
            logits = (
                forwards.call(next, self._loop)
                if tokens is None
                else forwards.call(self._loop.send, tokens)
            )
        for listener in forwards.listeners.get(LOGITS, ()):
            changed = listener(logits)
            logits = logits if changed is None else changed
        # On a model that is spread over devices the logits lie elsewhere than the tokens.
        return logits.to(self._device)

    def _rows_to_ask(self, prompt: Tensor) -> CachedRows | None:
        """What checks that attention reads the cached rows, on the first cached path of a call of
        ``run`` or ``compare`` that keeps all rows and has the machine's kernels; else None.
        """
        path = self.path
        plain = not path.policy.evicts and isinstance(path.kernels, Native)
        if path.form != "cached" or not plain or self.adapter.rows_asked:
            return None
        self._prompted = prompt.shape[1]
        return CachedRows(self.adapter)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Around the forwards of the prompt and of the first step after it: listens to what attention
        reads, and warns where that is not the cache.
        """
        rows = self._read_check if self.step < 2 else None
        if rows is None:
            yield
            return
        with rows.hearing(self._prompted, 0) if self.step == 0 else rows.hearing(1, self._prompted):
            yield
        if rows.asked:
            self.adapter.rows_asked = True
        if rows.unread is not None:
            rows.unread.warn(f"path {self.path} of {self.adapter.facts.name}")

    @contextlib.contextmanager
    def _on_given_cache(self) -> Iterator[None]:
        """Around a forward: what it raises on a cache that is not the model's own becomes an error
        that names the step and the cache.
        """
        try:
            yield
        except KvinterpError:
            raise
        except Exception as error:
            if isinstance(self.path.cache, Dynamic) or out_of_memory(error):
                raise
            raise UnsupportedError(
                f"step {self.step} on a {self.cache} raises {named(error)}: "
                f"kvinterp audit MODEL --cache {self.path.cache} says which use of the cache is wrong."
            ) from error

    def _smoothed(self, path: ExecutionPath, prompt: Tensor, max_new_tokens: int) -> ExecutionPath:
        """The path with a policy that reads what a recompute path, run beside it, reads at the same
        step.
        """
        if not self.adapter.attention_only:
            raise UnsupportedError(
                f"path {path} mixes keys and values, and {self.adapter.facts.architecture} keeps other state in some layers: "
                "leave smooth out."
            )
        recomputed = Recomputed()
        beside = Recompute(dtype=path.dtype, chunk=path.chunk, kernels=path.kernels)
        self._beside = Runner(self.adapter, beside, prompt, max_new_tokens, [recomputed])
        return dataclasses.replace(
            path,
            policy=ComposedPolicy((Smoothed(float(path.smooth or 0), recomputed), path.policy)),
        )

    def _stores(
        self,
        adapter: Adapter,
        path: ExecutionPath,
        batch: int,
        length: int,
        max_new_tokens: int,
        hooks: Sequence[PathHook],
    ) -> Store:
        """Makes the store of a pass, and keeps it for the listeners of the policy's sites."""
        self._store = path_store(adapter, path, batch, length, max_new_tokens, hooks)
        return self._store

    def _begin(self) -> None:
        for hook in self.hooks:
            hook.begin_pass()


class _FilledColumns(PathHook):
    """Cuts scores and patterns to the keys there are: against a static cache their rows have a column
    for every slot, the empty ones too.
    """

    def __init__(self) -> None:
        self._keys: dict[int, int] = {}

    def on_read(self, cache_rows: CacheRows, keys: Tensor, values: Tensor) -> None:
        """Notes how many keys attention is about to read."""
        self._keys[cache_rows.layer] = keys.shape[2]

    def cut(
        self, listeners: Mapping[HookPoint, Listener], attended: Collection[HookPoint]
    ) -> dict[HookPoint, Listener]:
        """The same listeners; those at the attended hook points get the filled columns only."""
        return {
            hook_point: self._cut(hook_point[1], hear) if hook_point in attended else hear
            for hook_point, hear in listeners.items()
        }

    def _cut(self, layer: int, listener: Listener) -> Listener:
        @functools.wraps(listener)
        def hear_filled(tensor: Tensor) -> Tensor | None:
            filled = self._keys.get(layer, tensor.shape[-1])
            if filled >= tensor.shape[-1]:
                return listener(tensor)
            changed = listener(tensor[..., :filled])
            return None if changed is None else torch.cat([changed, tensor[..., filled:]], -1)

        return hear_filled


def _forward(adapter: Adapter, tokens: Tensor, store: Store | None, chunk: int | None) -> Tensor:
    for piece in in_chunks(tokens, chunk):
        logits = adapter.forward(piece, store)
        if store is not None:
            store.settle()
    return logits
