"""Feeding a model in any way that its users do: in batches, with masks, positions and caches of the caller's."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.subject import Subject
from kvinterp.auditing.watch import Watch, watching
from kvinterp.models.native import text_config
from kvinterp.models.transformers_cache import CACHES

__all__ = ["NARROW", "Runner", "Seen", "apart"]

NARROW = (torch.float16, torch.bfloat16)
"""The dtypes in which rounding is not far below what a bug does."""


def apart(mine: Tensor, theirs: Tensor, size: float | None = None) -> float:
    """Largest difference over the largest finite magnitude of ``theirs``; inf where only one of them is a number."""
    a, b = mine.double(), theirs.double()
    gap = (a - b).abs().masked_fill(a == b, 0.0).nan_to_num(math.inf, posinf=math.inf)
    if not gap.numel():
        return 0.0
    worst = gap.max().item()
    size = magnitude(theirs) if size is None else size
    return worst / size if size else (0.0 if worst == 0 else math.inf)


def magnitude(logits: Tensor) -> float:
    """The largest finite magnitude."""
    finite = logits.double()[logits.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


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
        cache_name: What the model calls the cache that it takes and returns.
        tapped: A block whose output is given in the place of the logits, or None.
        watched: A block that is watched in every forward, or None; ``seen`` holds what was seen, in order.
    """

    def __init__(self, subject: Subject, unit: float | None = None) -> None:
        self.subject, self.adapter = subject, subject.adapter
        self.unit = unit_roundoff(subject.dtype) if unit is None else unit
        self.kind, self.device = subject.adapter.kind, subject.adapter.device
        self.model: Any = subject.adapter.model
        self.takes = frozenset(inspect.signature(self.model.forward).parameters)
        self.told_positions = subject.positions == "given" and subject.can_be_told_positions
        self.forwards = 0
        self.tapped: int | None = None
        self.watched: int | None = None
        self.seen: list[Seen] = []
        self.cache_name = next((name for name in CACHES if name in self.takes), "past_key_values")

    def tokens(self, *rows: Sequence[int]) -> Tensor:
        """Rows of equal length, on the model's device."""
        return torch.tensor([list(row) for row in rows], device=self.device)

    def recompute(self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits of every token without a cache, ``[batch, position, vocabulary]``."""
        return self._run(tokens, None, mask, positions, 0, cached=False)[0]

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
        return self._run(tokens, cache, mask, positions, start, cached=True)

    def _run(
        self, tokens: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None, start: int, cached: bool
    ) -> tuple[Tensor, Any]:
        self.forwards += 1
        if self.kind != "native":
            return self._run_lens(tokens, cache, mask, cached)
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": cached}
        if positions is None and self.told_positions:
            positions = torch.arange(start, start + tokens.shape[1], device=self.device).expand(len(tokens), -1)
        if positions is not None and "position_ids" in self.takes:
            given["position_ids"] = positions
        if mask is not None:
            given["attention_mask"] = mask
        if cache is not None:
            given[self.cache_name] = cache
        with self._looking(tokens, start, cached) as made, self.subject._running():
            out = self.model(**given)
        logits = made[0] if made else out.logits
        name = next((n for n in CACHES if getattr(out, n, None) is not None), None)
        if name is None:
            return logits, None
        self.cache_name = name  # The signature may take everything by any name.
        return logits, getattr(out, name)

    @contextlib.contextmanager
    def _looking(self, tokens: Tensor, start: int, cached: bool) -> Iterator[list[Tensor]]:
        """The tapped block's output, once the forward is done; and what is seen of the watched one."""
        made: list[Tensor] = []
        watches = [] if self.watched is None else [Watch(self.subject, self.watched, tokens.shape[1])]
        handle = None
        if self.tapped is not None:
            handle = self.subject.blocks[self.tapped].register_forward_hook(
                lambda _, __, output: made.append(output[0] if isinstance(output, tuple | list) else output)
            )
        try:
            with watching(watches):
                yield made
        finally:
            if handle is not None:
                handle.remove()
        batch, new = tokens.shape
        self.seen += [Seen(cached, batch, new, (start if cached else 0) + new, watch) for watch in watches]

    def _run_lens(self, tokens: Tensor, cache: Any, mask: Tensor | None, cached: bool) -> tuple[Tensor, Any]:
        if mask is not None:
            raise TypeError("masks are given to transformers models only")
        if not cached:
            return self.subject.recompute(tokens), None
        return self.subject.feed(tokens, cache)

    def decode(
        self, tokens: Tensor, prefill: int, mask: Tensor | None = None, positions: Tensor | None = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        """Logits from the prompt's last row on, the rest fed one by one: ``[batch, 1 + steps, vocabulary]``, and the cache."""

        def part(whole: Tensor | None, start: int, stop: int) -> Tensor | None:
            return None if whole is None else whole[:, start:stop]

        logits, cache = self.feed(tokens[:, :prefill], cache, part(mask, 0, prefill), part(positions, 0, prefill))
        made = [logits[:, -1]]
        for at in range(prefill, tokens.shape[1]):
            logits, cache = self.feed(
                tokens[:, at : at + 1], cache, part(mask, 0, at + 1), part(positions, at, at + 1), start=at
            )
            made.append(logits[:, -1])
        return torch.stack(made, 1), cache

    @contextlib.contextmanager
    def rounding(self, length: int, seed: int = 0) -> Iterator[None]:
        """Moves what every block returns by as much as its rounding may, at random."""
        size, generator = self.roundoff(length), torch.Generator().manual_seed(seed)

        def moved(_: nn.Module, __: Any, output: Any) -> Any:
            made = output[0] if isinstance(output, tuple) else output
            noise = torch.rand(made.shape, generator=generator, dtype=torch.float64).to(made.device) * 2 - 1
            new = (made.double() * (1 + size * noise)).to(made.dtype)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        handles = [block.register_forward_hook(moved) for block in self.subject.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def roundoff(self, length: int = 1) -> float:
        """How far rounding moves a sum as long as the model is wide, or as the text is long."""
        # Sums are kept in float32 for 16-bit tensors, so that their length does not matter there.
        return self.unit * (1.0 if self.narrow else math.sqrt(max(length, self.adapter.facts.width)))

    @property
    def narrow(self) -> bool:
        """Whether the model is in 16 bits."""
        return self.subject.dtype in NARROW

    def new_cache(self) -> Any:
        """The cache that transformers makes for this model."""
        from transformers import DynamicCache

        return DynamicCache(config=text_config(self.adapter.source))

    def recurrent_layers(self, cache: Any) -> list[int]:
        """Layers whose cache keeps a state instead of keys and values."""
        return [n for n in range(len(self.subject.blocks)) if self.subject.states(cache, n)]
