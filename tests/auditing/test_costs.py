"""What an audit does not run twice, and not in a fixed order where no block in question needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build

import kvinterp as kv
from kvinterp.auditing.blocks import BlockModel, prompts_for, referenced
from kvinterp.auditing.ladder import prefix_plan
from kvinterp.auditing.measure import measure_precision
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


def test_lengths_between_are_run_where_they_decide() -> None:
    """What serves and what sees the smallest errors: half of an audit was a fixed order of lengths that it cannot tell apart."""
    audit = kv.audit(
        build("llama"),
        rungs=("bfloat16", "float32", "float64"),
        lengths=(5, 9, 13),
        steps=1,
        checks="none",
        detail="everything",
    )
    for rung in audit.rungs:
        decides = rung.name in ("float32", "float64")
        assert set(rung.steps["prefill"]) == ({5, 9, 13} if decides else {5, 13})
        assert bool(len(rung.sweep)) is decides
        assert set(rung.fixed.local["prefill"]) == {5, 13}
        assert set(rung.fixed.local["prompt"]) == {0}
        assert not len(rung.fixed.sweep)
    asked = audit.rung("float32")
    assert set(asked.steps.loc[asked.steps["prompt"] == 1, "prefill"]) == {5, 13}


def test_a_prefix_that_is_the_whole_text_is_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the recomputation of all tokens: it was made again as the null of the longest length."""
    lengths, own = [], BlockModel.recompute

    def counted(self: BlockModel, tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return own(self, tokens)

    monkeypatch.setattr(BlockModel, "recompute", counted)
    model, plan = kv.wrap(build("llama")), prefix_plan(prompts_for(kv.wrap(build("llama")), 1, 14), (5, 13), 1, 14)
    measure_precision(model, plan)
    assert lengths.count(14) == 1, lengths


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
