"""Drift by layer: planted growth and differences in made-up tables, the rule of equal tokens, and small runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import kvinterp as kv
import synthetic
from kvinterp.commands.running import with_findings
from kvinterp.common.result import Result
from kvinterp.papers.studies.layer_drift import (
    CONTRASTS,
    EVERY_STEP,
    MEASURES,
    NAMES,
    ONE_STEP,
    LayerDrift,
    amplification_of,
    layer_tests_of,
    means_of,
    null_drift,
    of_example,
    tables_of,
)
from support import Case

pytestmark = [pytest.mark.bits, pytest.mark.slow]


def drift(values: np.ndarray, model: str = "m", steps: int = 3) -> pd.DataFrame:
    """A row an example, step and layer; ``values`` are the examples' means, ``[example, layer]``, of every measure."""
    spread = np.linspace(0.5, 1.5, steps)
    rows = [
        {"model": model, "example": e, "step": s + 1, "layer": layer, **dict.fromkeys(MEASURES, value * spread[s])}
        for (e, layer), value in np.ndenumerate(values)
        for s in range(steps)
    ]
    return pd.DataFrame(rows)


def lengths(examples: int = 12, layers: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 2, (examples, layers))


# What tables come to ---------------------------------------------------------------------------------------------------


def test_an_example_is_one_observation_whatever_its_steps() -> None:
    values = lengths()
    table = means_of(drift(values), ["l2"]).set_index("layer")
    assert table["mean"].tolist() == pytest.approx(values.mean(0).tolist())
    assert (table["n"] == 12).all()
    many = means_of(drift(values, steps=9), ["l2"]).set_index("layer")
    assert many["low"].tolist() == pytest.approx(table["low"].tolist())


def test_a_planted_growth_is_found() -> None:
    values = lengths()
    values[:, 1], values[:, 2] = values[:, 0] * 7, values[:, 0] * 7
    table = amplification_of(drift(values))
    by = table[table["measure"] == "l2"].set_index("layer")
    assert np.isnan(by.loc[0, "ratio"])
    assert by.loc[1, ["ratio", "low", "high"]].tolist() == pytest.approx([7, 7, 7])
    assert by.loc[2, "ratio"] == pytest.approx(1)
    assert set(table["measure"]) == set(NAMES)


def test_layers_are_tested_against_what_was_chosen() -> None:
    values = lengths()
    values[:, 1] = values[:, 0] + 0.05  # Less than the examples differ by, but in all of them.
    values[:, 2] += 9
    rows, null = drift(values), drift(values[:, :3] * [1, 1, 3])
    table = layer_tests_of(rows, null, list(CONTRASTS))
    assert set(table["contrast"]) == set(CONTRASTS)
    assert (table["n"] == 12).all()
    one = table[(table["measure"] == "l2") & (table["layer"] == 1) & (table["contrast"] == "previous layer")]
    found = one.set_index("test")
    assert found.loc["Wilcoxon", "p"] == pytest.approx(2 / 2**12)
    assert found.loc["Wilcoxon", "effect"] == 1
    assert found.loc["Mann-Whitney", "p"] == pytest.approx(stats.mannwhitneyu(values[:, 1], values[:, 0]).pvalue)
    assert found.loc["Mann-Whitney", "p"] > 0.3
    against = table[(table["contrast"] == "same-path null") & (table["measure"] == "l2") & (table["test"] == "Wilcoxon")]
    by = against.set_index("layer")
    assert by.loc[[0, 1], "p"].isna().all(), "nothing differs there"
    assert by.loc[2, "effect"] == -1
    # Corrected over the layers of all models that are tested alike.
    two = layer_tests_of(pd.concat([rows, drift(lengths(seed=1), "n")]), null, ["layer 0"])
    alike = two[(two["measure"] == "l2") & (two["test"] == "Wilcoxon")]
    assert len(alike) == 4
    assert alike["p_bh"].tolist() == pytest.approx(stats.false_discovery_control(alike["p"]).tolist())


def found_of(tables: dict[str, pd.DataFrame]) -> tuple[str, pd.DataFrame]:
    """The headline and the findings of made-up tables."""
    outcome = with_findings(LayerDrift(), Result(tables, {"provenance": {"m": synthetic.ABOUT}}))
    return "\n".join(LayerDrift().headline(outcome)), outcome.tables["findings"].set_index("finding")


# The rule --------------------------------------------------------------------------------------------------------------


def parts(*flips: int | None) -> dict[str, pd.DataFrame]:
    """The tables of made-up examples that flip at these steps; after it the cosine of the free protocol is 0.1."""
    made: dict[str, list[pd.DataFrame]] = {}
    for example, flip in enumerate(flips):
        matched = synthetic.comparison((example,), flip=flip, size=1e-3 * (example + 1))
        free = matched
        if flip is not None:
            free = synthetic.comparison((example,), flip=flip, size=1e-3 * (example + 1), protocol="free")
            free.layers.loc[free.layers["after_flip"], "cosine"] = 0.1
        matched.heads["pattern"] = "recorded"
        tables = of_example(matched, free)
        tables["null"] = tables["drift"][tables["drift"]["step"] > 0]
        for name, table in tables.items():
            made.setdefault(name, []).append(table.assign(model="m"))
    return {name: pd.concat(tables, ignore_index=True) for name, tables in made.items()}


def test_rows_of_other_tokens_are_removed_and_counted() -> None:
    # Five steps, three layers: a flip at step 1 leaves step 1 and takes 2 to 4; one at step 3 takes step 4.
    tables = tables_of(parts(1, 3, None), step=2, divergent=3, contrasts=["layer 0"])
    rows = tables["layer_drift_rows"].set_index(["selection", "protocol"])
    assert rows.loc[(EVERY_STEP, "free"), ["rows", "removed"]].tolist() == [36, 12]
    assert rows.loc[(EVERY_STEP, "matched"), ["rows", "removed"]].tolist() == [36, 0]
    assert rows.loc[(ONE_STEP, "free"), ["rows", "removed"]].tolist() == [9, 3]
    kept = tables["layer_drift"]
    free = kept[kept["protocol"] == "free"]
    assert free.groupby("example")["step"].max().tolist() == [1, 3, 4]
    means = tables["drift_by_layer"]
    cosine = means[(means["measure"] == "cosine") & (means["protocol"] == "free") & (means["selection"] == ONE_STEP)]
    by = cosine.set_index(["rule", "layer"])
    assert by.loc[("none", 0), "mean"] == pytest.approx((0.1 + 1 + 1) / 3)
    assert by.loc[("same tokens", 0), ["mean", "n"]].tolist() == [1.0, 2.0]
    _, found = found_of(tables)
    rows = found.loc[[f"rows of other tokens, each path fed its own text, {name}" for name in (EVERY_STEP, ONE_STEP)]]
    assert rows["estimate"].tolist() == pytest.approx([12 / 36, 3 / 9])
    assert rows["n"].tolist() == [36, 9]


def test_equal_paths_are_said_to_be_equal() -> None:
    made = parts(None, None)
    made["drift"][["l2", "relative_l2", "l2_without_top3", "relative_l2_without_top3"]] = 0.0
    made["heads"]["kl"] = 0.0
    tables = tables_of(made, step=2, divergent=2, contrasts=["previous layer"])
    headline, found = found_of(tables)
    assert "bitwise equal in every layer" in headline
    assert found.loc["largest mean attention KL of a head", "estimate"] == 0
    assert not found.index.str.startswith("growth").any()
    assert tables["layer_tests"]["p"].isna().all()


# Models ----------------------------------------------------------------------------------------------------------------


def test_the_null_is_of_the_same_rows(load: Any) -> None:
    """Under a fixed order of additions company changes nothing: rows of other positions would not be equal."""
    adapter, prompt = load(Case("zoo:gqa2-mini", "native"), "float16"), [5, 9, 2, 30, 7, 7, 41, 12]
    made = kv.compare(adapter, [prompt], max_new_tokens=4, record="", stop="length", progress="none")
    table = null_drift(adapter, prompt, made.steps, "recompute[kernels=batch_invariant]", 8)
    assert sorted(zip(table["step"], table["layer"], strict=True)) == [(s, n) for s in (1, 2, 3) for n in range(4)]
    assert (table["l2"] == 0).all()
    assert (table["cosine_without_top3"] == 1).all()


def test_up_to_the_flip_the_free_rows_are_those_of_the_free_protocol() -> None:
    """Which examples flip is the processor's matter; what is kept of each is not."""
    asked = {"max_new_tokens": 6, "strategy": "top_p(1.0,3.0)", "kernels": "split_k(8,float16)"}
    outcome = LayerDrift(("zoo:gqa2-mini",), prompts="arithmetic:3", device="cpu", **asked).run(None, progress="none")
    mode = f"[kernels={asked.pop('kernels')}]"
    model = kv.load_model("zoo:gqa2-mini", kind="native", device="cpu")
    free = kv.compare(
        model, kv.load_prompts("arithmetic:3"), f"cached{mode}", f"recompute{mode}",
        protocol="free", record="resid_post", progress="none", **asked,
    )  # fmt: skip
    same = free.same_text(free.layers).sort_values(["example", "step", "layer"])
    table = outcome.tables["layer_drift"]
    mine = table[table["protocol"] == "free"].sort_values(["example", "step", "layer"])
    for column in ("example", "step", "layer", *MEASURES):
        assert mine[column].tolist() == same[column].tolist(), column
    counts = outcome.tables["layer_drift_rows"].set_index(["selection", "protocol"]).loc[(EVERY_STEP, "free")]
    later = free.layers[free.layers["step"] > 0]
    assert counts["rows"] == len(later)
    assert counts["removed"] == later["after_flip"].sum()
    assert outcome.tables["drift_examples"]["mean_kl"].tolist() == free.examples["mean_kl"].tolist()


def test_the_command_writes_its_figures_and_page(tmp_path: Any) -> None:
    asked = LayerDrift(("zoo:llama-mini", "zoo:mqa-mini"), prompts="arithmetic:2", device="cpu", max_new_tokens=3)
    outcome = asked.run(tmp_path, progress="none", figures="png")
    drawn = {path.stem for path in outcome.files if path.suffix == ".png"}
    # Of a difference that this processor does not make no growth is drawn.
    assert drawn - {"layer_drift_amplification"} == {"layer_drift", "layer_drift_decode_step_1", "layer_drift_heads"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "zoo:mqa-mini" in page
    assert {"layer_drift", "layer_drift_rows", "drift_by_layer", "layer_tests", "amplification"} <= set(outcome.tables)
