"""A model and cache of one's own: every cached step begins at position 0.

https://github.com/Lightning-AI/litgpt/issues/2165, 2025-11. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


class Scratch(nn.Module):
    """A model from scratch with learned positions, which every cached step begins at 0."""

    def __init__(self, fault: bool, width: int = 32) -> None:
        super().__init__()
        self.fault = fault
        self.tokens, self.positions, self.head = nn.Embedding(99, width), nn.Embedding(256, width), nn.Linear(width, 99)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        start = 0 if cache is None or self.fault else cache[0][0].shape[1]
        x, new = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1])), []
        for n, layer in enumerate(self.layers):
            q, k, v = layer(x).chunk(3, -1)
            if cache is not None:
                k, v = torch.cat([cache[n][0], k], 1), torch.cat([cache[n][1], v], 1)
            sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
            new.append((k, v))
        return self.head(x), new


def from_scratch(fault: bool) -> nn.Module:
    torch.manual_seed(0)
    return Scratch(fault).eval()


@torch.no_grad()
def shows_from_scratch(model: Any) -> float:
    ids = text(1, 11)
    want, (_, cache) = model(ids)[0], model(ids[:, :9])
    got, _ = model(ids[:, 9:10], cache)
    return apart(got, want[:, 9:10])


build = from_scratch
shows = shows_from_scratch


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
