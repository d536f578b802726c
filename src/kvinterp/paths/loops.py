"""The two loops side by side, and what runs one of them: hooks attached once, one call a step.

The loops are twins: same signature, same yields. Each yields the newest position's logits and is
sent the next token; step 0 is the token that the prefill decides.
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
from kvinterp.models.cached_rows import CachedRows
from kvinterp.models.caches import Dynamic
from kvinterp.models.sites import ATTENDED_SITES
from kvinterp.paths.forwards import HookedForwards, in_chunks
from kvinterp.paths.kernels import Native
from kvinterp.paths.model_cache import Stores, path_store, uncached
from kvinterp.paths.path import ExecutionPath, Recompute
from kvinterp.paths.smoothing import Recomputed, Smoothed
from kvinterp.paths.store import Store, policy_listeners
from kvinterp.policies import CacheRows, Chain
from kvinterp.recording import LOGITS, PathHook

log = logging.getLogger("kvinterp")

Loop = Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]
Begin = Callable[[], None]


def cached_loop(
    adapter: Adapter,
    path: ExecutionPath,
    prompt: Tensor,
    max_new_tokens: int,
    stores: Stores,
    hears: Sequence[PathHook],
    begin: Begin,
) -> Loop:
    """Prefills the prompt once, then feeds one token a step against the cache; a refresh prefills
    the whole prefix anew.
    """
    tokens, begun = prompt, 0
    while True:
        begin()
        store = stores(
            adapter, path, tokens.shape[0], tokens.shape[1], max_new_tokens - begun, hears
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
    prompt: Tensor,
    max_new_tokens: int,
    stores: Stores,
    hears: Sequence[PathHook],
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
        store = uncached(adapter, path, tokens, stores, hears, store)
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
        self.cache = "none"
        cached = path.form == "cached"
        if cached or path.chunk is not None:
            # Whatever is to be found out about this model's cache is found out here, before
            # anything is heard.
            begun = (
                range(0, max_new_tokens, path.refresh)
                if cached and path.refresh and max_new_tokens
                else (0,)
            )
            shapes = [
                (len(prompt), prompt.shape[1] + step, max_new_tokens - step if cached else 0)
                for step in begun
            ]
            stores = [path_store(self.adapter, path, *shape, ()) for shape in shapes]
            self.cache = "; ".join(dict.fromkeys(store.name for store in stores))
        self._read_check = self._rows_to_ask(prompt)
        self._store: Store | None = None
        # Without a memory a forward reads the keys it made and no others.
        on_store = cached or path.chunk is not None
        attended = {
            hook_point
            for hook in hooks
            for hook_point in hook.listeners
            if on_store and hook_point[0] in ATTENDED_SITES
        }
        self._beside: Runner | None = None
        if path.smooth is not None:
            path = self._smoothed(path, prompt, max_new_tokens)
        listeners = [hook.listeners for hook in hooks]
        hears = tuple(hooks)
        if attended:
            columns = _FilledColumns()
            listeners = [columns.cut(heard, attended) for heard in listeners]
            hears = columns, *hooks
        if path.policy.sites:
            listeners.insert(
                0, policy_listeners(path.policy, self.adapter.facts.layers, lambda: self._store)
            )
        self._forwards = HookedForwards(self.adapter, path.kernels.mode(self.adapter), listeners)
        loop = cached_loop if cached else recompute_loop
        self._loop = loop(
            self.adapter,
            path,
            prompt.to(self._device),
            max_new_tokens,
            self._stores,
            hears,
            self._begin,
        )

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
        """Hears what attention reads in the prompt and in the first step after it, and warns where
        that is not the cache.
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
        """What is raised in a forward on a cache that is not the model's own, which may be
        anybody's, is said in a sentence.
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
            path, policy=Chain((Smoothed(float(path.smooth or 0), recomputed), path.policy))
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
        """Makes the store of a pass, whose policy then sees what it asked for."""
        self._store = path_store(adapter, path, batch, length, max_new_tokens, hooks)
        return self._store

    def _begin(self) -> None:
        for hook in self.hooks:
            hook.begin_pass()


class _FilledColumns(PathHook):
    """Cuts scores and patterns to the keys there are: against a static cache their rows go on over
    its empty room.
    """

    def __init__(self) -> None:
        self._keys: dict[int, int] = {}

    def on_read(self, cache_rows: CacheRows, keys: Tensor, values: Tensor) -> None:
        """Hears how many keys attention is about to read."""
        self._keys[cache_rows.layer] = keys.shape[2]

    def cut(
        self, listeners: Mapping[HookPoint, Listener], attended: Collection[HookPoint]
    ) -> dict[HookPoint, Listener]:
        """The listeners, of which those of the attended sites, with a column a key, are told of the
        filled ones only.
        """
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
