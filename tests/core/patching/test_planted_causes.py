"""Law 6: a difference planted in one place is found there and nowhere else."""

import pytest
import torch

import kvinterp as kv
from kvinterp.patching import Plant, localise
from support import PROMPT, Case

pytestmark = pytest.mark.bits

MODELS = {
    Case("llama-mha", "hooked"): 3,
    Case("gemma2", "hooked"): 2,
    Case("standard", "hooked"): 2,
    Case("llama-mha", "bridge"): 3,
    Case("gemma2", "bridge"): 2,
    Case("mistral-window", "native", "eager"): 2,
    Case("llama-gqa", "native", "sdpa"): 2,
    Case("gpt2", "native", "sdpa"): 2,
    Case("zoo:mistral-mini", "hooked"): 4,
}
"""And how many layers each has."""

PLANTINGS = [
    pytest.param(
        case, plant, id=f"{case}-{plant.place}-{plant.layer}", marks=[pytest.mark.hooked] * (case.kind == "hooked")
    )
    for case, layers in MODELS.items()
    for plant in (
        *(Plant("kv", layer) for layer in range(layers)),
        *(Plant("row", layer, site=("mlp_out", "attn_out")[layer % 2]) for layer in range(layers)),
        Plant("unembedding"),
    )
]


@pytest.mark.each
@pytest.mark.parametrize(("case", "plant"), PLANTINGS)
def test_law_6_a_planted_cause_is_found_where_it_is_and_nowhere_else(load, case, plant):
    model = load(case)
    assert model.facts.layers == MODELS[case]
    cause = localise(model, PROMPT, plant, dtype="float64")
    layer = -1 if plant.place == "unembedding" else plant.layer
    assert (cause.place, cause.layer) == (plant.place, layer)
    assert cause.share > 0.99
    allowed = {(plant.place, layer)}
    for row in cause.table.itertuples():
        if (row.place, row.layer) not in allowed:
            assert abs(row.share) < 0.01, f"{row.place} of layer {row.layer} recovers {row.share:.3f}"


@pytest.mark.parametrize("place", ["kv", "row", "unembedding"])
def test_a_single_unit_in_the_last_place_is_enough(load, place):
    cause = localise(load(Case("llama-gqa", "native", "sdpa")), PROMPT, Plant(place, 1, units=1.0), dtype="float64")
    assert cause.place == place
    assert cause.share > 0.99


@pytest.mark.parametrize(
    ("path", "tensor", "layer"),
    [("cached+int4", "K", 0), ("cached+int4(on=k,layers=1)", "K", 1), ("cached+int4(on=v,layers=1)", "V", 1)],
)
def test_what_a_quantised_cache_costs_is_laid_to_k_or_v_of_a_layer(path, tensor, layer):
    """Where K of layer 0 has huge channels, the largest relative error is that of V in another layer, and K carries the cost."""
    model = kv.load_model("zoo:llama64-mini", dtype="float32")
    if layer == 0:
        projection = model.model.model.layers[0].self_attn.k_proj
        bias = torch.zeros(projection.out_features)
        bias[31::32] = 200.0
        projection.bias = torch.nn.Parameter(bias)
    cause = localise(model, "Question: Tom reads 12 pages a day. How many pages does Tom read in 5 days?", cached=path)
    assert (cause.place, cause.layer, cause.tensor) == ("kv", layer, tensor)
    most = cause.table.loc[cause.table["share"].idxmax()]
    assert (most["layer"], most["tensor"]) == (layer, tensor)
    assert f"at layer {layer}, most of it ({most['share']:.0%}) by {tensor}." in str(cause)
    others = cause.table[(cause.table["place"] == "kv") & (cause.table["layer"] >= 0)].drop(most.name)
    assert layer == 0 or set(others["share"]) == {0.0}


def test_without_a_plant_the_rounding_of_float64_is_all_there_is(load):
    """The finder is not told that there must be a cause: what it names in float64 is of the size of rounding."""
    model = load(Case("llama-gqa", "native", "sdpa"))
    planted, plain = (
        kv.sweep(
            model, PROMPT, "kv", positions="earlier", steps="first", distance="l2", max_new_tokens=2, controls="none",
            progress="none", recompute="recompute@float64", cached=plant.written(kv.Cached(dtype="float64"), len(PROMPT)),
        ).recovery["d_before"].iloc[0]
        for plant in (Plant("kv", 1), Plant("row", 1))
    )  # fmt: skip
    assert plain < 1e-9 * planted


def test_paths_that_are_bitwise_equal_have_no_cause(load):
    model = load(Case("llama-gqa", "native", "eager"))
    fixed = {path: f"{path}[kernels=batch_invariant]" for path in ("cached", "recompute")}
    cause = localise(model, PROMPT, **fixed)
    assert (cause.place, cause.layer, cause.share) == ("none", -1, 0.0)
    assert cause.table.empty


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"place": "cache"}, "unknown place to plant a difference 'cache'"),
        ({"place": "row", "site": "pattern"}, "unknown site to plant a difference at 'pattern'"),
    ],
)
def test_a_plant_that_cannot_be_is_refused(fields, said):
    with pytest.raises(kv.InputError, match=said):
        Plant(**fields)
