"""A model against itself with repeated K and V heads, and root-cause tables of several sets of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.common.result import Result
from kvinterp.study.experiments.repeated_heads import ALIKE, CHANGE, RepeatedHeads, repeated_heads, with_repeated_heads
from kvinterp.study.experiments.root_cause import RootCause, prompts_of_seed

pytestmark = pytest.mark.bits

PROMPT = [5, 9, 2, 30, 7, 7, 41, 12, 3, 8, 19, 22]


@pytest.mark.parametrize("kind", ["native", "hooked"])
def test_the_ratio_changes_and_the_function_does_not(load: Any, kind: str) -> None:
    told: dict[str, Any] = {"kind": kind, "dtype": "float64", "device": "cpu"}
    before = kv.load_model("zoo:mistral-mini", **told)
    after = with_repeated_heads("zoo:mistral-mini", 2, **told)
    assert (before.facts.kv_heads, after.facts.kv_heads) == (2, 4)
    assert after.facts.query_heads == before.facts.query_heads
    a, b = (kv.run(m, PROMPT, "recompute", max_new_tokens=1, logits="keep").logits for m in (before, after))
    assert float((a - b).abs().max()) < 1e-10
    assert "repeated 2 times" in after.facts.name


@pytest.mark.slow
def test_the_copies_are_fed_the_same_tokens() -> None:
    told: dict[str, Any] = {"kind": "native", "dtype": "float16", "device": "cpu"}
    copies = {1: kv.load_model("zoo:gqa2-mini", **told), 2: with_repeated_heads("zoo:gqa2-mini", 2, **told)}
    table = repeated_heads(copies, [PROMPT], 3)
    assert set(zip(table["repeated"], table["query_heads_per_kv_head"], strict=True)) == {(1, 2), (2, 1)}
    assert (table["float64_difference"] < 1e-10).all()
    assert (table["steps"] == 2).all()
    drawn = table[table["kernels"] == "native+normal(0,0.01)"].set_index("repeated")["rms_logit"]
    assert 0 < drawn[1] != drawn[2] > 0, "errors of repeated heads are their own"
    split = table[table["kernels"] == "split_k(8,float16)"]
    assert (split["differing_steps"] > 0).all(), "kernels that differ by construction"
    alone = kv.compare(
        copies[1], [PROMPT], "cached[kernels=split_k(8,float16)]", "recompute[kernels=split_k(8,float16)]",
        max_new_tokens=3, record="resid_post", progress="none",
    )  # fmt: skip
    mine = split[split["repeated"] == 1].iloc[0]
    assert mine["mean_kl"] == alone.steps.loc[alone.steps["step"] > 0, "kl"].mean()
    last = alone.layers[(alone.layers["step"] > 0) & (alone.layers["layer"] == 3)]
    assert mine["relative_l2"] == last["relative_l2"].mean()


def test_what_cannot_be_repeated() -> None:
    with pytest.raises(kv.UnsupportedError, match="which 3 does not divide"):
        with_repeated_heads("zoo:mistral-mini", 3, kind="native", dtype="float16", device="cpu")
    # Nothing is shared there.
    assert RepeatedHeads(("zoo:llama-mini",), prompts="arithmetic:1", device="cpu").cells() == []


def copies(change: float) -> pd.DataFrame:
    """Made-up numbers of four prompts; with twice as many KV heads the RMS is so much larger."""
    base = pd.DataFrame({"id": list("abcd"), "rms_logit": [1e-3, 2e-3, 3e-3, 4e-3]})
    rest = {
        "model": "m",
        "kernels": "native",
        "float64_difference": 0.0,
        "mean_kl": 1e-6,
        "relative_l2": 1e-4,
        "pattern_kl": 0.0,
    }
    once = base.assign(**rest, repeated=1, query_heads_per_kv_head=2)
    return pd.concat([once, once.assign(repeated=2, query_heads_per_kv_head=1, rms_logit=base["rms_logit"] + change)])


def test_what_is_found_of_the_ratio() -> None:
    def change(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
        (found,) = (row for row in RepeatedHeads().rows(tables) if row["finding"] == CHANGE)
        return found

    same, other = ({"repeated_heads": copies(size)} for size in (0.0, 1e-3))
    assert (change(same)["estimate"], change(same)["verdict"]) == (0, ALIKE)
    assert "in 1 of 1 case" in RepeatedHeads().headline(Result(same))[0]
    assert change(other)["estimate"] == pytest.approx(1e-3)
    assert np.isnan(change(other)["low"]), "four prompts are too few for an interval"
    assert change(other)["verdict"] == ""
    assert "in 0 of 1 case" in RepeatedHeads().headline(Result(other))[0]


def test_prompts_are_drawn_with_another_seed() -> None:
    assert prompts_of_seed("arithmetic:20", 0) == "arithmetic:20"
    assert prompts_of_seed("arithmetic:20", 2) == "arithmetic:20:2"
    assert prompts_of_seed("restate:4:5", 1) == "restate:4:6"
    for prompts in ("my.jsonl", "natural:6"):
        with pytest.raises(kv.InputError, match="of which there is one set"):
            RootCause(("zoo:mqa-mini",), prompts=prompts, seeds=2).parts(1)


def test_each_set_of_prompts_has_its_rows() -> None:
    def made(growth: float) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        rows = [
            {"model": "m", "prompt": n, "source": 0, "layer": layer, "l2": 1.0, "relative_l2": 1.0,
             "l2_growth": growth if layer else 1.0, "relative_growth": 0.5}
            for n in range(3) for layer in range(2)
        ]  # fmt: skip
        return {"table": pd.DataFrame(rows)}, {}

    asked = RootCause(("zoo:mqa-mini",), prompts="arithmetic:3", seeds=2)
    found = asked.tables({"propagation-0": made(2.0), "propagation-0-of-1": made(3.0)})
    table = found["propagation"]
    assert table.groupby("data_seed")["prompt"].unique().map(list).tolist() == [[0, 1, 2], [3, 4, 5]]
    absolute, relative = asked.rows(found)
    assert (absolute["n"], absolute["estimate"]) == (6, 2.5)
    assert absolute["note"] == "each of 2 sets of prompts: 2 to 3"
    assert relative["note"] == "each of 2 sets of prompts: 0.5"
    one = RootCause(("zoo:mqa-mini",), prompts="arithmetic:3").tables({"propagation-0": made(2.0)})
    assert "data_seed" not in one["propagation"]
    assert not any("sets of prompts" in row["note"] for row in asked.rows(one))


def test_the_cells_of_a_seed_are_its_own() -> None:
    asked = RootCause(("zoo:mqa-mini",), prompts="arithmetic:2", device="cpu", seeds=2)
    cells = asked.cells()
    assert len({cell.key for cell in cells}) == len(cells)
    assert np.sum([cell.key.startswith("accumulation") for cell in cells]) == 1
    of_1 = [cell for cell in cells if cell.key.endswith("-of-1")]
    assert {cell.settings["prompts"] for cell in of_1} == {"arithmetic:2:1"}
    assert {cell.key.removesuffix("-of-1") for cell in of_1} == {
        cell.key for cell in cells if not cell.key.endswith("-of-1") and not cell.key.startswith("accumulation")
    }
