"""What the FP16 paper's tables and figures may say: no trend without an interval, each prompt once, an n everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvinterp.papers.behaviour import paper_figures, paper_tables
from kvinterp.papers.behaviour.boundary import boundary_tables, correlations_with_flip

VERBS = ("weakens", "strengthens")
PAPERS = pd.DataFrame([{"model": "m", "paper": "LLaMA-2-7B", "trend": "weakens"}])


def trend_of(flip: Any, kl: Any) -> dict[str, Any]:
    """The row of Table 3 of decodes, one a prompt, that flip at these steps, the paper's step 0 being 1, with these mean KL."""
    table = {"flip_index": np.asarray(flip, float), "mean_kl": kl, "matched_mean_kl": kl, "example": range(len(flip))}
    flips = pd.DataFrame(table).assign(model="m", strategy="all")
    (row,) = paper_tables.table_3(correlations_with_flip(flips), ["m"], PAPERS).to_dict("records")
    return row


@pytest.mark.parametrize("prompts", [5, 6, 8, 11, 12, 14])
def test_no_verb_stands_where_there_is_no_interval(prompts: int) -> None:
    """Eight random prompts went from -0.16 to +0.13, which stood there as "weakens", with no interval that could say so."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        row = trend_of([1, *random.integers(2, 20, prompts - 1)], random.exponential(size=prompts))
        ends = [row[f"{name}_{end}"] for name in ("full", "without_0") for end in ("low", "high")]
        told = np.isfinite(ends).all() and not ends[0] <= row["without_0"] <= ends[1]
        assert (row["trend"] in VERBS) == told
        assert row["trend"] not in VERBS or prompts >= 12


def test_a_trend_that_is_told_is_said() -> None:
    """Late flips go with KL, and those at step 0 with anything: without them the correlation is stronger; and the other way."""
    random = np.random.default_rng(0)
    late = random.integers(2, 20, 40)
    row = trend_of([*late, *[1] * 30], [*(40.0 - late), *random.uniform(0, 40, 30)])
    assert (row["trend"], row["paper_trend"]) == ("strengthens", "weakens")
    row = trend_of([*late, *[1] * 30], [*random.uniform(0, 5, 40), *[40.0] * 30])
    assert row["trend"] == "weakens"
    assert trend_of(late, 40.0 - late)["trend"] == "no flip at step 0"


def decodes(prompts: int = 8) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Greedy decodes, one a prompt, and sampled ones under two seeds; every other sampled one flips."""
    random, rows, steps = np.random.default_rng(3), [], []
    for strategy, seeds in (("greedy", 1), ("top_p(0.95,2)", 2)):
        for seed in range(seeds):
            for example in range(prompts):
                flips = strategy != "greedy" and example % 2 == 1
                flip = 3 + example % 4 if flips else np.nan
                told = {"model": "zoo:m", "strategy": strategy, "seed": seed, "example": example}
                for protocol in ("matched", "free"):
                    kl = random.exponential(size=10)
                    after = np.arange(10) > (flip if flips else 99)
                    rows.append({**told, "id": str(example), "protocol": protocol, "mean_kl": kl[1:].mean(), "steps": 10})
                    rows[-1] |= {"mean_kl_before_flip": kl[0], "flip_index": flip, "diverged": flips, "mean_js": 0.0}
                    rows[-1] |= {
                        "mean_kl_after_flip": np.nan,
                        "max_abs_logit": 1.0,
                        "kl_bound": 0.5,
                        "smallest_margin": 0.1,
                    }
                    rows[-1] |= {
                        "margin_at_flip": 0.1 if flips else np.nan,
                        "correct_a": True,
                        "correct_b": example % 3 > 0,
                    }
                    columns = {"step": range(10), "kl": kl, "margin_a": random.exponential(size=10), "after_flip": after}
                    steps.append(
                        pd.DataFrame({**columns, "flipped": np.arange(10) == flip}).assign(**told, protocol=protocol)
                    )
    return pd.DataFrame(rows), pd.concat(steps, ignore_index=True)


def test_the_control_takes_each_prompt_once() -> None:
    """Copies of greedy decodes made its interval 1.4 times too short, and seeds of one prompt stood as prompts of their own."""
    made, steps = decodes()
    papers = pd.DataFrame(
        columns=["model", "paper", "strategy", "mean_kl", "mean_kl_low", "mean_kl_high", "cache_acc", "no_cache_acc"]
    )
    table = paper_tables.table_1(made, steps, 5, papers)
    matched = made[made["protocol"] == "matched"]
    for row in table.to_dict("records"):
        means = matched[matched["strategy"] == row["strategy"]].groupby("example")["mean_kl"].mean()
        ends = stats.bootstrap(
            (means,), np.mean, method="percentile", n_resamples=20_000, random_state=1
        ).confidence_interval
        wide = ends.high - ends.low
        assert row["same_tokens"] == pytest.approx(means.mean(), rel=1e-12)
        assert (row["same_tokens_low"], row["same_tokens_high"]) == pytest.approx((ends.low, ends.high), abs=0.07 * wide)
    assert table["decodes"].tolist() == [8, 16]
    assert table["p_bonferroni"].between(0, 1).all()
    assert {"Decodes": "decodes", "p (Bonferroni)": "p_bonferroni"}.items() <= paper_figures.SHOWN["table_1"][2].items()
    few = paper_tables.table_1(*(part[part["example"] < 5] for part in (made, steps)), 5, papers)
    assert few[["same_tokens_low", "same_tokens_high"]].isna().all(axis=None)


def test_kl_by_step_has_the_interval_of_prompts() -> None:
    _, steps = decodes()
    by = paper_tables.mean_by_step(steps)
    assert len(by) == 2 * 2 * 10
    (row,) = by.query("strategy == 'greedy' and protocol == 'free' and step == 4").to_dict("records")
    kl = steps.query("strategy == 'greedy' and protocol == 'free' and step == 4")["kl"].to_numpy()
    drawn = np.random.default_rng(5).choice(kl, (20_000, len(kl))).mean(1)
    wide = row["mean_kl_high"] - row["mean_kl_low"]
    assert (row["mean_kl_low"], row["mean_kl_high"]) == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=0.07 * wide)


def test_every_view_of_the_flips_says_its_n() -> None:
    """Four prompts flip, too few for the views of thirds and of correlations, which say so and are not left out."""
    tables = {f"figure_4_{name}": table for name, table in boundary_tables(*decodes()).items()}
    points, thirds, correlations, margins = paper_figures.views_of(tables)
    assert list(points.names.values()) == ["m: 8 flips (n = 4)"]
    for panel in (thirds, correlations):
        assert panel.table[panel.x].isna().all()
        for line, why, n in panel.table[["line", "why", "n_prompts"]].itertuples(index=False):
            assert why == f"fewer than 6 prompts have such a flip ({n})"
            assert f"(n\u00a0=\u00a0{n})" in line
        assert panel.table["n_prompts"].max() == 4
    assert set(margins.table["line"]) == {
        "m, greedy (n\u00a0=\u00a08,\u00a00\u00a0flips)",
        "m, top_p(0.95,2) (n\u00a0=\u00a08,\u00a08\u00a0flips)",
    }
    elsewhere = margins.table[margins.table["at"] == "margin_elsewhere"]
    assert ((elsewhere["low"] < elsewhere["margin"]) & (elsewhere["margin"] < elsewhere["high"])).all()
