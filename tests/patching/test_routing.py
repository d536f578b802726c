"""Changed choices of experts are found where they were planted, and nothing where nothing was; a router's logits are patched."""

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.comparison.findings import charts_of_comparisons, rows_of_comparison
from kvinterp.errors import InputError
from kvinterp.metrics.routing import compared_routing, routing_of
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


def test_a_routers_logits_are_patched_as_any_other_site_and_choices_are_not():
    """With a router that gives other logits to a row alone, its logits carry all of the difference."""
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
    swept = kv.sweep(kv.wrap(model), [PROMPT], "router", stop="length", controls="quick", **HOW)
    for row in swept.recovery.to_dict("records"):
        assert row["recovery"] == pytest.approx(float(row["layer"] == 2), abs=SHARE), row
    control = swept.controls.set_index("control")["recovery"]
    assert control["together"] == pytest.approx(1.0, abs=SHARE)
    with pytest.raises(InputError, match="'experts' can be recorded and not patched: patch 'router'"):
        kv.sweep(kv.wrap(model), [PROMPT], "experts", **HOW)


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
