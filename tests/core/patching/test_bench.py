"""Patching by hand without a front end: the bench gives the sweep's numbers and remembers what it may; so do its maps."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp import metrics
from kvinterp.common.vocabulary import UNCHANGED
from kvinterp.patching import PatchAnswer, PatchRequest
from kvinterp.patching.planted import Planted
from support import Case

PROMPT = "Question: Nora has 8 boxes and Jack has 5. How many more?\nAnswer:"
OTHER = "Question: Nora has 7 boxes and Jack has 5. How many more?\nAnswer:"
STEPS = 6
NATIVE = Case("zoo:gqa2-mini", "native", "sdpa")


@pytest.fixture(scope="module")
def model(load: Any) -> Any:
    return load(Case("zoo:mistral-mini", "hooked"), "float16")


@pytest.mark.hooked
@pytest.mark.each
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
@pytest.mark.parametrize(
    ("site", "layer", "head", "step"),
    [
        ("resid_post", 2, None, "every"),
        ("kv", 3, 1, "every"),
        ("z", 2, 1, 3),
        ("cache_v", 1, None, 2),
        ("pattern", 3, 5, 4),
    ],
)
def test_the_bench_gives_the_numbers_of_a_sweep(
    model: Any, site: str, layer: int, head: int | None, step: int | str, direction: str
) -> None:
    answer = kv.PatchBench(model, STEPS).ask(PROMPT, site, layer, head, step, direction)
    swept = kv.sweep(
        model,
        PROMPT,
        site,
        "single" if head is None else "heads",
        layers=[layer],
        direction=direction,
        steps="every" if step == "every" else (step,),
        max_new_tokens=STEPS,
        distance="l2,kl",
        controls="none",
        progress="none",
    )
    row = swept.recovery[swept.recovery["head"] == (-1 if head is None else head)].iloc[0]
    assert (answer.d_before, answer.d_after) == (row["d_before"], row["d_after"])
    assert (answer.kl_before, answer.kl_after) == (row["d_before_kl"], row["d_after_kl"])
    assert answer.recovery == row["recovery"] or not row["defined"]
    assert len(answer.steps) == row["steps"]


@pytest.mark.hooked
def test_the_last_residual_gives_the_donors_logits(model: Any) -> None:
    """At the last layer nothing follows but the unembedding, which is what the control calls the floor."""
    bench = kv.PatchBench(model, STEPS)
    # So that the paths differ on every machine, and before the unembedding.
    bench._paths["cached"] = kv.Cached(Planted(1, 256.0))
    answer = bench.ask(PROMPT, "resid_post", model.facts.layers - 1)
    assert answer.d_before > 0, "the paths do not differ here: the test shows nothing"
    assert answer.recovery > 0.99
    assert answer.steps["kl_before"].idxmax() == answer.steps.index[answer.steps["step"] == answer.shown_step][0]
    for run in ("donor", "unpatched", "patched"):
        top = answer.tokens[answer.tokens["run"] == run]
        assert top["logit"].is_monotonic_decreasing
        assert top["rank"].tolist() == [1, 2, 3, 4, 5]
        assert (top["probability"] > 0).all()
        assert top["probability"].sum() <= 1 + 1e-12


# Donors that are not the other path ------------------------------------------------------------------------------------


def test_another_prompt_at_the_prefill_is_activation_patching(load: Any) -> None:
    model = load(NATIVE)
    found = kv.activation_patching(model, OTHER, PROMPT, "resid_post", layers=(1,), progress="none")
    bench = kv.PatchBench(model, STEPS)
    for column in (found.differ[0], found.values.shape[1] - 1):
        asked = {"step": 0, "positions": (column, column + 1), "donor": "prompt", "other": OTHER}
        for direction in ("into-recompute", "into-cached"):
            answer = bench.ask(PROMPT, "resid_post", 1, direction=direction, **asked)
            assert (answer.kl_before, answer.kl_after) == (found.corrupted, float(found.values[0, column]))
            assert answer.kl_recovery == float(found.recovery[0, column])


# What is said ----------------------------------------------------------------------------------------------------------


def answered(**numbers: Any) -> PatchAnswer:
    """An answer whose numbers one processor or another could give; an L2 of 1 recovers half of it."""
    about = {"recovery": 0.5, "why": "", "d_before": 1.0, "d_after": 0.5, "null": 0.1}
    about |= {"kl_recovery": -0.25, "kl_before": 4e-6, "kl_after": 5e-6}
    rest = {"pair": ("a", "b"), "pair_before": 0.0, "pair_after": 0.0, "pair_recovery": math.nan, "shown_step": 1}
    tables = {"steps": pd.DataFrame({"step": [1, 2]}), "tokens": pd.DataFrame()}
    return PatchAnswer(
        **{"request": PatchRequest(), **about, **rest, **tables, "unchanged": False, "seconds": 0.0, **numbers}
    )


@pytest.mark.parametrize(
    ("numbers", "lead", "rest"),
    [
        ({}, "Recovery 50.00% of the L2 distance of the logits", "KL: 4e-06 nats before, 5e-06 nats after (-25.00%)"),
        (
            {"null": 1.0},
            "Recovery 50.00% of a difference that is within its null:",
            "two recomputations of the same positions",
        ),
        ({"null": math.nan}, "Recovery 50.00% of the L2 distance", "over 2 steps"),
        (
            {"recovery": math.nan, "d_before": 0.0, "d_after": 0.0, "why": metrics.why_undefined(2, 0.0, 0.0)},
            "Recovery undefined",
            "over 2 steps: the paths' logits are bitwise equal at the steps patched",
        ),
        (
            {"kl_recovery": math.nan, "kl_before": 0.0},
            "Recovery 50.00% of the L2",
            "KL: exactly 0 before, 5e-06 nats after",
        ),
        ({"unchanged": True}, "Recovery 50.00%", f"The patch {UNCHANGED}"),
        (
            {"request": PatchRequest(donor="zero"), "recovery": math.nan, "d_before": 0.0, "null": 0.6},
            "L2 distance of the logits 0.5, KL(unpatched || patched) 5e-06 nats",
            "It is within its null: two recomputations of the same positions differ by an L2 of up to 0.6",
        ),
    ],
)
def test_an_answer_leads_with_one_thing(numbers: dict[str, Any], lead: str, rest: str) -> None:
    """It led with 55% of a KL of 8e-16 beside 1% of the L2, or with a recovery of nan and no reason."""
    answer = answered(**numbers)
    first, *others = answer.sentences()
    assert first.startswith(lead)
    assert "KL" not in first or answer.request.ablates
    assert rest in ". ".join(others)
    assert "nan" not in repr(answer)
    assert first in repr(answer)


def test_the_bench_takes_two_paths(load: Any) -> None:
    model = load(NATIVE)
    bench = kv.PatchBench(model, STEPS, cached="cached+int4")
    answer = bench.ask(PROMPT, "kv", (0, 1, 2, 3), direction="into-cached")
    swept = kv.sweep(
        model, PROMPT, "kv", "cumulative", layers=[3], direction="into-cached", cached="cached+int4", max_new_tokens=STEPS,
        controls="none", progress="none",
    ).recovery.iloc[0]  # fmt: skip
    assert (answer.d_before, answer.d_after) == (swept["d_before"], swept["d_after"])
    assert answer.d_before > answer.null >= 0, "four bits are more than rounding"
    assert not answer.within_null
    equal = kv.PatchBench(model, STEPS, cached="cached@float64", recompute="recompute@float64").ask(PROMPT, layer=1)
    assert equal.d_before < 1e-6, "in float64 two paths agree"
    assert equal.d_before == 0 or equal.recovery <= 1
    for wrong in ({"cached": "recompute"}, {"cached": "cached[kernels=split_k(4,float16)]", "kernels": "batch_invariant"}):
        with pytest.raises(kv.InputError, match=r"needs a cached|has its own"):
            kv.PatchBench(model, STEPS, **wrong)


def test_the_null_is_two_recomputations_of_the_same_positions(load: Any) -> None:
    model = load(NATIVE)
    bench = kv.PatchBench(model, STEPS)
    answer = bench.ask(PROMPT, layer=1)
    text, start = torch.tensor([[*bench.prompt, *bench.fed]]), len(bench.prompt) - 1
    stop = start + (text.shape[1] - start + 1) // 2
    with torch.no_grad():
        whole, half = (model.model(part, use_cache=False).logits[0, start:stop] for part in (text, text[:, :stop]))
    assert answer.null == float((whole.double() - half.double()).norm(dim=-1).max())
    assert answer.within_null == (0 < answer.d_before <= answer.null)
