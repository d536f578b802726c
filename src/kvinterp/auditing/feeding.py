"""Feeding a model in any way that its users do: in batches, with masks, positions and caches of the caller's."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.blocks import UNMASKED, BlockModel, Masking
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.watch import Watch, watching
from kvinterp.models import Adapter
from kvinterp.models.hooks import first_of, put_first
from kvinterp.paths.kernels import Kernels

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


class Runner(BlockModel):
    """A model fed with masks, positions and caches of the caller's, its forwards counted.

    Args:
        adapter: The model, already in its dtype.
        kernels: The kernel mode; default: the machine's own.
        positions: As for :class:`BlockModel`.
        unit: The unit roundoff of what computes; default: that of the model's dtype.

    Attributes:
        forwards: How many forwards it ran.
        stands_in: A block whose output is given in the place of the logits, or None.
        watched: A block that is watched in every forward, or None; ``seen`` holds what was seen, in order.
    """

    def __init__(
        self, adapter: Adapter, kernels: Kernels | None = None, positions: str = "own", unit: float | None = None
    ) -> None:
        super().__init__(adapter, kernels, positions)
        self.kernels = kernels
        self.unit = unit_roundoff(adapter.dtype) if unit is None else unit
        self.forwards = 0
        self.stands_in: int | None = None
        self.watched: int | None = None
        self.seen: list[Seen] = []

    def otherwise(self, **more: Any) -> Runner:
        """Another one of the same model, with some arguments changed."""
        given = {"kernels": self.kernels, "positions": self.positions, "unit": self.unit}
        return Runner(self.adapter, **{**given, **more})

    def tokens(self, *rows: Sequence[int]) -> Tensor:
        """Rows of equal length, on the model's device."""
        return torch.tensor([list(row) for row in rows], device=self.device)

    def forward(
        self, tokens: Tensor, cache: Any = None, start: int = 0, masking: Masking = UNMASKED, cached: str = "yes"
    ) -> tuple[Tensor, Any]:
        """As :meth:`BlockModel.forward`, counted and looked at."""
        self.forwards += 1
        made: list[Tensor] = []
        batch, new = tokens.shape
        watches = [] if self.watched is None else [Watch(self, self.watched, new)]
        with contextlib.ExitStack() as hooks, watching(watches):
            if self.stands_in is not None:
                block = self.blocks[self.stands_in]
                hooks.enter_context(block.register_forward_hook(lambda _, __, out: made.append(first_of(out))))
            logits, cache = super().forward(tokens, cache, start, masking, cached)
        total = new + (start if cached == "yes" else 0)
        self.seen += [Seen(cached == "yes", batch, new, total, watch) for watch in watches]
        return (made[0] if made else logits), cache

    def decode(self, tokens: Tensor, prefill: int, masking: Masking = UNMASKED, cache: Any = None) -> tuple[Tensor, Any]:
        """Logits from the prompt's last row on, the rest fed one by one: ``[batch, 1 + steps, vocabulary]``, and the cache."""
        logits, cache = self.feed(tokens[:, :prefill], cache, 0, masking.of(0, prefill))
        made, cache = self.singly(tokens, prefill, cache, masking)
        return torch.cat([logits[:, -1:], made], 1), cache

    def singly(
        self,
        tokens: Tensor,
        start: int,
        cache: Any,
        masking: Masking = UNMASKED,
        then: Callable[[Any], Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """The logits of each token from ``start`` on, fed one by one on a cache, and the cache.

        Args:
            tokens: All of them, those on the cache too.
            start: How many are on the cache.
            cache: What holds them.
            masking: Of all of them.
            then: Called with the cache after every token.
        """
        made = []
        for at in range(start, tokens.shape[1]):
            logits, cache = self.feed(tokens[:, at : at + 1], cache, at, masking.of(at, at + 1))
            made.append(logits[:, -1])
            if then is not None:
                then(cache)
        return torch.stack(made, 1), cache

    def in_chunks(self, tokens: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Any]:
        """The logits of a prompt fed in chunks of these sizes, each on the cache of those before, and the cache."""
        start, made, cache = 0, [], None
        for size in sizes:
            logits, cache = self.feed(tokens[:, start : start + size], cache, start)
            made.append(logits)
            start += size
        return torch.cat(made, 1), cache

    @contextlib.contextmanager
    def rounding(self, length: int, seed: int = 0) -> Iterator[None]:
        """Moves what every block returns by as much as its rounding may, at random."""
        size, generator = self.roundoff(length), torch.Generator().manual_seed(seed)

        def moved(_: nn.Module, __: Any, output: Any) -> Any:
            made = first_of(output)
            noise = torch.rand(made.shape, generator=generator, dtype=torch.float64).to(made.device) * 2 - 1
            return put_first(output, (made.double() * (1 + size * noise)).to(made.dtype))

        with contextlib.ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_hook(moved))
            yield

    def roundoff(self, length: int = 1) -> float:
        """How far rounding moves a sum as long as the model is wide, or as the text is long."""
        # Sums are kept in float32 for 16-bit tensors, so that their length does not matter there.
        return self.unit * (1.0 if self.narrow else math.sqrt(max(length, self.adapter.facts.width)))

    @property
    def narrow(self) -> bool:
        """Whether the model is in 16 bits."""
        return self.dtype in NARROW


def lacking(cache: Any, method: str) -> str:
    """Which part of a cache has no such method, in a sentence; empty where all have it, or where the cache has its own."""
    from transformers import Cache

    if isinstance(cache, Cache) and getattr(type(cache), method, None) is not getattr(Cache, method, None):
        return ""
    if not hasattr(cache, method):
        return f"{type(cache).__name__}, this model's cache, has no {method}()."
    layer = next((layer for layer in getattr(cache, "layers", []) if not hasattr(layer, method)), None)
    return "" if layer is None else f"{type(layer).__name__}, of this model's cache, has no {method}()."
