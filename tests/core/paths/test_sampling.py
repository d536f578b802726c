"""Sampling: whole numbers are added, so that every device draws the same token, and no operation is one torch calls random."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvinterp.paths import Strategy, strategy_named

STRATEGIES = ("greedy", "top_k(20,0.8)", "top_p(0.9,1.3)", "top_p(1.0,1.0)")
UNDETERMINED = {
    "cumsum", "cumprod", "put_", "put", "histc", "bincount", "scatter_reduce", "index_add", "index_add_", "scatter_add",
    "scatter_add_", "index_put_", "median", "multinomial", "kthvalue", "grid_sampler_2d", "nll_loss_forward",
}  # fmt: skip
"""torch's list in the documentation of use_deterministic_algorithms; of cumsum floating-point numbers only."""


class Forbids(TorchDispatchMode):
    """Collects the operations of torch's list that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in UNDETERMINED and not (name == "cumsum" and not args[0].is_floating_point()):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def logits_and_numbers(rows: int = 64, vocabulary: int = 997) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    logits[:, -5:] = -torch.inf
    return logits, torch.rand(rows, generator=generator, dtype=torch.float64)


def by_a_floating_point_sum(strategy: Strategy, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token whose share of the running sum of probabilities holds the random number, as a textbook has it."""
    total = strategy.distribution(logits.double()).cumsum(-1)
    return torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)[:, 0]


@pytest.mark.parametrize("text", STRATEGIES)
def test_no_operation_is_one_that_torch_calls_nondeterministic(text: str) -> None:
    with Forbids() as seen:
        strategy_named(text).choose(*logits_and_numbers())
    assert seen.found == []


@pytest.mark.parametrize("text", STRATEGIES[1:])
def test_the_tokens_are_those_of_a_floating_point_sum(text: str) -> None:
    logits, uniform = logits_and_numbers()
    strategy = strategy_named(text)
    assert torch.equal(strategy.choose(logits, uniform), by_a_floating_point_sum(strategy, logits, uniform))


def test_the_nucleus_holds_the_fewest_tokens_that_reach_p() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for p, kept in ((0.5, 1), (0.50001, 2), (0.75, 2), (0.875, 3), (1.0, 4)):
        found = strategy_named(f"top_p({p},1.0)").distribution(logits.double())
        assert int((found > 0).sum()) == kept, p


def test_nan_draws_a_token_that_exists() -> None:
    logits = torch.full((2, 5), torch.nan)
    for text in STRATEGIES:
        assert strategy_named(text).choose(logits, torch.tensor([0.1, 0.9]).double()).lt(5).all()
