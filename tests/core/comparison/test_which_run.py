"""The run that wrote a text beside its recomputation: what is equal is said equal, and shares are those counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvinterp as kv
from kvinterp.report.forks import MOST, around, fork_parts

PROMPTS = ["12 + 30 =", "45 + 11 ="]


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32")


class Above(nn.Module):
    """Features that fire where a direction of the stream is above a threshold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, width, generator=torch.Generator().manual_seed(1)))

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight.T - 1.0)


def test_a_recomputation_is_its_own(model: Any) -> None:
    """The run of the recompute path is the forward over the finished text: nothing differs, and the sentence says so."""
    found = kv.which_run(model, PROMPTS[:1], run="recompute", max_new_tokens=5)
    assert not found.distances["relative_l2"].any()
    assert not found.readouts["changed"].any()
    assert found.headline()[0].endswith("bit for bit.")
    assert found.forks().empty
    _, said = fork_parts(found)
    assert said.text.startswith(f"At none of {len(found.texts)} positions")


def test_a_cache_in_four_bits_is_another_run(model: Any) -> None:
    """It is beyond the null at every generated position, and what is read off the streams changes."""
    place = ("resid_post", 3)
    features = {place: Above(model.facts.width)}
    found = kv.which_run(model, PROMPTS, run="cached+int4", max_new_tokens=6, features=features)
    written = found.distances.query("part == 'generated' and site == 'resid_post'")
    assert (written["relative_l2"] > written["null"].max()).all()
    # A row of a prompt may pass its null by a kernel's choice; no row of a prompt reads four bits.
    assert found.forks()["part"].iloc[0] == "generated"
    mean = found.overview().groupby("readout")[["changed", "null"]].mean()
    assert set(mean.index) == {"argmax of a head", "feature that fires", "sign of a random probe", "top 32 neurons"}
    assert mean.loc["top 32 neurons", "changed"] > mean.loc["top 32 neurons", "null"]
    points = found.fork_points()
    assert set(written["position"]) <= set(points.query("part == 'generated'")["position"])
    row = found.texts.query("example == 0 and position == 4")
    assert around(found.texts.query("example == 0"), 4).count(f"\u27e6{row['text'].item()}\u27e7") == 1
    _, _, table = fork_parts(found)
    assert len(table.rows) == min(len(points), MOST)
    texts = " ".join(found.headline())
    assert "(cached+int4) is not its recomputation" in texts
    assert {row["n"] for row in found.rows()} == {2}


def test_a_null_of_exactly_0_is_said_as_what_it_is(model: Any) -> None:
    """It ranked a difference in the last bit above every other; and a row of the table held a mean against a median."""
    found = kv.which_run(model, PROMPTS, run="cached+int4", max_new_tokens=6)
    null = found.distances["null"].to_numpy().copy()
    count = len(found.texts.query("part == 'generated'"))
    table = found.distances
    table["null"] = 0.0
    assert f"exactly 0: two recomputations have the same bits at all {count} positions" in found.headline()[0]
    points = found.fork_points()
    assert not points["limit"].any()
    assert points["relative_l2"].is_monotonic_decreasing
    _, said, _ = fork_parts(found)
    assert "At all of them the null is exactly 0 wherever the runs part: " in said.text
    # Layer 3 alone has a null now: the positions that part there stand before the others.
    table.loc[table["layer"] == 3, "null"] = 1e-9
    table.loc[(table["layer"] == 3) & (table["position"] == 9), "relative_l2"] = 0.0
    points = found.fork_points()
    assert (points["limit"] > 0).is_monotonic_decreasing
    assert set(points[points["limit"] == 0]["position"]) == {9}
    assert "which stand last, the null is exactly 0" in fork_parts(found)[1].text
    table["null"] = null
    table.loc[table.groupby("example").head(1).index, "null"] = 1e3
    rows = {(row["site"], row["part"]): row for row in found.rows() if "site" in row}
    site, part = table.iloc[0][["site", "part"]]
    mean = table.query("site == @site and part == @part").groupby("example")["null"].mean().median()
    assert rows[site, part]["null"] == pytest.approx(mean)


def test_patterns_of_rows_that_are_left_stand_at_their_positions(model: Any) -> None:
    """An attention sink kept its place beside the newest keys, and a head that looks at it was said to look elsewhere."""
    prompt = kv.load_prompts("arithmetic:1")[0]
    found = kv.which_run(model, prompt, run="cached+sinks(2,12)", max_new_tokens=6)
    changed = found.readouts.query("readout == 'argmax of a head' and part == 'generated'").set_index(["layer", "position"])
    cut = min(at for _, at in changed.index)
    trace = kv.run(model, prompt, "cached+sinks(2,12)", record="pattern", positions="all", max_new_tokens=6)
    text = torch.tensor([[*trace.prompt, *trace.fed]])
    with kv.record(model, "pattern", positions="all") as seen, torch.no_grad():
        model.forward(text)
    for layer in range(model.facts.layers):
        rows = trace.records["cache_positions", layer][1][0]
        here = rows[trace.records["pattern", layer][1][:, 0].argmax(-1)]
        there = seen["pattern", layer][0, :, cut, : cut + 1].argmax(-1)
        assert changed.loc[(layer, cut), "changed"] == (here != there).double().mean()


def test_a_steered_run_is_held_against_a_clean_forward(model: Any) -> None:
    """Above the steered layer the streams part by far more than rounding, below it they do not; and features switch."""
    vector, place = 8.0 * torch.ones(model.facts.width), ("resid_post", 3)
    features = {place: Above(model.facts.width)}
    how = {"max_new_tokens": 6, "features": features}
    clean, steered = (
        kv.which_run(model, PROMPTS[:1], **how, **within)
        for within in ({}, {"within": lambda: kv.steer(model, vector, layer=1)})
    )
    apart = steered.distances.query("site == 'resid_post'").groupby("layer")["relative_l2"].min()
    assert apart[0] < 1e-4
    assert (apart[1:] > 0.05).all()
    switched, null = (
        found.readouts.query("readout == 'feature that fires'")["changed"].mean() for found in (steered, clean)
    )
    assert switched > null + 0.05


@torch.no_grad()
def test_shares_are_those_counted_by_hand(model: Any) -> None:
    """Of the features that fire in either run, those of one run alone; of the probes, those whose sign changes."""
    place, encoder = ("resid_post", 2), Above(model.facts.width)
    (text,) = kv.generated(model, PROMPTS[0], "resid_post,post,pattern", max_new_tokens=6)
    with kv.record(model, "resid_post,post,pattern", positions="all") as seen:
        model.forward(torch.tensor([text.text[:-1]]))
    found = kv.which_run(
        model,
        PROMPTS[0],
        max_new_tokens=6,
        top=3,
        features={place: encoder},
        probes={"blocks.2.hook_resid_post": encoder.weight},
    )

    def changed(readout: str) -> Tensor:
        rows = found.readouts.query("readout == @readout and layer == 2")
        return torch.tensor(rows.sort_values("position")["changed"].to_numpy())

    runs = text[place], seen[place][0]
    fires = [encoder.encode(rows) > 0 for rows in runs]
    either = (fires[0] | fires[1]).sum(1).clamp(min=1)
    assert torch.equal(changed("feature that fires"), ((fires[0] != fires[1]).sum(1) / either).double())
    signs = [rows.double() @ encoder.weight.double().T > 0 for rows in runs]
    assert torch.equal(changed("sign of a probe"), (signs[0] != signs[1]).double().mean(1))
    neurons = [rows.abs().topk(3).indices.tolist() for rows in (text["post", 2], seen["post", 2][0])]
    share = [1 - len(set(a) & set(b)) / 3 for a, b in zip(*neurons, strict=True)]
    assert torch.allclose(changed("top 3 neurons"), torch.tensor(share, dtype=torch.float64))
    apart = (runs[0] - runs[1]).double().norm(dim=1) / runs[1].double().norm(dim=1)
    table = found.distances.query("site == 'resid_post' and layer == 2")
    assert torch.allclose(torch.tensor(table["relative_l2"].to_numpy()), apart)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"features": {("resid_post", 3): object()}}, "an object with encode"),
        ({"features": {"pattern": Above(128)}}, "a site with a vector at each position"),
        ({"probes": {("resid_post", 9): torch.ones(1, 128)}}, "layer"),
        ({"run": "chached"}, "chached"),
    ],
)
def test_what_does_not_fit(model: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(kv.InputError, match=sentence):
        kv.which_run(model, PROMPTS[0], max_new_tokens=2, **given)
