"""The command line: what it writes, and what it says to wrong input."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from typer.testing import CliRunner

from kvinterp.cli import app

SMALL = ["--prompts", "arithmetic:2", "--max-new-tokens", "4", "--device", "cpu"]


def called(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_compare_writes_its_tables_and_summary(tmp_path):
    result = called("compare", "zoo:mistral-mini", "--out", tmp_path / "out", "--kind", "bridge", *SMALL)
    assert result.exit_code == 0, result.output
    steps = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    wanted = "example step token_a token_b kl js max_abs_logit margin_a margin_b flipped"
    assert set(wanted.split()) <= set(steps.columns)
    for name in ("examples", "layers", "heads", "kv"):
        assert len(pd.read_parquet(tmp_path / "out" / f"{name}.parquet"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    keys = "paths protocol strategy divergence_rate mean_kl mean_kl_before_flip mean_kl_after_flip max_abs_logit provenance"
    assert set(keys.split()) <= set(summary)
    assert summary["mean_kl"] == pytest.approx(steps["kl"].mean())
    assert list((tmp_path / "out" / "figures").glob("*.png"))
    again = called("compare", "zoo:mistral-mini", "--out", tmp_path / "out", "--kind", "bridge", *SMALL)
    assert again.exit_code == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["zoo:mistrel-mini"], "mistral-mini"),
        (["zoo:mistral-mini", "--kind", "nativ"], "native"),
        (["zoo:mistral-mini", "--strategy", "gredy"], "greedy"),
        (["zoo:mistral-mini", "--record", "resid_pots"], "resid_post"),
        (["zoo:mistral-mini", "--record", "pattern"], "eager"),
        (["zoo:mistral-mini", "--a", "cash"], "cached"),
        (["zoo:mistral-mini", "--protocol", "fre"], "free"),
        (["zoo:mistral-mini", "--layers", "0,x"], "whole numbers"),
        (["zoo:mistral-mini", "--max-new-tokens", "2000"], "context"),
        (["."], "config.json"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, changed, said):
    monkeypatch.chdir(tmp_path)
    result = called(
        "compare", changed[0], "--prompts", "arithmetic:1", "--device", "cpu", "--out", tmp_path / "o", *changed[1:]
    )
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "o" / "summary.json").exists()


def test_prompt_files_that_cannot_be_read(tmp_path):
    file = tmp_path / "p.jsonl"
    for text, said in (("", "empty"), ('{"prompt": "a"}\n{broken\n', "line 2")):
        file.write_text(text)
        result = called("compare", "zoo:mistral-mini", "--prompts", file, "--out", tmp_path / "o")
        assert result.exit_code == 2
        assert said in result.output


def test_list_patch_and_decompose(tmp_path):
    assert called("list", "models").exit_code == 0
    args = ["--prompts", "arithmetic:1", "--max-new-tokens", "3", "--device", "cpu"]
    result = called("patch", "zoo:mistral-mini", "--out", tmp_path / "p", "--controls", "quick", *args)
    assert result.exit_code == 0, result.output
    wanted = "site layer head step_set direction example recovery d_before d_after"
    assert set(wanted.split()) <= set(pd.read_parquet(tmp_path / "p" / "recovery.parquet").columns)
    result = called("decompose", "zoo:mistral-mini", "--out", tmp_path / "d", *args)
    assert result.exit_code == 0, result.output
    assert {"example", "step", "total", "fresh", "state", "null"} <= set(
        pd.read_parquet(tmp_path / "d" / "decomposition.parquet").columns
    )


def test_an_interrupted_run_goes_on_and_gives_the_same_table(tmp_path):
    """Interrupted after its first part; the same command finishes it; every number is that of an uninterrupted run."""
    args = ["--prompts", "arithmetic:12", "--max-new-tokens", "24", "--device", "cpu", "--stop", "length"]
    command = [sys.executable, "-m", "kvinterp.cli", "compare", "zoo:mistral-mini", *args, "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "cut")], stderr=subprocess.PIPE, env=dict(os.environ))
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cut").glob(".parts/part-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("it had finished before the signal came")
    assert process.returncode == 130
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["interrupted"] is True
    part = pd.read_parquet(tmp_path / "cut" / "steps.parquet")
    assert 0 < part["example"].nunique() < 12
    assert subprocess.run([*command, str(tmp_path / "cut")], check=False, capture_output=True).returncode == 0
    assert subprocess.run([*command, str(tmp_path / "whole")], check=False, capture_output=True).returncode == 0
    tables = [pd.read_parquet(tmp_path / name / "steps.parquet").sort_values(["example", "step"], ignore_index=True)
              for name in ("cut", "whole")]  # fmt: skip
    pd.testing.assert_frame_equal(*tables)
