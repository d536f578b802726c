"""Two saved results side by side, on comparisons of chosen numbers: no model runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.data import Prompt
from kvinterp.study.experiments.compare_runs import ONLY, OPEN, OUTSIDE, WITHIN, CompareRuns, beside_of, differences_of
from kvinterp.study.findings import finding, findings_of
from synthetic import comparison

NUMBERS = tuple(range(8))


def kept(
    folder: Path, size: float = 1e-3, flips: dict[int, float] | None = None, prompts: str = "prompt", **about: object
) -> Path:
    """A result: its logits differ by so much, and some prompts flip at a step."""
    made = comparison(NUMBERS, size=size)
    made.prompts = [Prompt(f"id-{n}", f"{prompts} {n}") for n in NUMBERS]
    made.provenance = {**made.provenance, **about}
    made.examples["flip_index"] = [(flips or {}).get(n, np.nan) for n in NUMBERS]
    return made.save(folder)


def compared(tmp_path: Path, **b: object) -> kv.Result:
    one = kept(tmp_path / "one", flips={0: 1.0, 1: 2.0, 2: 3.0})
    other = kept(tmp_path / "other", **b)  # type: ignore[arg-type]
    return kv.experiment("compare-runs", first=one, second=str(other), progress="none")


def test_flips_gained_and_lost_are_named_prompt_by_prompt(tmp_path: Path) -> None:
    found = compared(tmp_path, flips={1: 2.0, 2: 4.0, 5: 1.0})
    changes = found.tables["flips"].set_index("id")["change"]
    assert changes[[f"id-{n}" for n in (0, 1, 2, 3, 5)]].tolist() == ["lost", "same", "moved", "none", "gained"]
    rows = found.tables["findings"].set_index("finding")
    assert rows.loc["prompts that flip in B only", ["estimate", "n", "note"]].tolist() == [1 / 8, 8, "id-5"]
    assert rows.loc["prompts that flip in A only", "note"] == "id-0"
    assert "1 in B only, 1 in A only" in found.sentences()[0]


def test_the_paired_median_is_of_prompts_and_has_its_interval(tmp_path: Path) -> None:
    found = compared(tmp_path, size=1e-1, dtype="bfloat16")
    row = found.tables["findings"].iloc[0]
    change = found.tables["by_prompt"].query("quantity == 'mean KL'").eval("b - a")
    assert (change > 0).all()
    assert row["estimate"] == pytest.approx(float(change.median()), rel=1e-12)
    assert row["low"] <= row["estimate"] <= row["high"]
    assert (row["n"], row["note"]) == (8, "larger in B for 8, in A for 0")
    assert ["dtype", "float16", "bfloat16"] in found.tables["differences"].to_numpy().tolist()
    assert "dtype (float16; bfloat16)" in found.sentences()[1]
    kl = found.tables["beside"].set_index("finding").loc["median of a prompt's mean KL"]
    assert kl["reading"] == OUTSIDE


def test_a_result_beside_itself_is_equal_in_everything(tmp_path: Path) -> None:
    found = compared(tmp_path, flips={0: 1.0, 1: 2.0, 2: 3.0})
    assert set(found.tables["beside"]["reading"]) == {"equal"}
    assert "differences" not in found.tables
    assert found.sentences()[1] == "They were chosen and made alike."
    assert (found.tables["by_prompt"]["a"] == found.tables["by_prompt"]["b"]).all()


def test_prompts_of_one_id_and_another_text_are_no_pair(tmp_path: Path) -> None:
    found = compared(tmp_path, prompts="another")
    assert not {"flips", "by_prompt"} & set(found.tables)
    assert "no prompt is in both" in found.sentences()[0]


def rows(*given: tuple[str, float, float, float, float]) -> pd.DataFrame:
    return findings_of([finding(name, at, (low, high), 5, layer=layer) for name, at, low, high, layer in given])


def test_findings_are_joined_by_name_and_label() -> None:
    nan = np.nan
    a = rows(("x", 1, 0, 2, 0), ("x", 1, 0, 2, 1), ("y", 1, nan, nan, 0), ("z", 1, 0, 2, 0), ("mine", 1, 0, 2, 0))
    b = rows(("x", 5, 4, 6, 1), ("x", 1.5, 1.2, 3, 0), ("y", 2, nan, nan, 0), ("z", 1, 0, 2, 0), ("theirs", 1, 0, 2, 0))
    both = beside_of(a, b)
    assert both["reading"].tolist() == [WITHIN, OUTSIDE, OPEN, "equal", *ONLY]
    assert both["finding"].tolist() == ["x", "x", "y", "z", "mine", "theirs"]
    assert both.loc[both["reading"] == OUTSIDE, ["of", "estimate_a", "estimate_b"]].to_numpy().tolist() == [
        ["layer 1", 1, 5]
    ]


def test_one_models_findings_are_joined_with_another_models() -> None:
    a, b = (findings_of([finding("x", 1, n=1, model=model)]) for model in ("one", "other"))
    assert beside_of(a, b)["reading"].tolist() == ["equal"]
    several = pd.concat([a, a.assign(model="third")])
    assert set(beside_of(several, b)["reading"]) == set(ONLY)


def test_differences_go_into_what_is_nested() -> None:
    found = differences_of({"same": 1, "flags": {"x": True, "y": 1}, "paths": ("a",)}, {"same": 1, "flags": {"x": False}})
    assert found.to_numpy().tolist() == [["flags.x", "True", "False"], ["flags.y", "1", "–"], ["paths", "a", "–"]]


def test_the_command_writes_a_page_that_escapes_what_it_shows(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    one, other = kept(tmp_path / "one", model=evil), kept(tmp_path / "other", flips={0: 2.0})
    made = kvinterp("compare-runs", one, other, "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert "What changed between two results?" in page
    assert "id-0" in page
    assert evil not in page
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["prompts_of_both"] == 8
    # Another result in one of the folders is another question.
    before = CompareRuns(one, other).asked()
    assert before == CompareRuns(one, other).asked()
    other.rename(tmp_path / "old")
    kept(other, size=1e-2)
    assert before != CompareRuns(one, other).asked()


def test_what_cannot_be_laid_side_by_side_is_said_in_one_sentence(tmp_path: Path) -> None:
    one = kept(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    wrong("holds no result", "compare-runs", one, tmp_path / "empty", "--out", tmp_path / "out")
    wrong("does not exist", "compare-runs", tmp_path / "none", one, "--out", tmp_path / "out")
    again = kv.experiment("compare-runs", first=one, second=one, progress="none").save(tmp_path / "again")
    wrong("one of compare-runs: expected two results of one command", "compare-runs", one, again, "--out", tmp_path / "out")
    table = pd.read_parquet(one / "steps.parquet")
    table.assign(kl="text").to_parquet(one / "steps.parquet")
    wrong("steps.parquet is not the one", "compare-runs", one, again, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "summary.json").exists()


def test_results_that_are_of_many_models_have_a_figure_too(tmp_path: Path) -> None:
    from kvinterp.study.report.style import small_print

    about = comparison(NUMBERS).provenance
    names = ("torch", "transformers", "transformer_lens", "kvinterp", "device", "threads")
    said = small_print([{name: about[name] for name in names}])
    assert str(about["device"]) in said
    assert "weights" not in said
    assert "weights" in small_print([about])


_REST = {
    **dict.fromkeys(("fixed_order_block_error", "fixed_order_max_abs_logit", "null_max_abs_logit"), None),
    **dict.fromkeys(("fixed_order_bitwise_equal", "fixed_order_checks", "prompt_rows_error_in_unit_roundoffs"), 0),
    "nonfinite": {},
}
"""What else an audit says of a precision."""


def test_audits_are_laid_side_by_side_by_rung_and_check(tmp_path: Path) -> None:
    from kvinterp.auditing import Verdict
    from kvinterp.auditing.bench import Check

    def audited(word: str, status: str, error: float, folder: Path) -> Path:
        rung = {
            "unit_roundoff": 1e-7,
            "steps": 4,
            "bitwise_equal_steps": 0,
            "max_abs_logit": error,
            "max_kl": 0.0,
            "relative_logit": error,
            "block_error": error,
        }
        evidence = {"float32": {**rung, **_REST, "block_error_in_unit_roundoffs": 3.0}}
        check = Check("padded", status, "said")
        reading = f"{'PASS' if word == 'rounding' else 'FAIL'}  {word}  a model"
        about = {**comparison((0,)).provenance, "model": "m"}
        Verdict(word, None, None, "", "", evidence, (check,), (), reading, provenance=about).save(folder)
        return folder

    one = audited("rounding", "passed", 1e-5, tmp_path / "one")
    other = audited("bug", "failed", 0.5, tmp_path / "other")
    found = CompareRuns(one, other).run(None, progress="none")
    assert ["verdict", "rounding", "bug"] in found.tables["differences"].to_numpy().tolist()
    beside = found.tables["beside"].set_index(["finding", "of"])
    assert beside.loc[("passes", "padded"), ["estimate_a", "estimate_b"]].tolist() == [1, 0]
    assert beside.loc[("max abs logit", "float32"), "estimate_b"] == 0.5
