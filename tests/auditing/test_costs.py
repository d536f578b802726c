"""What an audit does not run twice, and not in a fixed order where no block in question needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build

import kvinterp as kv
from kvinterp.auditing.blocks import BlockModel, referenced
from kvinterp.paths.kernels import BatchInvariant, fixed_order

TOKENS = torch.tensor([[3, 5, 7, 9, 2, 4, 8, 10]])


def made(model: Any, monkeypatch: pytest.MonkeyPatch, only: list[int] | None) -> tuple[int, Any]:
    """How many products a forward makes in a fixed order, and what every block returned."""
    count, product = [0], fixed_order.product

    def counted(*args: Any) -> Any:
        count[0] += 1
        return product(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fixed_order, "product", counted)
        with referenced(BlockModel(kv.wrap(model), BatchInvariant(), only=only), TOKENS) as hooks:
            before, _ = count[0], hooks.recompute(TOKENS.shape[1])
            return count[0] - before, {layer: tensor.clone() for (layer, _), tensor in hooks.outputs.items()}


def test_a_fixed_order_rests_outside_the_block_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model was run in a fixed order to ask it of one block: of 30 layers, 30 times the work and more."""
    model = build("llama")
    blocks = len(model.model.layers)
    whole, _ = made(model, monkeypatch, None)
    one, _ = made(model, monkeypatch, [1])
    head, _ = made(model, monkeypatch, [blocks])
    none, _ = made(model, monkeypatch, [])
    # What stands outside all blocks (positions, the last norm) has that order always.
    assert 0 <= none < head < one < whole
    assert whole - none == blocks * (one - none) + (head - none)
    assert not [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


def test_the_block_in_question_has_the_bits_of_a_whole_model_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block is given the same rows either way, so that its own order is all that can differ."""
    model = build("llama")
    _, whole = made(model, monkeypatch, None)
    _, one = made(model, monkeypatch, [0])
    assert torch.equal(whole[0], one[0])
