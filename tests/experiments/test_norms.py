"""What is normal: the table's rows, a model's place among them, and that a place judges nothing."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from command_line import wrong
from kvinterp.auditing import norms
from kvinterp.auditing.norms import COLUMNS, read_norms, shipped, standing
from kvinterp.study.experiments.norms import Norms, quantiles_of

OF = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "width": 32,
    "dtype": "bfloat16",
    "plan": "cached",
    "device": "cpu",
    "length": 64,
}
SMALL = {"models": ("zoo:gqa2-mini",), "dtypes": "float32", "lengths": (8,), "steps": 2}


def table(*medians, **more):
    rows = [
        {**OF, "model": f"m{n}", "steps": 16, "median": m, "largest": m, "device": "cpu A", "versions": "v", **more}
        for n, m in enumerate(medians)
    ]
    return pd.DataFrame(rows)[list(COLUMNS)]


def test_a_place_is_the_share_of_smaller_differences_and_ties_count_half():
    found = standing(OF, 3e-3, table(1e-3, 2e-3, 3e-3, 4e-3, 5e-3))
    assert found.percentile == 50
    assert found.models == 5
    assert "at the 50th percentile of 5 LlamaForCausalLM models of like size in bfloat16" in found.said
    assert standing(OF, 1.0, table(1e-3, 2e-3, 3e-3, 4e-3, 5e-3)).percentile == 100
    assert standing(OF, 0.0, table(*[0.0] * 6)).percentile == 50


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"architecture": "GPT2LMHeadModel"},
        {"plan": "padded(left,5)"},
        {"device": "cuda H100"},
        {"layers": 9},
        {"width": 4096},
        {"length": 512},
    ],
)
def test_what_is_not_like_the_model_is_no_measure_of_it(other):
    """Six rows that differ in one thing that moves rounding: none is comparable, and that is said."""
    found = standing(OF, 3e-3, table(*[1e-3] * 6, **other))
    assert found.percentile is None
    assert "nothing comparable is in the table of norms (0 " in found.said


def test_of_several_lengths_of_a_model_the_nearest_counts():
    rows = pd.concat([table(*[1.0] * 5, length=32), table(*[1e-6] * 5, length=60)])
    assert standing(OF, 1e-3, rows).percentile == 100


def test_too_few_models_and_no_number_have_no_place():
    assert standing(OF, 1e-3, table(*[1e-3] * 4)).percentile is None
    assert standing(OF, float("nan"), table(*[1e-3] * 9)).percentile is None


def test_quantiles_and_their_exact_intervals():
    found = quantiles_of(table(*np.arange(1, 41) / 40)).iloc[0]
    assert found["n"] == 40
    assert found["q50_low"] < found["q50"] < found["q50_high"]
    # Order statistics 14 and 27 of 40 hold the median in 96%.
    assert found["q50_low"] == pytest.approx(14 / 40, abs=1.01 / 40)
    assert found["q50_high"] == pytest.approx(27 / 40, abs=1.01 / 40)
    assert np.isnan(quantiles_of(table(1.0, 2.0)).iloc[0]["q90_high"])


def test_the_table_that_ships_holds_many_models_of_several_architectures():
    rows = read_norms(shipped())
    assert rows["model"].nunique() >= 30
    assert set(rows["dtype"]) == {"bfloat16", "float16", "float32"}
    assert rows[(rows["architecture"] == "LlamaForCausalLM") & (rows["dtype"] == "float32")]["model"].nunique() >= 20
    assert shipped().stat().st_size < 128 * 1024


def test_its_rows_and_those_of_a_file_stand_side_by_side(tmp_path):
    made = Norms(**SMALL).run(tmp_path / "first", progress="none", figures="none")
    row = made.tables["norms"].iloc[0]
    assert (row["steps"], row["length"], row["plan"]) == (4, 8, "cached")
    # float32's rounding: nothing, or some units of it.
    assert 0 <= row["median"] <= row["largest"] < 1e-4
    both = Norms(**{**SMALL, "seed": 1}, add=tmp_path / "first" / "norms.csv").run(None, progress="none")
    assert len(both.tables["norms"]) == 2
    assert both.tables["quantiles"]["n"].tolist() == [2]


def test_the_seed_draws_the_tokens(monkeypatch):
    from kvinterp.auditing import blocks

    seeds, draw = [], blocks.prompts_for
    monkeypatch.setattr(blocks, "prompts_for", lambda *given, **named: seeds.append(given[-1]) or draw(*given, **named))
    for seed in (3, 4):
        Norms(**SMALL, seed=seed).run(None, progress="none")
    assert seeds == [3, 4]


def test_an_audit_says_where_the_model_stands_and_is_not_judged_by_it(tmp_path, monkeypatch):
    model = kv.load_model("zoo:gqa2-mini", dtype="float32", kind="native")
    given = {"rungs": ("float32",), "lengths": (64,), "steps": 2, "checks": "none", "sweep": "no"}
    about = {**OF, "architecture": model.facts.architecture, "layers": model.facts.layers, "width": model.facts.width}
    verdicts = []
    for name, size in (("small", 0.0), ("large", 1.0)):
        file = tmp_path / f"{name}.csv"
        rows = table(*[size] * 9, **{**about, "dtype": "float32"}).assign(device="cpu A")
        rows.to_csv(file, index=False)
        monkeypatch.setenv(norms.VARIABLE, str(file))
        monkeypatch.setattr(norms, "shipped", lambda file=file: file)
        verdicts.append(kv.audit(model, **given))
    assert [v.norms["percentile"] for v in verdicts][1] == 0
    assert verdicts[0].norms["percentile"] >= 50
    assert verdicts[0].verdict == verdicts[1].verdict
    assert "norms: " in verdicts[0].reading
    assert verdicts[0].parts[2], "the line on what was run is found behind it"
    monkeypatch.setattr(norms, "known", lambda: table(1.0))
    alone = kv.audit(model, **given)
    assert "nothing comparable" in alone.norms["said"]
    assert "norms: " not in alone.reading


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n", "cannot be read"),
        ("", "cannot be read"),
        (",".join(COLUMNS) + "\n" + ",".join(["x"] * 12), "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_of_norms_is_one_sentence(tmp_path, content, said):
    (tmp_path / "other.csv").write_text(content)
    with pytest.raises(kv.InputError, match=said):
        Norms(**SMALL, add=tmp_path / "other.csv").run(None, progress="none")


def test_a_folder_is_read_as_none_and_a_bad_table_is_said_before_an_audit_begins(tmp_path, monkeypatch):
    assert callable(kv.audit)  # Its module is there from here on.
    with pytest.raises(kv.InputError, match=r"cannot be read \(it is a folder and no file\): expected a table"):
        read_norms(tmp_path)
    monkeypatch.setenv(norms.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys.modules["kvinterp.auditing.audit"], "_Auditor", lambda *given: pytest.fail("it began"))
    with pytest.raises(kv.InputError, match=r"KVINTERP_NORMS .* cannot be read"):
        kv.audit(kv.load_model("zoo:gqa2-mini", dtype="float32", kind="native"), lengths=(8,), steps=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["tiny:nothing"], "nothing"),
        (["--dtypes", "int3"], "int3"),
        (["--calls", "forkd"], "did you mean 'forked'"),
        (["--add", "missing.csv"], "missing.csv"),
        (["--lengths", "99999999"], "32,768"),
        (["--steps", "1"], "steps"),
    ],
)
def test_bad_input_is_one_sentence(options, said, tmp_path):
    model = ["zoo:gqa2-mini"] if options[0].startswith("-") else []
    wrong(said, "norms", *model, *options, "--out", str(tmp_path / "o"))
