"""Scores against what can be worked out by hand: percent of control, intervals over prompts, exact tests."""

import itertools

import numpy as np
import pandas as pd
import pytest

from kvinterp.papers.behaviour.scores import AGAIN, CONTROL, METRICS, contrasted, observed, scored


def examples(rates: dict[str, float], prompts: int = 12, repeats: int = 4, reading: str = "stored") -> pd.DataFrame:
    """Of each policy the first so many prompts are right in every repeat; its perplexity is e to the share that is wrong."""
    rows = []
    for (policy, rate), prompt, repeat in itertools.product(rates.items(), range(prompts), range(repeats)):
        right = prompt < rate * prompts
        read = "exact" if policy in (CONTROL, AGAIN) else reading
        for task in ("instructions", "problems", "strings", "texts"):
            row = {"policy": policy, "reading": read, "repeat": repeat, "task": task, "prompt": prompt, "correct": right}
            generated = task in ("instructions", "problems")
            row |= {"loop": not right, "outside": 0.5 * (not right)} if generated else {"nats": float(not right)}
            rows.append(row)
    return pd.DataFrame(rows)


def of(table: pd.DataFrame, policy: str, metric: str) -> pd.Series:
    (row,) = table[(table["policy"] == policy) & (table["metric"] == metric)].to_dict("records")
    return pd.Series(row)


def test_percent_of_control_with_prompts_as_observations() -> None:
    table = scored(examples({CONTROL: 1.0, AGAIN: 1.0, "half": 0.5, "none": 0.0}))
    assert set(table["metric"]) == set(METRICS)
    half = of(table, "half", "problems")
    assert (half["value"], half["control"], half["percent"], half["prompts"], half["repeats"]) == (0.5, 1, 50, 12, 4)
    # Twelve prompts and not forty-eight: twice a standard error of 14 points either way.
    assert 15 < half["percent_low"] < 30
    assert 70 < half["percent_high"] < 85
    assert half["low"] == pytest.approx(half["percent_low"] / 100 - 1)
    # Six prompts changed, all for the worse: two of the 64 ways to turn their signs are as far out.
    assert half["p"] == pytest.approx(2 / 64)
    assert of(table, "none", "problems")["p"] == pytest.approx(2 / 4096, rel=0.8)
    assert of(table, "half", "perplexity")["percent"] == pytest.approx(100 * np.exp(0.5))
    assert of(table, "half", "loops")["value"] == 0.5
    assert np.isnan(of(table, "half", "loops")["percent"])
    assert of(table, "half", "loops")["difference"] == 0.5
    assert of(table, "half", "outside")["value"] == 0.25


def test_a_prompt_is_the_mean_of_its_repeats() -> None:
    made = examples({CONTROL: 1.0, "a": 1.0})
    made.loc[(made["policy"] == "a") & (made["repeat"] == 0), ["correct", "nats"]] = [False, 2.0]
    assert (observed(made, "problems")["a", "stored"] == 0.75).all()
    # Every prompt lost a quarter, so resampling them changes nothing.
    row = of(scored(made), "a", "problems")
    assert (row["percent"], row["percent_low"], row["percent_high"]) == (75, 75, 75)
    assert of(scored(made), "a", "perplexity")["percent"] == pytest.approx(100 * np.exp(0.5))


def test_the_floor_of_equal_runs_is_exactly_nothing_and_has_no_false_discovery() -> None:
    table = scored(examples({CONTROL: 0.75, AGAIN: 0.75, "same": 0.75}))
    for policy in (AGAIN, "same"):
        rows = table[table["policy"] == policy]
        assert (rows[["difference", "low", "high"]] == 0).all(axis=None)
        assert (rows["p"] == 1).all()
    assert table.loc[table["policy"] == AGAIN, "q"].isna().all()
    assert (table.loc[table["policy"] == "same", "q"] == 1).all()


def test_contrasts_are_weighted_sums_prompt_by_prompt() -> None:
    made = examples({CONTROL: 1.0, "a": 0.75, "b": 0.25})
    found = contrasted(made, {"a against b": {("a", "stored"): 1.0, ("b", "stored"): -1.0}, "gone": {("c", "stored"): 1.0}})
    assert set(found["contrast"]) == {"a against b"}
    row = found[found["metric"] == "problems"].iloc[0]
    assert (row["difference"], row["prompts"]) == (0.5, 12)
    assert row["p"] == pytest.approx(2 / 64)
    # Of perplexity it is the difference of logarithms.
    assert found.loc[found["metric"] == "perplexity", "difference"].iloc[0] == pytest.approx(-0.5)
