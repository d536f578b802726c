"""Flips against KL and margin, on decodes whose truth is made known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvinterp.papers.behaviour import boundary as b

pytestmark = pytest.mark.slow

LENGTH, NOISE = 40, 0.25


def made_up(examples: int = 40, seeds: int = 2, noise: float = NOISE) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Decodes whose KL has nothing to do with when they flip, but after it, free, it is 10 nats; logits have normal errors."""
    random = np.random.default_rng(0)
    decodes, steps = [], []
    for example in range(examples):
        for seed in range(seeds):
            told = {"model": "m", "strategy": "greedy", "seed": seed, "example": example}
            margin, kl = random.exponential(4, LENGTH), random.exponential(1e-3, LENGTH)
            error = random.normal(0, noise, (LENGTH, 2))
            flipped = margin + error[:, 0] - error[:, 1] < 0
            flipped[0] = False
            flip = int(flipped.argmax()) if flipped.any() else np.nan
            after = np.arange(LENGTH) > flip
            for protocol in ("matched", "free"):
                these = np.where(after, 10.0, kl) if protocol == "free" else kl
                if protocol == "matched" or flip == flip:
                    columns = {
                        "step": range(LENGTH),
                        "kl": these,
                        "margin_a": margin,
                        "rms_logit": noise,
                        "after_flip": after,
                    }
                    steps.append(pd.DataFrame({**columns, "flipped": flipped}).assign(**told, protocol=protocol))
                numbers = {"mean_kl": these.mean(), "mean_kl_before_flip": these[~after].mean(), "steps": LENGTH}
                numbers |= {"smallest_margin": margin.min(), "flip_index": flip, "diverged": flip == flip}
                numbers["margin_at_flip"] = margin[int(flip)] if flip == flip else np.nan
                decodes.append({**told, "id": str(example), "protocol": protocol, **numbers})
    return pd.DataFrame(decodes), pd.concat(steps, ignore_index=True)


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return b.boundary_tables(*made_up())


def test_a_correlation_with_free_kl_that_counting_makes_is_gone_where_texts_are_the_same(tables: Any) -> None:
    found = tables["correlations"].set_index(["quantity", "method"])
    flips = tables["flips"]
    pearson = found.xs("pearson", level="method")
    assert pearson.loc["mean_kl", "value"] < -0.95
    assert pearson.loc["mean_kl", "high"] < -0.9
    assert pearson.loc["matched_mean_kl", "low"] < 0 < pearson.loc["matched_mean_kl", "high"]
    assert pearson.loc["mean_kl", "value"] == pytest.approx(stats.pearsonr(flips["flip_index"], flips["mean_kl"]).statistic)
    ranks = found.loc[("mean_kl", "spearman"), "value"]
    assert ranks == pytest.approx(stats.spearmanr(flips["flip_index"], flips["mean_kl"]).statistic)
    # Nothing flips at step 0, the prefill's: a restriction to later ones left out nothing and was Pearson's again.
    for bound in (1, 9):
        late = flips[flips["flip_index"] > bound]
        row = found.loc["mean_kl", f"restricted>{bound}"]
        assert row["value"] == pytest.approx(stats.pearsonr(late["flip_index"], late["mean_kl"]).statistic)
        assert (row["n"], row["n_prompts"]) == (len(late), late["example"].nunique())
        assert row["n"] < pearson.loc["mean_kl", "n"]
    thirds = tables["thirds"].set_index("quantity")
    assert thirds.loc["mean_kl", "low"] > 1
    assert thirds.loc["matched_mean_kl", "low"] < 1 < thirds.loc["matched_mean_kl", "high"]


def test_steps_are_at_risk_until_the_first_flip(tables: Any) -> None:
    decodes, steps = made_up()
    matched = decodes[decodes["protocol"] == "matched"]
    (row,) = tables["prediction"].to_dict("records")
    at_risk = matched["flip_index"].fillna(LENGTH - 1).sum()  # Step 0 is the prefill's.
    assert (row["flips"], row["steps"], row["n"]) == (matched["diverged"].sum(), at_risk, 40)
    by_prompt = matched.groupby("example")["margin_at_flip"].mean()
    assert row["margin_at_flip"] == pytest.approx(by_prompt.median())
    assert row["margin_at_flip_low"] < row["margin_at_flip"] < row["margin_at_flip_high"]
    risk = steps[(steps["protocol"] == "matched") & (steps["step"] > 0) & ~steps["after_flip"]]
    assert len(risk) == at_risk
    elsewhere = risk[~risk["flipped"]].groupby("example")["margin_a"].mean().median()
    assert row["margin_elsewhere"] == pytest.approx(elsewhere)
    assert row["margin_elsewhere_low"] > row["margin_at_flip_high"]
