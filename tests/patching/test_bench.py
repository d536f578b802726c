"""Patching by hand without a front end: the bench gives the sweep's numbers and remembers what it may; so do its maps."""

from __future__ import annotations

from typing import Any

import pytest

import kvinterp as kv
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
        distance="kl",
        controls="none",
        progress="none",
    )
    row = swept.recovery[swept.recovery["head"] == (-1 if head is None else head)].iloc[0]
    assert (answer.d_before, answer.d_after) == (row["d_before"], row["d_after"])
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
    assert answer.steps["d_before"].idxmax() == answer.steps.index[answer.steps["step"] == answer.shown_step][0]
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
            assert (answer.d_before, answer.d_after) == (found.corrupted, float(found.values[0, column]))
            assert answer.recovery == float(found.recovery[0, column])
