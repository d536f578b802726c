"""The store a path keeps its keys and values in: the model's own cache, or the preallocated one
where it was checked.

A preallocated store hands attention tensors laid out otherwise in memory than the model's own cache
does, and a kernel may then add in another order (docs/laws.md, law 10). So it is used only where
both were run side by side on this machine, in this shape, and gave the same bits at every site;
else the model's own cache is run, and the result says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.cache_kinds import Preallocated
from kvinterp.models.caches import OwnCache
from kvinterp.models.hooks import hooks_suspended
from kvinterp.models.provenance import autocast
from kvinterp.paths.forwards import HookedForwards, in_chunks
from kvinterp.paths.path import ExecutionPath
from kvinterp.paths.store import Growing, PassThrough, Store, policy_listeners
from kvinterp.policies import Identity
from kvinterp.recording import PathHook, Recorder

log = logging.getLogger("kvinterp")

CHECKED_SITES = ("q", "k", "v", "z", "attn_out", "mlp_out", "resid_post")
CHECKED_NUMBERS = 2**17
"""What is compared, and how many numbers of it, before two ways of computing are taken for the
same.

Those are a batch and single prompts (docs/laws.md, law 9), and a preallocated cache and the model's
own (law 10). Measured on
a CPU in float16: models of width 128 show a difference in every step; of the tiny random models of
width 24 to 32 the least sensitive shows it once in 20,000 numbers.
"""


@runtime_checkable
class Stores(Protocol):
    """Makes the store of one pass from position 0."""

    def __call__(
        self,
        adapter: Adapter,
        path: ExecutionPath,
        batch: int,
        length: int,
        max_new_tokens: int,
        hooks: Sequence[PathHook],
    ) -> Store:
        """A store for ``length`` positions at once and ``max_new_tokens`` more one by one."""


def path_store(
    adapter: Adapter,
    path: ExecutionPath,
    batch: int,
    length: int,
    max_new_tokens: int,
    hooks: Sequence[PathHook],
) -> Store:
    """The store that a path asks for, told to the hooks.

    Args:
        adapter: The model, in the path's dtype.
        path: The path.
        batch: Number of sequences.
        length: Positions of the prompt.
        max_new_tokens: Most positions that are fed after it.
        hooks: Told of every read.
    """
    own = own_store(adapter, path, batch, length, max_new_tokens, hooks)
    if not isinstance(path.cache, Preallocated) or own.library_cache is None:
        return own
    if same_bits(adapter, path, batch, length, max_new_tokens):
        store = growing_store(adapter, path, batch, length, max_new_tokens, hooks)
        store.name = f"preallocated (checked: the bits of {own.name})"
        return store
    log.warning(
        "%s in %s: the preallocated cache does not give the bits of %s here, so that one is run",
        adapter.facts.name, adapter.dtype, own.name,
    )  # fmt: skip
    own.name += " (preallocated gave other bits)"
    return own


def own_store(
    adapter: Adapter,
    path: ExecutionPath,
    batch: int,
    length: int,
    max_new_tokens: int,
    hooks: Sequence[PathHook],
) -> Store:
    """A store on a cache of the model's own library; an empty one where the model keeps its memory
    by itself.
    """
    facts, dtype = adapter.facts, path.kernels.compute_dtype(adapter.dtype)
    slides = any(
        window is not None and window < length + max_new_tokens for window in facts.windows
    )
    memory = adapter.own_cache(
        path.cache, batch, length + max_new_tokens, dtype_named(path.cache_dtype) or dtype
    )
    if path.policy.evicts and (memory is None or slides):
        why = (
            f"slides a window over {length + max_new_tokens} positions"
            if slides
            else "keeps its memory in a form of its own"
        )
        raise UnsupportedError(
            f"policy {path.policy} lets go of rows, and {facts.name} {why}: leave the policy out."
        )
    if memory is None:
        store = growing_store(adapter, path, batch, length, max_new_tokens, hooks)
        store.name = "the model's own state"
        return store
    store = _store(adapter, path, batch, length, hooks, memory)
    if path.policy.evicts and scores_by_row(adapter):
        raise UnsupportedError(
            f"policy {path.policy} lets go of rows, and {facts.architecture} scores a key by the number of its row (ALiBi, or "
            "another bias for distance), which would then be another's: leave the policy out, or use a model with RoPE."
        )
    return store


def growing_store(
    adapter: Adapter,
    path: ExecutionPath,
    batch: int,
    length: int,
    max_new_tokens: int,
    hooks: Sequence[PathHook],
) -> Store:
    """A store on preallocated memory."""
    return _store(
        adapter,
        path,
        batch,
        length,
        hooks,
        Growing(length + max_new_tokens, adapter.position_major_cache),
    )


def _store(
    adapter: Adapter,
    path: ExecutionPath,
    batch: int,
    length: int,
    hooks: Sequence[PathHook],
    memory: OwnCache,
) -> Store:
    # A recompute path keeps rows between the chunks of one pass only, and reads what it keeps, as
    # without chunks.
    prefill = length if path.form == "cached" and path.prefill == "exact" else 0
    dtype, keeps = path.kernels.compute_dtype(adapter.dtype), dtype_named(path.cache_dtype)
    # Most hooks are asked nothing.
    reads = [hook.on_read for hook in hooks if hook.reads or path.policy.evicts]
    return Store(
        adapter.facts,
        path.policy,
        batch,
        dtype,
        adapter.device,
        reads,
        memory,
        keeps,
        prefill,
        length,
    )


def uncached(
    adapter: Adapter,
    path: ExecutionPath,
    tokens: Tensor,
    stores: Stores,
    hooks: Sequence[PathHook],
    before: Store | None = None,
) -> Store | None:
    """The store of one pass of a recompute path: none, but between the chunks of a pass in pieces.

    The model is run as its users run it with ``use_cache=False``. Where keys and values are read or
    changed they are led through a store that keeps nothing, at the model's attention; of a model
    that does not show them there the store is handed in as a cache, where that was seen to give the
    bits of the forward without one.

    Args:
        adapter: The model, in the path's dtype.
        path: The path.
        tokens: The whole prefix.
        stores: Makes a store that keeps rows.
        hooks: Told of every read.
        before: That of the pass before, with the same hooks: it is taken again where nothing of a
            pass is left in it.

    Raises:
        UnsupportedError: Keys and values are read, and those of a forward without a cache are not
            to be had.
    """
    if path.chunk is not None and path.chunk < tokens.shape[1]:
        return stores(adapter, path, tokens.shape[0], tokens.shape[1], 0, hooks)
    reads = [hook.on_read for hook in hooks if hook.reads]
    if not adapter.attention_only or not (reads or path.policy.acts):
        return None
    if isinstance(before, PassThrough) and before.used and not before.policy.acts:
        return before
    batch, length = tokens.shape
    if not adapter.hands_over_keys_values:
        check_prompt_bits(adapter, batch, length)
    return PassThrough(
        adapter.facts, path.policy, batch, adapter.dtype, adapter.device, reads, prompt=length
    )


@torch.no_grad()
def check_prompt_bits(adapter: Adapter, batch: int, length: int) -> None:
    """Raises where a forward that is handed an empty cache has not the bits of the forward without
    one.

    Asked at this length and at the largest below the next power of two, once for all lengths
    between.

    Args:
        adapter: The model; what is found is kept for it.
        batch: Number of sequences.
        length: Positions.

    Raises:
        UnsupportedError: It has not.
    """
    longest = min(2 ** length.bit_length() - 1, adapter.facts.context)

    def alike(count: int) -> bool:
        ids = (
            torch.arange(batch * count, device=adapter.device) * 7 + 3
        ) % adapter.facts.vocabulary
        tokens = ids.reshape(batch, -1)
        handed = PassThrough(adapter.facts, Identity(), batch, adapter.dtype, adapter.device, ())
        # With the user's hooks, which are part of what is run.
        with adapter.own_state([]), hooks_suspended(adapter.model, users="kept"):
            return torch.equal(adapter.forward(tokens), adapter.forward(tokens, handed))

    subject = "a cache handed in", autocast(adapter.device), batch, longest
    if not adapter.checked_once(lambda: alike(length) and alike(longest), *subject):
        raise UnsupportedError(
            f"keys and values of a recompute path are not to be had of {adapter.facts.architecture}: its attention does not show "
            "them in a forward without a cache, and with one the prompt itself has other logits; leave the cache sites (and a "
            "policy of the recompute path) out, as in record='resid_post'."
        )


# Whether rows may be let go of --------------------------------------------------------------------


@torch.no_grad()
def scores_by_row(adapter: Adapter) -> bool:
    """Whether attention minds the number of a key's row besides what the row holds, as a bias for
    distance does.

    Asked of the model and not of its config, which each architecture writes its own way. A few
    rows with keys of zeros all have the same score; so it does not matter which of them is the only
    one that has values, unless its number does.

    Args:
        adapter: The model; what is found is kept for it.
    """
    return bool(adapter.checked_once(lambda: _scores_by_row(adapter), "scores by row"))


def _scores_by_row(adapter: Adapter) -> bool:
    facts = adapter.facts
    count = max(
        min(16, facts.context - 1, *(window - 1 for window in facts.windows if window is not None)),
        2,
    )
    tokens = (torch.arange(count + 1, device=adapter.device)[None] * 7 + 3) % facts.vocabulary

    def logits(row: int | None) -> Tensor:
        store = own_store(adapter, ExecutionPath(), 1, count, 1, ())
        adapter.forward(tokens[:, :count], store)
        for layer in range(facts.layers):
            keys, values = store.keys_values(layer)
            newest = values[:, :, -1] * count
            keys.zero_(), values.zero_()
            if row is not None:
                values[:, :, row] = newest
        return adapter.forward(tokens[:, count:], store).double()

    with adapter.own_state([]), hooks_suspended(adapter.model):
        none, first, last = map(logits, (None, 0, count - 1))
    # Softmax gives equal scores equal weights, so that but for rounding nothing is left of the
    # difference.
    effect = torch.maximum((first - none).abs().max(), (last - none).abs().max())
    return bool((first - last).abs().max() > effect / 16)


# Whether the preallocated store gives the same bits -----------------------------------------------


def same_bits(
    adapter: Adapter, path: ExecutionPath, batch: int, length: int, max_new_tokens: int
) -> bool:
    """Whether the preallocated store gives the bits of the model's own cache at every length that
    will be run.

    Whole decodes of this shape are run on both, over other tokens, until enough numbers were
    compared.

    Args:
        adapter: The model, in the path's dtype.
        path: The path; what is found is kept for it and the shape.
        batch: Number of sequences.
        length: Positions of the prompt.
        max_new_tokens: Most positions that are fed after it.
    """

    def alike() -> bool:
        turn, numbers = 0, 0
        while numbers < CHECKED_NUMBERS:
            if not (count := _alike(adapter, path, batch, length, max_new_tokens, turn)):
                return False
            turn, numbers = turn + 1, numbers + count
        return True

    return bool(
        adapter.checked_once(
            alike, "cache", str(path), autocast(adapter.device), batch, length, max_new_tokens
        )
    )


def _alike(
    adapter: Adapter, path: ExecutionPath, batch: int, length: int, max_new_tokens: int, turn: int
) -> int:
    """Feeds the same tokens through both stores: how many numbers were the same, or 0 if one was
    not.
    """
    ids = (
        torch.arange(batch * (length + max_new_tokens), device=adapter.device) * 7 + turn * 31 + 3
    ) % adapter.facts.vocabulary
    tokens, numbers = ids.reshape(batch, -1), 0
    checked = [
        _CheckedStore(adapter, path, stores, batch, length, max_new_tokens)
        for stores in (own_store, growing_store)
    ]
    for piece in (*in_chunks(tokens[:, :length], path.chunk), *tokens[:, length:].split(1, 1)):
        own, growing = (each.feed(piece) for each in checked)
        if not all(torch.equal(a, b) for a, b in zip(own, growing, strict=True)):
            return 0
        numbers += sum(tensor.numel() for tensor in own)
    return numbers


class _CheckedStore:
    """One model on one store, and all that it shows in each forward."""

    def __init__(
        self,
        adapter: Adapter,
        path: ExecutionPath,
        stores: Stores,
        batch: int,
        length: int,
        max_new_tokens: int,
    ) -> None:
        layers = range(adapter.facts.layers)
        sites = [
            site for site in CHECKED_SITES if all(adapter.supports(site, layer) for layer in layers)
        ]
        self.adapter, self.recorder = adapter, Recorder(adapter, sites, positions="all")
        policy = policy_listeners(path.policy, adapter.facts.layers, lambda: self.store)
        self.forwards = HookedForwards(
            adapter, path.kernels.mode(adapter), [self.recorder.listeners, policy]
        )
        self.store = stores(adapter, path, batch, length, max_new_tokens, [self.recorder])

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> list[Tensor]:
        """The logits of the tokens and every recorded site."""
        self.recorder.begin_step(0)
        with self.forwards.attached():
            logits = self.forwards.call(self.adapter.forward, tokens, self.store)
        self.store.settle()
        return [logits, *self.recorder.popped()]
