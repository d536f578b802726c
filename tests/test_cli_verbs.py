"""Patching, decomposing and auditing from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.auditing.verdict import VERDICTS

MODEL = "zoo:gqa2-mini"
QUICK = ("--prompts", "arithmetic:2", "--max-new-tokens", "4", "--device", "cpu")
SHORTEST = ("--lengths", "5", "--steps", "1", "--device", "cpu")


# patch and decompose ---------------------------------------------------------------------------------------------------


def test_patch_writes_recovery_summary_and_figures(tmp_path: Path) -> None:
    options = ("--sweep", "kv-heads", "--direction", "into-cached", "--steps", "first", "--protocol", "free")
    options += ("--a", "cached+int4")
    made = kvinterp(
        "patch",
        MODEL,
        "--out",
        tmp_path / "out",
        "--site",
        "kv",
        *options,
        "--controls",
        "quick",
        *QUICK,
        "--figures",
        "png",
    )
    assert made.exit_code == 0, made.output
    assert "kv, into-cached, cached+int4 against recompute, " in " ".join(made.stdout.split())
    table = pd.read_parquet(tmp_path / "out" / "recovery.parquet")
    wanted = {"site", "layer", "head", "step_set", "direction", "example", "recovery", "d_before", "d_after"}
    assert wanted <= set(table.columns)
    assert len(table) == 2 * 4 * 4  # prompts, layers, KV heads
    assert set(table["step_set"]) == {"first"}
    assert set(table["direction"]) == {"into-cached"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["examples"] == 2
    assert summary["protocol"] == "free"
    assert summary["controls"]["self"] in (0.0, None)
    assert (tmp_path / "out" / "figures" / "recovery.png").stat().st_size > 10_000
    assert f"page  {tmp_path / 'out' / 'report.html'}" in made.stdout


def test_decompose_writes_its_split(tmp_path: Path) -> None:
    made = kvinterp("decompose", MODEL, "--out", tmp_path / "out", *QUICK, "--figures", "png")
    assert made.exit_code == 0, made.output
    table = pd.read_parquet(tmp_path / "out" / "decomposition.parquet")
    assert {"example", "step", "total", "newest_row", "state", "null"} <= set(table.columns)
    assert (table.loc[table["step"] == 0, ["total", "state"]] == 0).all(axis=None)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["total"] == pytest.approx(table.loc[table["step"] > 0, "total"].mean(), rel=1e-12, abs=0)
    assert (tmp_path / "out" / "figures" / "decomposition.png").stat().st_size > 10_000
    again = ("decompose", MODEL, "--out", tmp_path / "out", *QUICK)
    wrong("already holds a result: choose another folder with --out, or pass --overwrite", *again)


def test_attention_writes_every_head_side_by_side(tmp_path: Path) -> None:
    """The table is that of `kv.attention_comparison`, and the page holds each head that differs; a second `report` keeps it."""
    paths = {"a": "cached+int4", "b": "recompute"}
    made = kvinterp("attention", MODEL, "--out", tmp_path / "out", "--a", paths["a"], "--step", "2", "--device", "cpu")
    assert made.exit_code == 0, made.output
    table = pd.read_parquet(tmp_path / "out" / "heads.parquet")
    adapter = kv.load_model(MODEL, kind="native", device="cpu")
    shown = kv.attention_comparison(adapter, kv.load_prompts("arithmetic:1")[0], step=2, **paths)
    pd.testing.assert_frame_equal(table, shown.heads)
    assert (tmp_path / "out" / "attention.html").read_text() == shown.page.html()
    most = table.iloc[0]
    assert f"most in layer {most['layer']}, head {most['head']}:" in made.stdout
    assert kvinterp("show", tmp_path / "out", "--rewrite", "--no-open").exit_code == 0
    assert 'href="./attention.html"' in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("patch", MODEL, "--site", "resid_pst"), "did you mean 'resid_post'"),
        (("patch", MODEL, "--steps", "last"), "'last'"),
        (("patch", MODEL, "--a", "recompute"), "needs a cached and an unchunked recompute path, in this order"),
        (("decompose", MODEL, "--b", "cached"), "needs a cached and an unchunked recompute path, in this order"),
        (("patch", MODEL, "--site", "pattern"), "pattern cannot be patched under attention 'sdpa'"),
        (("audit", MODEL, "--rungs", "float12"), "unknown dtype 'float12'"),
        (("audit", MODEL, "--lengths", "5,x"), "'--lengths': '5,x' cannot be read"),
        (("audit", MODEL, "--steps", "0"), "steps=0"),
        (("audit", MODEL, "--random-init", "--kind", "hooked"), "--random-init"),
        (("audit", "nowhere/config.json", "--random-init"), "nowhere/config.json"),
        (("kernels", MODEL, "--sizes", "1"), "sizes=(1,)"),
        (("kernels", MODEL, "--kernels", "split"), "unknown kernel mode"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    wrong(said, *arguments, "--device", "cpu", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# audit and kernels -----------------------------------------------------------------------------------------------------


def test_audit_of_a_config_alone(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    config = tmp_path / "config.json"
    config.write_text((checkpoint("llama-gqa") / "config.json").read_text())
    made = kvinterp("audit", config, "--random-init", "--out", tmp_path / "out", *SHORTEST, "--rungs", "float32")
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "out" / "verdict.json").read_text())["verdict"] in VERDICTS


def test_kernels_prints_and_writes_its_table(tmp_path: Path) -> None:
    made = kvinterp("kernels", MODEL, "--sizes", "1,2,17", "--device", "cpu", "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    table = pd.read_parquet(tmp_path / "out" / "kernels.parquet")
    assert {"linear", "unembed", "norm", "attention (SDPA)"} <= set(table["operation"])
    assert set(table["size"]) == {1, 2, 4, 17}
    assert "operations; " in made.stdout
    assert "reading" in json.loads((tmp_path / "out" / "summary.json").read_text())
