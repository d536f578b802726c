"""The FP16 paper's tables, recomputed by plain pandas from the steps of ``kv.compare``, and one small run of the command."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import kvinterp as kv
from kvinterp.papers.studies import paper
from kvinterp.papers.studies.paper import PRESETS, Paper

pytestmark = pytest.mark.slow

MODEL, PROMPTS, TOKENS, SEEDS, FEW = "zoo:llama-mini", "arithmetic:7", 8, 2, 2
NOISY = "cached+normal(0,0.6,seed=0)", "recompute"
"""Some decodes flip on any processor: the one cache is noisy."""
STRATEGIES = ("greedy", "top_p(1,1.2)")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A result on disk, and what its cells gave."""
    asked = Paper((MODEL,), prompts=PROMPTS, strategies=STRATEGIES, seeds=SEEDS, max_new_tokens=TOKENS, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", {**PRESETS["quick"], "few": FEW, "patched_steps": 2})
        patch.setattr("kvinterp.papers.studies.behaviour.paths_of", lambda kernels: NOISY)
        parts: dict[str, Any] = {}
        patch.setattr(Paper, "reduce", lambda self, given: parts.update(given) or super(Paper, self).reduce(given))
        result = asked.run(tmp_path_factory.mktemp("paper") / "out", progress="none", figures="png")
        yield asked, parts, result


@pytest.fixture(scope="module")
def steps() -> dict[str, pd.DataFrame]:
    """Every step that the paper counts, by precision: a row a protocol, strategy, seed and prompt, from plain loops."""

    def rows(dtype: str, count: int) -> Iterator[pd.DataFrame]:
        model = kv.load_model(MODEL, dtype=dtype, device="cpu")
        for strategy, seed, protocol in itertools.product(STRATEGIES, range(SEEDS), ("free", "matched")):
            if strategy != "greedy" or seed == 0:
                how: dict[str, Any] = {
                    "strategy": strategy,
                    "seed": seed,
                    "max_new_tokens": TOKENS,
                    "protocol": protocol,
                    "stop": "length",
                }
                found = kv.compare(model, kv.load_prompts(PROMPTS)[:count], *NOISY, record="", progress="none", **how).steps
                yield found.assign(strategy=strategy, seed=seed, protocol=protocol)

    every = {"fp16": pd.concat(rows("float16", 7)), "fp32": pd.concat(rows("float32", FEW))}
    return {name: table[table["step"] > 0] for name, table in every.items()}


def decodes(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a decode: its mean KL in both protocols, and the step of its first flip, counted from the first that a cache decides."""
    keys = ["strategy", "seed", "example"]
    kl = steps.groupby([*keys, "protocol"])["kl"].mean().unstack("protocol")
    free = steps[(steps["protocol"] == "free") & (steps["token_a"] != steps["token_b"])]
    return kl.join(free.groupby(keys)["step"].min().rename("flip") - 1).reset_index()


def test_table_1_is_that_of_plain_loops(made: Any, steps: Any) -> None:
    table, every = made[2].tables["table_1"], decodes(steps["fp16"])
    assert every["flip"].notna().any(), "the case needs decodes that flip"
    assert list(table["strategy"]) == list(STRATEGIES)
    rng = np.random.default_rng(1)
    for row in table.to_dict("records"):
        own = every[every["strategy"] == row["strategy"]]
        assert (row["decodes"], row["n"]) == (len(own), own["example"].nunique())
        assert row["div_rate"] == own["flip"].notna().mean()
        assert row["mean_kl"] == pytest.approx(own["free"].mean(), rel=1e-12)
        assert row["same_tokens"] == pytest.approx(own["matched"].mean(), rel=1e-12)
        of_prompts = own.groupby("example")["free"].mean()
        assert row["median_kl"] == pytest.approx(of_prompts.median(), rel=1e-12)
        ends = stats.quantile_test(of_prompts).confidence_interval()
        assert (row["median_kl_low"], row["median_kl_high"]) == pytest.approx((ends.low, ends.high), rel=1e-12)
        # The paper's: run pairs drawn anew, of which greedy has as many as there are seeds.
        pairs = np.tile(own["free"], SEEDS if row["strategy"] == "greedy" else 1)
        means = rng.choice(pairs, (20_000, len(pairs))).mean(1)
        wide = row["mean_kl_high"] - row["mean_kl_low"]
        assert row["mean_kl_low"] == pytest.approx(np.quantile(means, 0.025), abs=0.15 * wide)
        assert row["mean_kl_high"] == pytest.approx(np.quantile(means, 0.975), abs=0.15 * wide)
    assert table["paper_mean_kl"].tolist() == [10.68, 10.79]
    assert table["paper_cache_acc"].tolist() == [0.033, 0.028]
    assert table.columns[-1] == "same_tokens"


def test_table_2_is_that_of_plain_loops(made: Any, steps: Any) -> None:
    (row,) = made[2].tables["table_2"].to_dict("records")
    for precision, table in steps.items():
        own = decodes(table[table["example"] < FEW])
        assert (row["n"], row["decodes"]) == (FEW, len(own))
        assert row[f"{precision}_kl"] == pytest.approx(own["free"].mean(), rel=1e-12)
        assert row[f"same_tokens_{precision}_kl"] == pytest.approx(own["matched"].mean(), rel=1e-12)
        assert row[f"{precision}_flip"] == own["flip"].notna().mean()
    assert (row["paper"], row["paper_fp32_flip"]) == ("LLaMA-2-7B", 0)


def test_table_3_is_that_of_plain_loops(made: Any, steps: Any) -> None:
    (row,) = made[2].tables["table_3"].to_dict("records")
    flips = decodes(steps["fp16"]).dropna(subset=["flip"])
    assert (row["flips"], row["n"]) == (len(flips), flips["example"].nunique())
    for name, column, above in (("full", "free", -1), ("without_0", "free", 0), ("same_tokens", "matched", -1)):
        some = flips[flips["flip"] > above]
        if some["example"].nunique() >= 6:
            assert row[name] == pytest.approx(np.corrcoef(some["flip"], some[column])[0, 1], rel=1e-9)
        else:
            assert np.isnan(row[name])
    assert not np.isnan(row["full"]), "the case needs prompts that flip"
    assert row["paper_trend"] == "weakens"


def test_the_page_has_the_papers_tables_and_figures(made: Any) -> None:
    asked, _, result = made
    assert {f"figure_{number}" for number in range(1, 6)} == set(asked.charts(result))
    assert {path.name for path in result.files} >= {f"figure_{number}.png" for number in range(1, 6)}
    page = (result.folder / "report.html").read_text()
    for said in ("Table 1. Divergence", "paper: LLaMA-2-7B", "10.68 [10.63, 10.74]", "Control: mean KL, same tokens"):
        assert said in page
    again = kv.load(result.folder)
    assert set(again.figures()) == set(asked.charts(result))
    # The paper's steps: the first that a cache decides is 0, and no flip is before it.
    assert set(result.tables["figure_1"]["step"]) == set(range(TOKENS - 1))
    assert result.tables["figure_4_flips"]["flip_index"].min() >= 0
    # K and V of all layers carry the difference, where there is one: the paper's patch is its control's.
    assert set(result.tables["figure_5"]["patch"]) <= set(paper._PATCHES.values())


def test_an_interrupted_run_has_tables_of_what_is_finished(made: Any) -> None:
    asked, parts, whole = made
    some = {key: parts[key] for key in parts if key.startswith("float16") and key.endswith("-0-0")}
    result = asked.reduce(some)
    assert list(result.tables["table_1"]["strategy"]) == ["greedy"]
    assert result.tables["table_2"].empty
    assert set(asked.charts(result)) >= {"figure_1"}
    assert len(asked.page_parts(result)) == 9
    assert whole.tables["table_1"]["decodes"].sum() == 7 * 3
