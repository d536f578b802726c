"""State and fresh: the split, its null control, and that planted causes fall on the right side."""

import pytest
import torch

import kvinterp as kv
from kvinterp import metrics
from kvinterp.patching import Plant
from support import PROMPT, Case, SoftmaxInItsOwnDtype, cases, hooks_of, plain_forward

pytestmark = [pytest.mark.bits, pytest.mark.xdist_group("decomposition")]

STEPS = 4
KINDS = [
    Case("llama-mha", "hooked"),
    Case("gemma2", "hooked"),
    Case("standard", "hooked"),
    Case("llama-mha", "bridge"),
    Case("llama-gqa", "native", "sdpa"),
    Case("mistral-window", "native", "eager"),
    Case("zoo:mistral-mini", "native", "sdpa"),
]
DOUBLE = {"cached": "cached@float64", "recompute": "recompute@float64"}


def split(model, **more):
    return kv.decompose(model, PROMPT, **{"max_new_tokens": STEPS, "progress": "none"} | more)


_made = {}


def once(model, **more):
    """A decomposition that several tests look at; the models of the fixture ``load`` live as long as the session."""
    asked = id(model), repr(sorted(more.items()))
    if asked not in _made:
        _made[asked] = split(model, **more)
    return _made[asked]


def from_step(table, first):
    return table[table["step"] >= first]


@pytest.mark.slow
@cases(KINDS)
def test_at_step_0_there_is_nothing_and_a_suffix_changes_nothing_but_rounding(load, case):
    model = load(case)
    plain_forward(model.model, torch.tensor([PROMPT]))
    before = hooks_of(model.model)
    found = split(model)
    at_0 = found.steps[found.steps["step"] == 0].iloc[0]
    assert (at_0[["total", "newest_row", "state", "total_l2", "newest_row_l2", "state_l2"]] == 0).all()
    with SoftmaxInItsOwnDtype():
        double = split(model, **DOUBLE, plant=Plant("kv", 1))
    assert double.steps["null_l2"].max() < 1e-9 * from_step(double.steps, 1)["total_l2"].min()
    assert double.steps["null"].max() < 1e-15 * from_step(double.steps, 1)["total"].min()
    assert (double.layers["null"] < 1e-12).all()
    assert hooks_of(model.model) == before


@cases(KINDS)
def test_total_is_the_distance_a_comparison_measures(load, case):
    model = load(case)
    found = once(model)
    compared = kv.compare(model, [list(PROMPT)], record="resid_post", max_new_tokens=STEPS, progress="none")
    assert found.steps["total"].tolist() == pytest.approx(compared.steps["kl"].tolist(), rel=1e-9)
    layers = compared.layers.sort_values(["step", "layer"])["relative_l2"].tolist()
    assert found.layers["total"].tolist() == pytest.approx(layers, rel=1e-6, abs=1e-12)


@cases(KINDS)
def test_keys_and_values_planted_are_state(load, case):
    steps = from_step(once(load(case), **DOUBLE, plant=Plant("kv", 0)).steps, 1)
    assert (steps["state_l2"] / steps["total_l2"]).min() > 0.99
    assert (steps["newest_row_l2"] / steps["total_l2"]).max() < 0.01
    assert (steps["state"] / steps["total"]).min() > 0.99


@cases(KINDS)
def test_a_narrower_cache_is_state_as_the_same_rounding_by_a_policy_is(load, case):
    model = load(case)
    exact = from_step(once(model).steps, 1)
    rounded = from_step(once(model, cached="cached[cache=bfloat16]").steps, 1)
    assert (rounded["total_l2"] > 100 * exact["total_l2"].max()).all()
    assert (rounded["newest_row_l2"] < 0.01 * rounded["total_l2"]).all()
    assert (rounded["state_l2"] / rounded["total_l2"]).min() > 0.99


@cases(KINDS)
def test_a_planted_row_is_fresh_at_the_first_step_and_state_too_from_then_on(load, case):
    found = once(load(case), **DOUBLE, plant=Plant("row", 0))
    steps = from_step(found.steps, 1)
    first = steps.iloc[0]
    assert first["newest_row_l2"] / first["total_l2"] > 0.99
    assert first["newest_row"] / first["total"] > 0.99
    assert first["state_l2"] / first["total_l2"] < 0.01
    # Layer 1 wrote K and V of the planted row: from the second step on there is state.
    assert (steps["state_l2"].iloc[1:] > 100 * first["state_l2"]).all()


def test_what_a_quantised_cache_makes_of_the_rows_is_kept_and_found_where_it_is_made(load):
    """transformers' cache of 8 bits: it holds the rows in another form, in which none can be replaced for good."""
    given = {"cached": "cached[cache=quantized(8,fp8)]"}
    found = from_step(split(load(KINDS[4]), **given).steps, 1)
    assert (found["most"] == "cache_format").all()
    assert kv.localise(load(KINDS[4]), PROMPT, **given).place == "kv"


@cases([KINDS[0], KINDS[4]])
def test_a_planted_unembedding_is_fresh_at_every_step_and_in_no_layer(load, case):
    found = split(load(case), **DOUBLE, plant=Plant("unembedding"))
    steps = from_step(found.steps, 1)
    assert (steps["newest_row_l2"] / steps["total_l2"]).min() > 0.99
    assert (found.layers[["total", "newest_row", "state"]] < 1e-12).all(axis=None)


@cases([KINDS[0], KINDS[4]])
def test_fresh_is_one_step_on_the_recompute_paths_own_keys_and_values(load, case):
    """Made here with kvinterp's patches: the cached path, its cache overwritten by the recompute path's at the step."""
    model = load(case)
    found = once(model)
    sweep = kv.sweep(
        model, PROMPT, "kv", "cumulative", direction="into-cached", positions="earlier", steps=(3,), max_new_tokens=STEPS,
        controls="none", logits="keep", progress="none",
    )  # fmt: skip
    recompute, cached, overwritten = sweep.logits[0][3, 0], sweep.logits[0][3, 1], sweep.logits[0][3, -1]
    row = found.steps[found.steps["step"] == 3].iloc[0]
    assert row["newest_row"] == pytest.approx(float(metrics.kl_divergence(overwritten, recompute)), rel=1e-9)
    assert row["state"] == pytest.approx(float(metrics.kl_divergence(cached, overwritten)), rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"suffix": 0}, "suffix=0 was given"),
        ({"cached": "recompute"}, "needs a cached and an unchunked recompute path"),
        ({"recompute": "recompute[chunk=2]"}, "needs a cached and an unchunked recompute path"),
        ({"max_new_tokens": 90}, "more than the context"),
        ({"progress": "some"}, "progress='some'"),
    ],
)
def test_a_decomposition_that_cannot_be_is_refused(load, fields, said):
    with pytest.raises(kv.InputError, match=said.replace("(", r"\(")):
        split(load(KINDS[4]), **fields)
