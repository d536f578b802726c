"""Mitigations: costs that are known, errors that add up or do not by construction, and one small run of the command."""

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.common.result import Result
from kvinterp.findings import findings_of, lines_of
from kvinterp.papers.studies import mitigate as m


def examples(what: str, squared: np.ndarray, **told: object) -> pd.DataFrame:
    more = {
        "kl": squared,
        "differs": 3,
        "flip": 0,
        "steps": 5,
        "rows_a_token": 1.0,
        "bytes_a_token": 64.0,
        "reference": "r",
    }
    return pd.DataFrame(
        {"what": what, "of": "p", "path": "p", "example": range(len(squared)), "squared": squared, **more, **told}
    )


def crossed(both: float) -> pd.DataFrame:
    random = np.random.default_rng(0).normal(0, 0.05, (3, 40))
    parts = {"alone": 2.0, "neither": 1.0, "both": both}
    return pd.concat([examples(what, mean + noise) for (what, mean), noise in zip(parts.items(), random, strict=True)])


@pytest.mark.parametrize(
    ("both", "said"), [(3.0, "not told apart"), (4.0, ": more than their sum."), (2.5, ": less than their sum.")]
)
def test_what_adds_up_and_what_does_not(both: float, said: str) -> None:
    (row,) = m.interactions_of(crossed(both)).to_dict("records")
    assert row["low"] <= both - 3 + 0.05
    assert row["high"] >= both - 3 - 0.05
    assert row["ratio"] == pytest.approx(both / 3, abs=0.02)
    assert said in read(interactions=[row])


def test_the_front_holds_what_nothing_beats() -> None:
    table = pd.DataFrame(
        [(1.0, 1.0, 8.0), (0.5, 9.0, 8.0), (0.5, 9.0, 8.0), (0.5, 9.0, 16.0), (2.0, 1.0, 8.0)],
        columns=["mean_kl", "rows_a_token", "bytes_a_token"],
    )
    assert m.pareto(table)["pareto"].tolist() == [True, True, True, False, False]


LEFT = {
    "path": "cached",
    "mean_kl": 1e-7,
    "typical_kl": 5e-8,
    "low": 1e-8,
    "high": 1e-6,
    "differ": 3,
    "flips": 0,
    "steps": 5,
    "truth_kl": 1e-6,
}
PATH = {**LEFT, "prompts": 2, "rows_a_token": 1.0, "bytes_a_token": 64.0, "pareto": True}


def read(mitigations: list[dict[str, object]] | None = None, interactions: list[dict[str, object]] | None = None) -> str:
    """Headline and findings of made-up rows."""
    tables = {"mitigations": pd.DataFrame(mitigations or [PATH]), "interactions": pd.DataFrame(interactions or [])}
    outcome = Result(tables, {})
    return "\n".join([*m.Mitigate().headline(outcome), *lines_of(findings_of(m.Mitigate().rows(outcome)))])


@pytest.mark.slow
def test_the_whole_command(tmp_path) -> None:
    paths = ("cached", "cached[refresh=1]", "cached[kernels=batch_invariant]", "cached+q8_0")
    asked = m.Mitigate("zoo:gemma2-mini", "arithmetic:2", path=paths, policy=("int8",), max_new_tokens=5)
    outcome = asked.run(tmp_path / "out", progress="none", figures="png")
    left = outcome.tables["mitigations"].set_index("path")
    # A cache that is made anew at every step is no cache, and a fixed order of additions leaves nothing to differ.
    assert left.loc["cached[refresh=1]", "differ"] == left.loc["cached[kernels=batch_invariant]", "differ"] == 0
    assert left.loc["cached", "rows_a_token"] == 1
    assert left.loc["cached[refresh=1]", "rows_a_token"] > 10
    # 4 layers, 2 KV heads of 64, K and V in 2 bytes; q8_0 stores 34 bytes of 32 elements.
    assert left.loc["cached", "bytes_a_token"] == 4 * 2 * 64 * 2 * 2
    assert left.loc["cached+q8_0", "bytes_a_token"] == pytest.approx(4 * 2 * 64 * 2 * 34 / 32)
    assert outcome.tables["interactions"]["policy"].tolist() == ["int8"]
    assert {path.name for path in outcome.files} >= {"mitigations.png", "mitigations_interaction.png", "report.html"}


def test_a_policy_that_lets_go_of_rows_is_a_sentence() -> None:
    with pytest.raises(kv.InputError, match=r"cannot be crossed with the path; give it as --path cached\+h2o"):
        m.Mitigate("zoo:gqa2-mini", policy=("h2o(0.2,0.2)",)).run(None)
