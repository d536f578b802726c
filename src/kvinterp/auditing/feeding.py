"""Feeding a model in any way that its users do: in batches, with masks, positions and caches of the caller's."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.subject import Subject, first_of
from kvinterp.auditing.watch import Watch, watching

__all__ = ["NARROW", "Runner", "Seen", "lacking"]

NARROW = (torch.float16, torch.bfloat16)
"""The dtypes in which rounding is not far below what a bug does."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One forward with a block watched.

    Attributes:
        cached: Whether it fed a cache.
        batch: Rows of the batch.
        new: Tokens fed.
        total: Positions after it.
        watch: What was seen in the block.
    """

    cached: bool
    batch: int
    new: int
    total: int
    watch: Watch


class Runner:
    """Feeds a model of any kind, with masks, positions and caches of the caller's.

    Args:
        subject: The model.
        unit: The unit roundoff of what computes; that of the model's dtype unless given.

    Attributes:
        forwards: How many forwards it ran.
        tapped: A block whose output is given in the place of the logits, or None.
        watched: A block that is watched in every forward, or None; ``seen`` holds what was seen, in order.
    """

    def __init__(self, subject: Subject, unit: float | None = None) -> None:
        self.subject, self.adapter = subject, subject.adapter
        self.unit = unit_roundoff(subject.dtype) if unit is None else unit
        self.kind, self.device = subject.adapter.kind, subject.adapter.device
        self.model: Any = subject.adapter.model
        self.takes = subject.takes
        self.forwards = 0
        self.tapped: int | None = None
        self.watched: int | None = None
        self.seen: list[Seen] = []

    def tokens(self, *rows: Sequence[int]) -> Tensor:
        """Rows of equal length, on the model's device."""
        return torch.tensor([list(row) for row in rows], device=self.device)

    def recompute(self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits of every token without a cache, ``[batch, position, vocabulary]``."""
        return self._run(tokens, None, 0, mask, positions, "no")[0]

    def feed(
        self,
        tokens: Tensor,
        cache: Any = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Any]:
        """Logits of new tokens and the cache after them.

        Args:
            tokens: ``[batch, new]``.
            cache: What the call before returned, a cache object of transformers', or None for the model's own.
            mask: ``[batch, past + new]``, or None.
            positions: ``[batch, new]``, or None for what the model makes by itself.
            start: How many tokens came before.
        """
        return self._run(tokens, cache, start, mask, positions, "yes")

    def _run(
        self, tokens: Tensor, cache: Any, start: int, mask: Tensor | None, positions: Tensor | None, cached: str
    ) -> tuple[Tensor, Any]:
        self.forwards += 1
        if self.kind != "native":
            if mask is not None:
                raise TypeError("masks are given to transformers models only")
            return self.subject.forward(tokens, cache, cached=cached)
        with self._looking(tokens, start, cached) as made:
            logits, cache = self.subject.forward(tokens, cache, start, mask, positions, cached)
        return (made[0] if made else logits), cache

    @contextlib.contextmanager
    def _looking(self, tokens: Tensor, start: int, cached: str) -> Iterator[list[Tensor]]:
        """The tapped block's output, once the forward is done; and what is seen of the watched one."""
        made: list[Tensor] = []
        watches = [] if self.watched is None else [Watch(self.subject, self.watched, tokens.shape[1])]
        with contextlib.ExitStack() as hooks, watching(watches):
            if self.tapped is not None:
                block = self.subject.blocks[self.tapped]
                hooks.callback(block.register_forward_hook(lambda _, __, out: made.append(first_of(out))).remove)
            yield made
        batch, new = tokens.shape
        total = new + (start if cached == "yes" else 0)
        self.seen += [Seen(cached == "yes", batch, new, total, watch) for watch in watches]

    def decode(
        self, tokens: Tensor, prefill: int, mask: Tensor | None = None, positions: Tensor | None = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        """Logits from the prompt's last row on, the rest fed one by one: ``[batch, 1 + steps, vocabulary]``, and the cache."""
        seen, places = (None if part is None else part[:, :prefill] for part in (mask, positions))
        logits, cache = self.feed(tokens[:, :prefill], cache, seen, places)
        made, cache = self.singly(tokens, prefill, cache, mask, positions)
        return torch.stack([logits[:, -1], *made], 1), cache

    def singly(
        self,
        tokens: Tensor,
        start: int,
        cache: Any,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        then: Callable[[Any], Any] | None = None,
    ) -> tuple[list[Tensor], Any]:
        """The logits of each token from ``start`` on, fed one by one on a cache, and the cache.

        Args:
            tokens: All of them, those on the cache too; and so the mask and the positions.
            start: How many are on the cache.
            cache: What holds them.
            mask: ``[batch, position]``, or None.
            positions: ``[batch, position]``, or None.
            then: Called with the cache after every token.
        """
        made = []
        for at in range(start, tokens.shape[1]):
            seen = None if mask is None else mask[:, : at + 1]
            places = None if positions is None else positions[:, at : at + 1]
            logits, cache = self.feed(tokens[:, at : at + 1], cache, seen, places, start=at)
            made.append(logits[:, -1])
            if then is not None:
                then(cache)
        return made, cache

    @contextlib.contextmanager
    def rounding(self, length: int, seed: int = 0) -> Iterator[None]:
        """Moves what every block returns by as much as its rounding may, at random."""
        size, generator = self.roundoff(length), torch.Generator().manual_seed(seed)

        def moved(_: nn.Module, __: Any, output: Any) -> Any:
            made = output[0] if isinstance(output, tuple) else output
            noise = torch.rand(made.shape, generator=generator, dtype=torch.float64).to(made.device) * 2 - 1
            new = (made.double() * (1 + size * noise)).to(made.dtype)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        with contextlib.ExitStack() as hooks:
            for block in self.subject.blocks:
                hooks.callback(block.register_forward_hook(moved).remove)
            yield

    def roundoff(self, length: int = 1) -> float:
        """How far rounding moves a sum as long as the model is wide, or as the text is long."""
        # Sums are kept in float32 for 16-bit tensors, so that their length does not matter there.
        return self.unit * (1.0 if self.narrow else math.sqrt(max(length, self.adapter.facts.width)))

    @property
    def narrow(self) -> bool:
        """Whether the model is in 16 bits."""
        return self.subject.dtype in NARROW

    def recurrent_layers(self, cache: Any) -> list[int]:
        """Layers whose cache keeps a state instead of keys and values."""
        return [n for n in range(len(self.subject.blocks)) if self.subject.states(cache, n)]


def lacking(cache: Any, method: str) -> str:
    """Which part of a cache has no such method, in a sentence; empty where all have it."""
    if not hasattr(cache, method):
        return f"{type(cache).__name__}, this model's cache, has no {method}()."
    layer = next((layer for layer in getattr(cache, "layers", []) if not hasattr(layer, method)), None)
    return "" if layer is None else f"{type(layer).__name__}, of this model's cache, has no {method}()."
