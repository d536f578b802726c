"""The first decode step moves the offset on by the prompt's length once more.

https://github.com/skyzh/tiny-llm/issues/46, 2025-08. `--mended` runs it without the fault.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """A model of somebody's own: `full(ids)` and `step(ids, cache)`."""

    full: Callable[[Tensor], Tensor]
    step: Callable[[Tensor, Any], tuple[Tensor, Any]]


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


Cache = dict[str, Any]


class Decoder(nn.Module):
    """Two layers of attention with rotary positions; keys and values are appended to a cache of one's own.

    Args:
        fault: Whether the fault that was reported is in it.
        window: How many tokens a query sees, itself included; None for all.
    """

    heads, size = 4, 8

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__()
        self.fault, self.window, width = fault, window, self.heads * self.size
        self.tokens, self.head = nn.Embedding(99, width), nn.Linear(width, 99)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        start = self.start(cache)
        positions, x = torch.arange(start, start + ids.shape[1]), self.embedded(ids, start)
        saved = []
        for n, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            q, k, v = (part.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            q, (k, v, kept) = (
                self.turned(q, positions),
                self.stored(k, v, positions, None if cache is None else cache["kv"][n]),
            )
            mixed = self.attended(q, k, v, cache, positions)
            x = x + mix(mixed.transpose(1, 2).flatten(2))
            saved.append(kept)
        return self.head(x), {"kv": saved, "length": self.counted(ids, cache)}

    def start(self, cache: Cache | None) -> int:
        """The position of the first new token."""
        return 0 if cache is None else cache["length"]

    def counted(self, ids: Tensor, cache: Cache | None) -> int:
        """The position behind the last new token."""
        return self.start(cache) + ids.shape[1]

    def embedded(self, ids: Tensor, start: int) -> Tensor:
        """What enters the first layer."""
        return self.tokens(ids)

    def angles(self, positions: Tensor) -> Tensor:
        """Rotary angles, `[position, half of a head]`."""
        return positions[:, None] * 0.1 ** torch.arange(self.size // 2)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys `[row, head, position, size]`, rotated."""
        angles, (a, b) = self.angles(positions), x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def stored(self, k: Tensor, v: Tensor, positions: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        """Keys and values for attention, and what the cache keeps of them."""
        k = self.turned(k, positions)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        return k, v, (k, v)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, positions: Tensor) -> Tensor:
        """Attention."""
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.seen(q.shape[2], k.shape[2]))

    def seen(self, new: int, columns: int) -> Tensor:
        """Which of the columns each new token sees; the newest column is the newest token's own."""
        before = columns - new
        sees = torch.ones(new, columns, dtype=torch.bool).tril(before)
        return sees if self.window is None else sees.triu(before - self.window + 1)


class OffsetTwice(Decoder):
    def counted(self, ids: Tensor, cache: Cache | None) -> int:
        length = super().counted(ids, cache)
        return length + ids.shape[1] if self.fault and cache is None else length


def own(kind: type[nn.Module], window: int | None = None) -> Callable[[bool], OwnCode]:
    """Builds a decoder as two functions."""

    def build(fault: bool) -> OwnCode:
        torch.manual_seed(0)
        model = kind(fault, window).eval()
        full = getattr(model, "full", lambda ids: model(ids)[0])
        return OwnCode(full, getattr(model, "step", model))

    return build


def of_steps(*parts: int) -> Callable[[OwnCode], float]:
    """Feeds one row in such parts on one cache, against one plain forward of the row."""

    @torch.no_grad()
    def shows(model: OwnCode) -> float:
        ids, cache, got = text(1, sum(parts)), None, []
        for part in ids.split(parts, 1):
            logits, cache = model.step(part, cache)
            got.append(logits)
        return apart(torch.cat(got, 1), model.full(ids))

    return shows


build = own(OffsetTwice)
shows = of_steps(9, 1, 1)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
