"""Noise against flips: what is said of steps whose truth is known, and one small run of the whole command."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import kvinterp as kv
from kvinterp.experiments import susceptibility as s
from kvinterp.experiments.base import Outcome
from kvinterp.reading.susceptibility import said_of_susceptibility

SIZES = (0.1, 0.2, 0.4, 0.8, 1.6)


def decodes(prompts: int = 30, positions: int = 8, draws: int = 3, gain: float = 5.0) -> pd.DataFrame:
    """Steps of two logits, each with normal errors of ``gain`` times the size of the noise: the truth is in closed form."""
    random = np.random.default_rng(0)
    margins = random.uniform(0.5, 6.0, (prompts, positions))
    rows = []
    for size in SIZES:
        for seed in range(draws):
            errors = random.normal(0, gain * size, (prompts, positions, 2))
            flip = margins + errors[..., 0] - errors[..., 1] < 0
            for example, step in np.ndindex(prompts, positions):
                error = errors[example, step]
                rows.append(
                    {
                        "example": example,
                        "step": step + 1,
                        "margin": margins[example, step],
                        "rms_logit": gain * size,
                        "max_abs_logit": np.abs(error).max(),
                        "flip": bool(flip[example, step]),
                        "size": size,
                        "seed": seed,
                    }
                )
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def steps() -> pd.DataFrame:
    return s.predicted(s.binned(decodes(), 3))


def test_the_predicted_chance_is_the_true_one(steps: pd.DataFrame) -> None:
    truth = stats.norm.cdf(-steps["margin"] / (np.sqrt(2) * 5.0 * steps["size"]))
    np.testing.assert_allclose(steps["predicted"], truth, rtol=1e-9)
    table = s.calibration_of(steps)
    assert table["steps"].sum() == len(steps)
    # Eight classes, whole prompts resampled: a miss or two of the 95% intervals is to be expected, five are not.
    assert ((table["predicted"] >= table["low"]) & (table["predicted"] <= table["high"])).sum() >= len(table) - 2
    brier = s.brier_of(steps)
    assert 0 < brier["low"] < brier["skill"] < brier["high"] < 1


def test_nothing_is_predicted_from_the_draw_itself() -> None:
    one = decodes(4, 2, draws=1)
    assert s.predicted(one)["predicted"].isna().all()
    two = decodes(4, 2, draws=2)
    two.loc[two["seed"] == 0, "rms_logit"] = 1e9
    assert (s.predicted(two).loc[two["seed"] == 0, "predicted"] < 0.5).all()


@pytest.mark.slow
def test_the_threshold_is_where_half_flip() -> None:
    """With a slope made known: P = 1 / (1 + (0.5 / size)**3), so half flip at 0.5."""
    random = np.random.default_rng(1)
    size = np.repeat(SIZES, 400)
    flip = random.random(len(size)) < 1 / (1 + (0.5 / size) ** 3)
    told = {"margin_low": 0.0, "margin_high": 1.0, "rms_logit": size, "bin": 0}
    made = pd.DataFrame({"size": size, "flip": flip, "example": np.arange(len(size)) % 40, **told})
    (row, _) = s.thresholds_of(made).to_dict("records")
    assert row["low"] < 0.5 < row["high"]
    assert row["high"] - row["low"] < 0.1
    assert row["rms_logit"] == pytest.approx(row["threshold"])
    for always, why in ((True, "below the smallest size"), (False, "above the largest size")):
        (row, _) = s.thresholds_of(made.assign(flip=always)).to_dict("records")
        assert (row["why"], np.isnan(row["threshold"])) == (why, True)


def test_a_certified_step_cannot_flip(steps: pd.DataFrame) -> None:
    table = s.certificates_of(steps)
    assert table["certified"].sum() > 0
    assert table["flips"].sum() > 0
    assert table["flips_certified"].sum() == 0
    # Two logits that move by 1 towards each other overturn a margin of 1.9; one of 2.1 stays.
    near = pd.DataFrame({"margin": [1.9, 2.1], "max_abs_logit": 1.0, "flip": [True, False], "size": 1.0})
    assert s.certificates_of(near)[["certified", "flips_certified"]].to_numpy().tolist() == [[1, 0]]


def test_classes_of_margin_hold_as_many_steps_each(steps: pd.DataFrame) -> None:
    counts = steps.groupby("bin")[["example", "step"]].apply(lambda part: len(part.drop_duplicates()))
    assert counts.max() - counts.min() <= 2
    for number, part in steps.groupby("bin"):
        assert part["margin"].between(part["margin_low"], part["margin_high"]).all(), number
    assert set(s.binned(steps.assign(margin=1.0), 3)["bin"]) == {0}


def summary(**changed: object) -> dict[str, object]:
    threshold = {"threshold": 0.5, "low": 0.4, "high": 0.6, "rms_logit": 2.0, "why": "", "flips": 3, "steps": 9}
    bounds = {"margin_low": 0.1, "margin_high": 4.0}
    told = {
        "noise": "normal", "seeds": 3, "prompts": 2, "positions": 9,
        "thresholds": [{**threshold, **bounds}, {**threshold, **bounds, "why": "above the largest size"}],
        "certificates": [{"steps": 9, "certified": 4, "flips": 3, "flips_certified": 0}],
        "brier": {"brier": 0.1, "of_the_rate": 0.2, "skill": 0.5, "low": 0.4, "high": 0.6},
        "rounding": {"steps": 9, "flips": 0, "differ": 5, "rms_logit": 0.01},
        "provenance": {"device": "a processor", "threads": 1},
    }  # fmt: skip
    return {**told, **changed}


def test_the_sentences_follow_the_numbers() -> None:
    said = "\n".join(said_of_susceptibility(summary()))
    assert "standard deviation of 0.5, 95% interval 0.4 to 0.6 in K and V (9 steps of 2 prompts, 3 draws" in said
    assert "margin 0.1 to 4 logits: above the largest size tried, 3 flips of 9" in said
    assert "200 times smaller than the 2 at the threshold" in said
    assert "none of them flips" in said
    wrong = [{"steps": 9, "certified": 4, "flips": 3, "flips_certified": 1}]
    equal = {"steps": 9, "flips": 0, "differ": 0, "rms_logit": 0.0}
    said = "\n".join(said_of_susceptibility(summary(certificates=wrong, rounding=equal)))
    assert "1 of them flip, which cannot be: report it" in said
    assert "nothing to set beside the threshold" in said


def test_what_was_said_is_said_again() -> None:
    """A threshold without an interval: what is read again has None where there was NaN, and told of ends that it has not."""
    read = summary(reading=["as it was said"])
    assert s.Susceptibility().sentences(Outcome({}, {}, read)) == ["as it was said"]
    assert s.Susceptibility().sentences(Outcome({}, {}, summary())) == said_of_susceptibility(summary())


@pytest.mark.parametrize("none", [np.nan, None], ids=["measured", "read again"])
def test_no_interval_is_no_interval(none: float | None) -> None:
    """A summary that is read again has null where NaN was: its page said "95% interval – to –", and gave a skill of –."""
    whole, one = summary()["thresholds"]  # type: ignore[misc]
    few = {**one, "why": "", "low": none, "high": none}
    brier = {"brier": 0.0, "of_the_rate": 0.0, "skill": none, "low": none, "high": none}
    said = "\n".join(said_of_susceptibility(summary(thresholds=[whole, few], brier=brier)))
    assert "margin 0.1 to 4 logits: 0.5, 3 flips of 9" in said
    assert "there is nothing to predict" in said
    assert "–" not in said


@pytest.mark.slow
def test_the_whole_command(tmp_path) -> None:
    asked = s.Susceptibility("zoo:gqa2-mini", "arithmetic:2", sizes="0.5,2,4", seeds=2, max_new_tokens=5, bins=2)
    outcome = asked.run(tmp_path / "out", progress="none")
    tables = outcome.tables
    assert len(tables["steps"]) == (1 + 3 * 2) * outcome.summary["positions"]
    assert tables["certificates"]["flips_certified"].sum() == 0
    assert list(tables["certificates"]["size"]) == [0, 0.5, 2, 4]
    assert {path.name for path in outcome.files} >= {"susceptibility.png", "report.html", "summary.json"}
    same = s.Susceptibility("zoo:gqa2-mini", "arithmetic:2", sizes="0.5,2,4", seeds=2, max_new_tokens=5, bins=2)
    pd.testing.assert_frame_equal(same.run(None, progress="none").tables["steps"], tables["steps"])


@pytest.mark.parametrize("sizes", ["", "1,2", "1,1,1", "a,b,c", "-1,2,3", "0,1,2", "nan,1,2", "1,2,1e30"])
def test_sizes_that_are_none_are_a_sentence(sizes: str) -> None:
    with pytest.raises(kv.InputError, match="expected three or more different numbers above 0"):
        s.Susceptibility(sizes=sizes).run(None)
