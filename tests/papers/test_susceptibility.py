"""Noise against flips: what is said of steps whose truth is known, and one small run of the whole command."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvinterp.papers.studies import susceptibility as s

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


@pytest.mark.slow
def test_the_whole_command(tmp_path) -> None:
    asked = s.Susceptibility("zoo:gqa2-mini", "arithmetic:2", sizes="0.5,2,4", seeds=2, max_new_tokens=5, bins=2)
    outcome = asked.run(tmp_path / "out", progress="none", figures="png")
    tables = outcome.tables
    assert len(tables["steps"]) == (1 + 3 * 2) * outcome.summary["positions"]
    assert tables["certificates"]["flips_certified"].sum() == 0
    assert list(tables["certificates"]["size"]) == [0, 0.5, 2, 4]
    assert {path.name for path in outcome.files} >= {"susceptibility.png", "report.html", "summary.json"}
    same = s.Susceptibility("zoo:gqa2-mini", "arithmetic:2", sizes="0.5,2,4", seeds=2, max_new_tokens=5, bins=2)
    pd.testing.assert_frame_equal(same.run(None, progress="none").tables["steps"], tables["steps"])
