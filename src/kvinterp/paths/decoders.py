"""Decoders beside :class:`Runner` for decodes that are only compared by their logits.

Several decodes of one prompt, under other strategies and seeds, begin with the same tokens, and
what a path gives for tokens is
always the same: :class:`Memory` lets each step be computed once. :class:`Suffixed` is the null of
the recompute path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.models import Adapter, dtype_named
from kvinterp.paths.forwards import HookedForwards
from kvinterp.paths.loops import Runner
from kvinterp.paths.model_cache import path_store, uncached
from kvinterp.paths.path import ExecutionPath

SUFFIX = 8
"""Tokens that :class:`Suffixed` puts behind the prefix."""

Fed = tuple[tuple[int, ...], ...]
"""The tokens of each row, step by step."""


class Memory:
    """The logits that paths gave for the texts they were fed.

    Every new step adds a vocabulary of them: one memory is for a few prompts.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, Fed], dict[Fed, Tensor]] = {}

    def decoder(
        self,
        adapter: Adapter,
        path: ExecutionPath,
        prompt: Tensor,
        max_new_tokens: int,
        hooks: Sequence[Any] = (),
    ) -> _Remembered:
        """A decoder that computes only what is not known yet; made as a :class:`Runner` is, whose bits
        it gives.
        """
        logits = self._known.setdefault((str(path), _rows(prompt)), {})
        return _Remembered(logits, adapter, path, prompt, max_new_tokens)


class _Remembered:
    def __init__(
        self,
        logits: dict[Fed, Tensor],
        adapter: Adapter,
        path: ExecutionPath,
        prompt: Tensor,
        max_new_tokens: int,
    ) -> None:
        self._known, self._adapter, self._path, self._prompt, self._max_new_tokens = (
            logits,
            adapter,
            path,
            prompt,
            max_new_tokens,
        )
        self._fed: list[Tensor] = []
        self._key: Fed = ()
        self._runner = Runner(adapter, path, prompt, max_new_tokens)
        self._begun, self._attached = 0, contextlib.ExitStack()
        self.cache = self._runner.cache

    def __enter__(self) -> _Remembered:
        self._attached.enter_context(self._runner)
        return self

    def __exit__(self, *error: Any) -> None:
        self._attached.close()

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step; the first call takes no tokens."""
        if tokens is not None:
            self._fed.append(tokens)
            self._key = (*self._key, tuple(tokens.tolist()))
        if self._key not in self._known:
            self._known[self._key] = self._computed().clone()
        return self._known[self._key]

    def _computed(self) -> Tensor:
        """The logits of this step: the runner is brought to it through the steps that it was
        spared.
        """
        at = len(self._fed)
        if self._path.form == "recompute" and self._begun + self._runner.step + 1 < at:
            # Nothing is carried from one step of this path to the next, so it begins with the whole
            # text.
            self._attached.close()
            whole = torch.cat([self._prompt, *(token[:, None] for token in self._fed)], 1)
            self._runner, self._begun = (
                Runner(self._adapter, self._path, whole, self._max_new_tokens - at),
                at,
            )
            self._attached.enter_context(self._runner)
        while self._begun + self._runner.step < at:
            step = self._runner.step + 1
            logits = self._runner.advance(self._fed[self._begun + step - 1] if step else None)
        return logits


def _rows(prompt: Tensor) -> Fed:
    return tuple(map(tuple, prompt.tolist()))


class Suffixed:
    """A recompute path with more tokens behind the newest, which a causal model must not see: what
    that changes is rounding.
    """

    cache = "none"

    def __init__(
        self,
        adapter: Adapter,
        path: ExecutionPath,
        prompt: Tensor,
        max_new_tokens: int,
        hooks: Sequence[Any] = (),
    ) -> None:
        self._adapter, self._path, self._tokens = adapter.at(dtype_named(path.dtype)), path, prompt
        self._filler = prompt.repeat(1, SUFFIX // prompt.shape[1] + 1)[:, :SUFFIX]
        self._forwards = HookedForwards(self._adapter, path.kernels.mode(self._adapter))
        self._attached = contextlib.ExitStack()

    def __enter__(self) -> Suffixed:
        self._attached.enter_context(self._forwards.attached())
        return self

    def __exit__(self, *error: Any) -> None:
        self._attached.close()

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the newest token of the prefix."""
        if tokens is not None:
            self._tokens = torch.cat([self._tokens, tokens[:, None]], 1)
        newest = self._tokens.shape[1] - 1
        whole = torch.cat([self._tokens, self._filler], 1)[:, : self._adapter.facts.context]
        store = uncached(self._adapter, self._path, whole, path_store, ())
        return self._forwards.call(self._adapter.forward, whole, store)[:, newest].to(
            self._tokens.device
        )
