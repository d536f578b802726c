"""Which of our tensors theirs are: the right one is named, and noise is none of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv

ROWS, WIDTH, LAYERS = 24, 16, 4


@pytest.fixture
def ours() -> dict[tuple[str, int], torch.Tensor]:
    """A residual stream: each layer adds what attention and the MLP give."""
    draw = torch.Generator().manual_seed(0)
    stream, arrays = torch.randn(ROWS, WIDTH, generator=draw), dict[tuple[str, int], torch.Tensor]()
    for layer in range(LAYERS):
        arrays["resid_pre", layer] = stream
        for site in ("attn_out", "mlp_out"):
            arrays[site, layer] = torch.randn(ROWS, WIDTH, generator=draw)
            stream = stream + arrays[site, layer]
        arrays["resid_post", layer] = stream
    return arrays


def rounded(array: torch.Tensor) -> torch.Tensor:
    return array.bfloat16().float()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda a, k: a["resid_post", k - 1], "both arrays are one layer early."),
        (lambda a, k: a["mlp_out", k], "both arrays are mlp_out of their layer: the MLP's output alone"),
        (lambda a, k: torch.cat([a["resid_post", k][1:], a["resid_post", k][:1]]), "both arrays are a row early."),
        (lambda a, k: a["resid_post", k], "each of 2 arrays is nearest to ours of its name"),
    ],
)
def test_theirs_are_named(made: Any, says: str, ours: Any) -> None:
    found = kv.match_sites(ours, {("resid_post", k): rounded(made(ours, k)) for k in (1, 2)})
    assert found.reading.splitlines()[0].startswith(says), found.reading
    assert (found.table["sure"] == "yes").all()
    assert (found.table["error"] < 0.01).all()
    assert (found.table["margin"] > 10).all()


def test_what_leaves_a_layer_is_no_rival_of_what_enters_the_next(ours: Any) -> None:
    row = kv.match_sites(ours, {"blocks.2.hook_resid_pre": ours["resid_pre", 2]}).table.iloc[0]
    assert (row["ours"], row["named"], row["error"]) == ("resid_pre 2", "yes", 0)
    assert row["second"] not in ("resid_post 1", "resid_pre 2")


def test_noise_is_none_of_ours(ours: Any) -> None:
    found = kv.match_sites(ours, {("resid_post", 1): torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9))})
    assert "surely none of ours" in found.reading
    found = kv.match_sites(ours, {"other": torch.zeros(ROWS, WIDTH + 1)})
    assert "none of ours" in found.reading


def test_what_is_no_array_is_refused(ours: Any) -> None:
    for wrong in ({}, 3, {("resid_post", 1): [[1, 2], [3]]}, {("resid_post", 1): torch.ones(3, 3, dtype=torch.long)}):
        with pytest.raises(kv.InputError, match="theirs"):
            kv.match_sites(ours, wrong)


def test_compare_traces_says_what_given_rows_are() -> None:
    """nnsight#630: an engine's "layer 1" was the MLP's output alone; the traces were compared as if it were not."""
    model = kv.load_model("zoo:llama64-mini", kind="native", dtype="float32")
    ids = list(model.encode("Question: Ben has 3 pens and buys 4 more. How many pens does Ben have?"))
    run = kv.run(model, ids, "cached", max_new_tokens=12, stop="length", logits="keep", record="resid_post,mlp_out")
    hidden = {("resid_post", k): run["mlp_out", k] for k in (1, 2)}
    given = kv.Trace.from_arrays(ids, run.tokens, run.logits, path="engine", hidden=hidden)
    assert "both arrays are mlp_out of their layer" in kv.compare_traces(run, given).where()
    right = kv.Trace.from_arrays(ids, run.tokens, run.logits, hidden={("resid_post", 1): run["resid_post", 1]})
    assert "theirs" not in kv.compare_traces(run, right).where()
