"""Changed choices of experts are found where they were planted, carry what was planted, and nothing where nothing was."""

import math

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.metrics.routing import compared_routing, routing_of
from kvinterp.patching import Plant
from kvinterp.study.findings.of_comparison import charts_of_comparisons, rows_of_comparison
from kvinterp.study.findings.of_patching import headline_of_decomposition, rows_of_decomposition
from routed import CONFIGS, LAYERS, PROMPT, built, router, tilt

pytestmark = pytest.mark.bits
HOW = {"max_new_tokens": 5, "progress": "none"}
architectures = pytest.mark.parametrize("name", CONFIGS)
SHARE = 1e-5
"""What float32 inside routers leaves of a share of 1, where a planted choice moves the logits by a tenth and more."""


def test_what_a_choice_is_told_by():
    logits = torch.tensor([[3.0, 2.0, 1.5, 0.0], [3.0, 2.0, 2.0, 0.0], [3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    other = logits + torch.tensor([0.0, 0.0, 0.25, 0.0])
    mine = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 2]])
    found = compared_routing(routing_of(logits, mine), routing_of(other, torch.tensor([[1, 0], [0, 2], [0, 1], [2, 0]])))
    assert found["changed"].tolist() == [False, True, False, False]
    assert found["difference"].tolist() == [0.25] * 4
    assert found["margin_a"].tolist() == [0.5, 0.0, 1.0, -1.0]
    assert found["margin_b"].tolist() == [0.25, 0.25, 0.75, -0.75]


@architectures
def test_changed_choices_are_found_at_the_layer_and_a_path_beside_itself_has_none(name):
    layer = LAYERS[name][-1]
    model = built(name)
    wrapped = kv.wrap(model)
    same = kv.compare(wrapped, [PROMPT], "recompute", "recompute", stop="length", **HOW).routing
    assert (same["difference"] == 0).all()
    before = kv.compare(wrapped, [PROMPT], stop="length", **HOW).routing
    assert sorted(before["layer"].unique()) == LAYERS[name]
    assert not pd.concat([same, before])["changed"].any()
    tilt(model, name, layer)
    found = kv.compare(wrapped, [PROMPT], stop="length", **HOW).routing
    assert not found.loc[(found["layer"] != layer) | (found["step"] == 0), "changed"].any()
    assert found.loc[(found["layer"] == layer) & (found["step"] > 0), "changed"].any()


@pytest.mark.each
@architectures
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
def test_replaying_choices_recovers_a_planted_choice_and_elsewhere_nothing(name, direction):
    layer, model = LAYERS[name][-1], built(name)
    tilt(model, name, layer)
    swept = kv.sweep(kv.wrap(model), [PROMPT], "experts", direction=direction, stop="length", controls="quick", **HOW)
    assert sorted(swept.recovery["layer"]) == LAYERS[name]
    for row in swept.recovery.to_dict("records"):
        assert row["d_before"] > 0.01
        assert abs(row["recovery"] - (row["layer"] == layer)) < SHARE, row
    control = swept.controls.set_index("control")["recovery"]
    assert control["together"] == pytest.approx(1.0, abs=SHARE)
    assert control["self"] == pytest.approx(0.0, abs=SHARE)


def test_choices_and_weights_are_told_apart():
    """A router of other logits moves weights as well as choices: its logits recover all of it, its choices not."""
    model = built("mixtral")
    gate = router(model, 2)
    own, weight = gate.forward, gate.weight

    def forward(hidden):
        if hidden.reshape(-1, hidden.shape[-1]).shape[0] > 1:
            return own(hidden)
        gate.weight = torch.nn.Parameter(weight.flip(0), requires_grad=False)
        try:
            return own(hidden)
        finally:
            gate.weight = weight

    gate.forward = forward
    how = {"stop": "length", "controls": "none", "layers": 2, **HOW}
    choices, logits = (kv.sweep(kv.wrap(model), [PROMPT], site, **how).recovery.iloc[0] for site in ("experts", "router"))
    assert logits["recovery"] == pytest.approx(1.0, abs=SHARE)
    assert abs(choices["recovery"]) < 0.9


def test_a_difference_of_choices_is_all_routing_and_the_page_says_so():
    model = built("qwen3")
    # In the first layer: what earlier rows choose there is read by every later one.
    tilt(model, "qwen3", 0)
    prompts = [[(token + shift) % 61 + 3 for token in PROMPT] for shift in range(4)]
    split = kv.decompose(kv.wrap(model), prompts, max_new_tokens=3, progress="none")
    later = split.steps[split.steps["step"] > 0]
    changed = later[later["changed"] > 0]
    assert len(changed) > 3
    assert (changed["routing_share"] - 1).abs().max() < SHARE
    assert (changed["continuous_l2"] < SHARE * changed["total_l2"]).all()
    assert not later["null_changed"].any()
    assert (later["null_routing_l2"] == 0).all()
    assert (later.loc[later["changed"] == 0, "routing_l2"] == 0).all()
    headline = (
        f"Another expert is chosen, in some row, at {len(changed)} of {len(later)} decode steps; at the others no part"
    )
    assert any(line.startswith(headline) for line in headline_of_decomposition(split))
    said = {row["finding"]: row for row in rows_of_decomposition(split)}
    share = said["decode steps with a changed choice in the newest row: routing's share of the difference of the logits"]
    assert share["estimate"] == pytest.approx(1.0, abs=SHARE)
    assert math.isclose(
        said["choices of experts that differ, in all rows"]["estimate"], later["changed"].sum() / later["choices"].sum()
    )
    assert said["choices of experts that differ, in all rows"]["null"] == 0


def test_a_difference_of_keys_is_no_routing_where_no_choice_changes():
    split = kv.decompose(kv.wrap(built("olmoe")), [PROMPT], plant=Plant("kv", 1), max_new_tokens=3, progress="none")
    later = split.steps[split.steps["step"] > 0]
    assert (later["total_l2"] > 0).all()
    assert not later[["changed", "routing_l2", "routing_share"]].any(axis=None)
    said = {row["finding"]: row for row in rows_of_decomposition(split)}
    share = said["decode steps without a changed choice: routing's share of the difference of the logits"]
    assert (share["estimate"], share["note"]) == (
        0.0,
        "no choice differs there, so that all of the difference is continuous",
    )
    assert not any("with a changed choice in the newest row: " in name for name in said)


def test_a_dense_model_has_no_split_of_routing():
    split = kv.decompose(kv.load_model("zoo:mqa-mini", kind="native"), "1 + 1 =", max_new_tokens=2, progress="none")
    assert not {"routing", "changed", "routing_share"} & set(split.steps)


def test_ties_near_ties_and_changes_are_counted_and_drawn():
    model = built("mixtral", torch.float32)
    with torch.no_grad():
        router(model, 1).weight.zero_()
    tilt(model, "mixtral", 2)
    prompts = [[(token + shift) % 61 + 3 for token in PROMPT] for shift in range(7)]
    found = kv.compare(kv.wrap(model), prompts, stop="length", **HOW)
    rows = [row for row in rows_of_comparison(found) if row["unit"] == "choices"]
    said = {row["finding"]: row for row in rows if "layer" not in row}
    tied = said["ties of the last expert chosen with the first left out"]
    assert (tied["estimate"], tied["n"]) == (pytest.approx(1 / 3), 7 * 4 * 3)
    changed = {row["layer"]: row["estimate"] for row in rows if "layer" in row}
    assert (changed[0], changed[1]) == (0, 0)
    assert changed[2] > 0.3
    assert said["choices of experts that change"]["estimate"] == pytest.approx(changed[2] / 3)
    # Where the tilt decides, another expert than that of the logits is chosen.
    assert said["choices that the logits alone do not decide"]["estimate"] == pytest.approx(changed[2] / 3)
    table = charts_of_comparisons({"": found})["routing_by_step"].panels[0].table
    assert table[table["layer"] == 2]["changed"].mean() == pytest.approx(changed[2])
    dense = kv.compare(
        kv.load_model("zoo:mqa-mini", kind="native"), "1 + 1 =", record="", max_new_tokens=2, progress="none"
    )
    assert dense.routing.empty
    assert "routing_by_step" not in charts_of_comparisons({"": dense})
