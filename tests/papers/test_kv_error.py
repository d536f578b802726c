"""kv-error and equivalent-noise end to end on a small model, and what their pieces must be whatever the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvinterp.data import load_prompts
from kvinterp.errors import UnsupportedError
from kvinterp.papers.behaviour.scores import AGAIN, CONTROL, METRICS
from kvinterp.papers.studies.equivalent_noise import EquivalentNoise, error_of_policy, pooled
from kvinterp.papers.studies.kv_error import KvError, behaviour_of
from kvinterp.policies import CacheRows, ComposedPolicy, Policy, policy_named
from support import Case

pytestmark = pytest.mark.slow

MODEL = "zoo:gqa2-mini"
FEW: dict[str, Any] = {
    "instructions": "instructions:2",
    "problems": "arithmetic:1",
    "texts": "restate:2",
    "strings": "instructions:2",
}


def small(**more: Any) -> KvError:
    settings: dict[str, Any] = {"design": "none", "repeats": 1, "max_new_tokens": 8, **FEW, **more}
    return KvError(MODEL, **settings)


# Equivalent noise ------------------------------------------------------------------------------------------------------


def noise_of(load: Any, policy: str, kind: str = "native") -> pd.DataFrame:
    adapter = load(Case(MODEL, kind), "float32")
    return error_of_policy(adapter, load_prompts("arithmetic:2"), policy_named(policy), 6)


def test_the_error_is_the_policys_own_in_every_layer_and_head(load: Any) -> None:
    table = noise_of(load, "uniform(0.5,0.5,on=v)")
    assert len(table) == 2 * 4 * 2 * 4
    each = pooled(table, ["layer", "tensor", "kv_head"])
    keys, values = (each[each["tensor"] == tensor] for tensor in "KV")
    assert (keys["relative_rms"] == 0).all()
    # Were an earlier layer's error in it, a later one's would not be exactly half.
    assert values["bias"].to_numpy() == pytest.approx(0.5, abs=1e-6)
    assert values["relative_std"].to_numpy() == pytest.approx(0, abs=1e-4)


@pytest.mark.hooked
def test_keys_before_and_after_rope_are_both_measured(load: Any) -> None:
    found = {kind: pooled(noise_of(load, "normal(0,0.5,on=k)", kind), ["tensor"]) for kind in ("hooked", "native")}
    for table in found.values():
        assert table.set_index("tensor").loc["K", "relative_std"] == pytest.approx(0.5, rel=0.05)


@dataclasses.dataclass(frozen=True)
class Newest(Policy):
    """Keeps the newest rows as they are."""

    def keep(self, keys: torch.Tensor, values: torch.Tensor, place: CacheRows) -> torch.Tensor:
        return torch.arange(keys.shape[2])[-10:]


@dataclasses.dataclass(frozen=True)
class Watching(Policy):
    """Wants to see attention."""

    @property
    def sites(self) -> tuple[str, ...]:
        return ("pattern",)


def test_rows_that_are_let_go_of_are_no_error_of_those_that_stay(load: Any) -> None:
    adapter, prompts = load(Case(MODEL, "native"), "float32"), load_prompts("arithmetic:1")
    table = error_of_policy(adapter, prompts, Newest(), 3)
    length = len(adapter.encode(prompts[0].text)) + 2
    assert set(table["rows"]) == {length}
    # Ten after each forward, and the newest row before the last one is let go of.
    assert set(table["rows_kept"]) == {11}
    assert (table[["e2", "flipped", "zeroed"]] == 0).all(axis=None)
    noisy = error_of_policy(adapter, prompts, ComposedPolicy((Newest(), policy_named("uniform(0.5,0.5)"))), 3)
    assert pooled(noisy, ["tensor"])["bias"].to_numpy() == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(UnsupportedError, match="chooses rows by what it sees"):
        error_of_policy(adapter, prompts, Watching(), 3)


def test_equivalent_noise_writes_a_table_a_figure_and_a_page(tmp_path: Path) -> None:
    policies = ("identity", "uniform(-1,1)", "sinks(2,8)")
    asked = EquivalentNoise(MODEL, policies=policies, prompts="arithmetic:2", max_new_tokens=2)
    outcome = asked.run(tmp_path, figures="png")
    assert {"equivalent_noise.parquet", "equivalent_noise.png", "report.html", "summary.json"} <= {
        path.name for path in outcome.files
    }
    assert len(pd.read_parquet(tmp_path / "equivalent_noise.parquet")) == 3 * 4 * 2 * 4
    assert asked.headline(outcome)[1] == "No error at all: identity and sinks(2,8)."
    of = outcome.tables["findings"].set_index(["finding", "policy", "tensor"])["estimate"]
    assert of["root mean square of the error", "identity", "K"] == 0
    assert 0 < of["rows kept", "sinks(2,8)", "V"] < 1
    assert of["root mean square of the error", "uniform(-1,1)", "K"] == pytest.approx(3**-0.5, rel=0.1)


# kv-error --------------------------------------------------------------------------------------------------------------


def test_without_a_policy_nothing_differs_and_readings_are_told_apart_with_one(load: Any) -> None:
    """In float64: what is read back lies otherwise in memory, for which float32 has other kernels on some processors."""
    adapter = load(Case(MODEL, "native", "sdpa"), "float64")
    exact, stored = (behaviour_of(adapter, "identity", r, 0, 0, FEW, max_new_tokens=3) for r in ("exact", "stored"))
    pd.testing.assert_frame_equal(exact, stored, rtol=1e-9)
    noisy = {r: behaviour_of(adapter, "uniform(-2,2)", r, 0, 0, FEW, max_new_tokens=3) for r in ("exact", "stored")}
    likely = {r: table["nats"].dropna().to_numpy() for r, table in noisy.items()}
    # Every likelihood meets the cache, under an exact prefill too.
    assert (likely["exact"] != exact["nats"].dropna().to_numpy()).all()
    assert (likely["exact"] != likely["stored"]).all()
    other = behaviour_of(adapter, "uniform(-2,2)", "exact", 1, 0, FEW, max_new_tokens=3)
    assert (other["nats"].dropna().to_numpy() != likely["exact"]).all()


def test_likelihoods_are_those_of_one_plain_forward(load: Any) -> None:
    adapter = load(Case(MODEL, "native", "sdpa"), "float32")
    (prompt,) = load_prompts("restate:1")
    table = behaviour_of(adapter, "identity", "exact", 0, 0, {**FEW, "texts": "restate:1"}, max_new_tokens=2)
    row = table[table["task"] == "texts"].iloc[0]
    context, whole = adapter.encode(prompt.text), adapter.encode(f"{prompt.text} {prompt.answer}")
    with torch.no_grad():
        logits = torch.log_softmax(adapter.model(torch.tensor([whole])).logits[0].double(), -1)
    answer = torch.tensor(whole[len(context) :])
    expected = -logits[len(context) - 1 : -1].gather(1, answer[:, None]).mean()
    assert row["tokens"] == len(answer)
    assert row["nats"] == pytest.approx(float(expected), abs=1e-5)


def test_kv_error_end_to_end(tmp_path: Path) -> None:
    asked = small(design="tensors", base="normal(0,1.5)", policies=("uniform(-2,2)",))
    outcome = asked.run(tmp_path, figures="png")
    names = {path.name for path in outcome.files}
    assert {"scores.parquet", "contrasts.parquet", "examples.parquet", "noise.parquet", "report.html"} <= names
    assert {"kv_error.png", "kv_error_noise.png", "kv_error_contrasts.png"} <= names
    scores = outcome.tables["scores"]
    assert set(scores["metric"]) == set(METRICS)
    # Two readings of three policies, and the floor.
    assert len(scores) == (2 * 3 + 1) * len(METRICS)
    assert set(scores.loc[scores["policy"] == "normal(0,1.5,on=k)", "design"]) == {"tensors"}
    floor = scores[(scores["policy"] == AGAIN) & (scores["metric"] == "perplexity")].iloc[0]
    # What is fed is given, so the draws of the sampling change nothing.
    assert (floor["percent"], floor["difference"]) == (100, 0)
    noise = outcome.tables["noise"].set_index("policy")["relative_rms"]
    assert noise["uniform(-2,2)"] == pytest.approx(2 / 3**0.5, rel=0.03)
    contrasts = set(outcome.tables["contrasts"]["contrast"])
    assert {"K against V, prefill=stored", "K against V, prefill=exact", "uniform(-2,2): stored against exact"} <= contrasts
    assert CONTROL in set(outcome.tables["examples"]["policy"])
    said = " ".join(asked.sentences(outcome))
    assert "control again, prefill=exact: perplexity of reference answers, of control 100%" in said
    assert "the floor: only the draws of the sampling differ" in said
    assert "K against V, prefill=stored: difference in problems solved" in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 3
