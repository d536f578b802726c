"""Designs say what they are: arms of one size, levels as labelled, effects that least squares gives."""

import dataclasses

import pytest
import torch

from kvinterp.models import ModelInfo
from kvinterp.papers.behaviour.designs import DESIGNS, FACTORS, GRID, designed, effects, factorial, is_seeded, reseeded
from kvinterp.policies import CacheRows, policy_named

FACTS = ModelInfo("tiny", "Tiny", 5, 4, 2, 64, 256, 10, 4096, (None,) * 5, True, "eager")
RMS = (0.2, 0.5, 0.57735, 0.9, 1.15)


def multipliers(text: str) -> torch.Tensor:
    ones = torch.ones(1, 2, 2000, 64)
    keys, _ = policy_named(text).start(FACTS).write(ones, ones, CacheRows(0, 0, 2000, True))
    return keys.double().flatten()


@pytest.mark.parametrize("rms", RMS)
def test_every_arm_of_the_factorial_is_as_large_and_does_what_its_levels_say(rms: float) -> None:
    arms = factorial(rms)
    for text, (flips, shift, magnitude) in arms.items():
        m = multipliers(text)
        assert float(((m - 1) ** 2).mean().sqrt()) == pytest.approx(rms, rel=0.02), text
        assert bool((m < 0).any()) == bool(flips), text
        assert (abs(float(m.mean()) - 1) > 0.005) == bool(shift), text
        assert (float(m.abs().std()) > 0.005) == bool(magnitude), text


def test_single_factor_arms_and_effects_that_leave_the_others_out() -> None:
    arms = factorial(0.57735)
    # uniform(-1,1) is the largest error there is with neither flips nor shift.
    assert "uniform(-1,1)" in arms
    assert {(1, 0, 0), (0, 1, 0), (0, 0, 1)} <= set(arms.values())
    for row, (name, weights) in enumerate(effects(arms).items()):
        assert name == FACTORS[row]
        for other in range(3):
            made = sum(weights[text] * levels[other] for text, levels in arms.items())
            assert made == pytest.approx(float(other == row), abs=1e-9)
        assert sum(weights.values()) == pytest.approx(0, abs=1e-9)


def test_places_are_all_there_once() -> None:
    layers = designed("layers", "normal(0,0.5)", 0.5, FACTS).policies
    assert [policy_named(text).layers for text in layers] == [(0, 1), (2, 3, 4)]
    assert [policy_named(text).on for text in designed("tensors", "normal(0,0.5)", 0.5, FACTS).policies] == ["k", "v"]
    two = designed("heads", "normal(0,0.5)", 0.5, FACTS)
    assert [policy_named(text).heads for text in two.policies] == [(0,), (1,)]
    # Of two heads the second against the first says the same again.
    assert len(two.contrasts) == 1
    four = designed("heads", "normal(0,0.5)", 0.5, dataclasses.replace(FACTS, kv_heads=4))
    assert len(four.contrasts) == 4
    for name in DESIGNS:
        for weights in designed(name, "normal(0,0.5)", 0.5, FACTS).contrasts.values():
            assert sum(weights.values()) == pytest.approx(0, abs=1e-9)
    assert designed("grid", "normal(0,0.5)", 0.5, FACTS).policies == GRID


def test_other_draws_are_another_seed_in_a_chain_too() -> None:
    assert not is_seeded(policy_named("identity"))
    assert reseeded(policy_named("identity"), 3) == policy_named("identity")
    chain = policy_named("normal(0,0.5)+identity+uniform(-1,1)")
    assert is_seeded(chain)
    assert str(reseeded(chain, 3)) == "normal(0,0.5,seed=3)+identity+uniform(-1,1,seed=3)"
