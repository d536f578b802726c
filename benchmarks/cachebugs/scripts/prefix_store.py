"""Mamba: a prompt in parts leaves a block's state half-way, and a later prompt that begins alike takes it.

https://github.com/vllm-project/vllm/issues/34587, 2026-02. `--mended` runs it without the fault.
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


class PrefixStore(nn.Module):
    """A recurrent model whose states are kept for blocks of four tokens and taken for the next prompt that begins alike.

    A part of a prompt that ends within a block leaves its state for that block, which counts as whole once its tokens are there.
    """

    block = 4

    def __init__(self, fault: bool, window: int | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.tokens, self.inner, self.head = nn.Embedding(99, 32), nn.Linear(32, 32), nn.Linear(32, 99)
        self.store: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def scanned(self, ids: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for x in self.tokens(ids):
            state = (0.8 * state + self.inner(x)).tanh()
            states.append(state)
        return self.head(torch.stack(states)), states

    def full(self, ids: Tensor) -> Tensor:
        return torch.stack([self.scanned(row, self.head.weight.new_zeros(32))[0] for row in ids])

    def step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits, rows = [], []
        for n, row in enumerate(ids):
            before, state, partial = ((), self.head.weight.new_zeros(32), None) if cache is None else cache[n]
            known = self.hit(tuple(row.tolist())) if cache is None else ()
            head = [self.store[known[: end + self.block]][1] for end in range(0, len(known), self.block)]
            state = self.store[known][0] if known else state
            out, states = self.scanned(row[len(known) :], state)
            logits.append(torch.cat([*head, out]))
            text = before + tuple(row.tolist())
            partial = self.saved(text, len(before) + len(known), states, torch.cat([*head, out]), partial)
            rows.append((text, states[-1], partial))
        return torch.stack(logits), rows

    def hit(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """The longest run of blocks at the text's beginning that is stored, and leaves a token to compute."""
        end = 0
        while end + self.block < len(text) and text[: end + self.block] in self.store:
            end += self.block
        return text[:end]

    def saved(self, text: tuple[int, ...], start: int, states: list[Tensor], logits: Tensor, partial: Any) -> Any:
        """Stores the blocks that this part completes; returns what it leaves of the block in which it ends."""
        for end in range(self.block, len(text) + 1, self.block):
            if end <= start or text[:end] in self.store:
                continue
            inside = end - self.block >= start
            first = end - self.block - (len(text) - len(logits))
            if inside:
                self.store[text[:end]] = (states[end - start - 1], logits[first : first + self.block])
            elif partial is not None:
                earlier, said = partial
                rest = logits[: self.block - len(said)]
                state = earlier if self.fault else states[end - start - 1]
                self.store[text[:end]] = (state, torch.cat([said, rest]))
        left = len(text) % self.block
        return (states[-1], logits[-left:]) if 0 < left <= len(logits) and left <= len(text) - start else None


def own(kind: type[nn.Module], window: int | None = None) -> Callable[[bool], OwnCode]:
    """Builds a decoder as two functions."""

    def build(fault: bool) -> OwnCode:
        torch.manual_seed(0)
        model = kind(fault, window).eval()
        full = getattr(model, "full", lambda ids: model(ids)[0])
        return OwnCode(full, getattr(model, "step", model))

    return build


@torch.no_grad()
def shows_in_a_prompt_that_begins_alike(model: OwnCode) -> float:
    ids = text(1, 9)
    want = model.full(ids)
    _, cache = model.step(ids[:, :3], None)
    model.step(ids[:, 3:], cache)
    got, _ = model.step(ids[:, :7], None)
    return apart(got, want[:, :7])


build = own(PrefixStore)
shows = shows_in_a_prompt_that_begins_alike


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
