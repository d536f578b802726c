"""Folders that were damaged by hand, and results that have nothing to show: one sentence each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import kvinterp as kv
from command_line import kvinterp
from kvinterp.comparison import compare, failures_kept
from support import PROMPT, Case
from writing import resealed


@pytest.fixture(scope="module")
def saved(load: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = load(Case("zoo:gqa2-mini", "native"), "float16")
    both = kv.compare(adapter, [list(PROMPT)], max_new_tokens=2, record="", progress="none")
    return both.save(tmp_path_factory.mktemp("kept") / "both")


@pytest.mark.parametrize(
    ("key", "value"),
    [("provenance", None), ("provenance", []), ("provenance", {}), ("sha256", {}), ("failures", 3)],
)
def test_a_summary_that_says_something_else_is_a_sentence(saved: Path, tmp_path: Path, key: str, value: Any) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "folder"))
    resealed(folder / "summary.json", **{key: value})
    with pytest.raises(kv.InputError, match="holds no readable result"):
        kv.load(folder)


def test_a_result_without_a_measurement_has_no_page_and_says_so(load: Any, tmp_path: Path) -> None:
    adapter = load(Case("llama-gqa", "native"), "float32")
    weight = adapter.model.lm_head.weight
    before = weight.data.clone()
    try:
        weight.data.fill_(float("nan"))
        none = compare(adapter, [list(PROMPT)], max_new_tokens=2, record="", progress="none", done=failures_kept)
    finally:
        weight.data.copy_(before)
    assert len(none.failures) == 1
    none.save(tmp_path / "none")
    with pytest.raises(kv.InputError, match="nothing was measured; see the failures"):
        none.report(tmp_path / "none")
    shown = kvinterp("show", tmp_path / "none", "--rewrite", "--no-open")
    assert shown.exit_code == 2, shown.output


def test_attribution_and_lens_without_a_decode_step_say_so(load: Any) -> None:
    adapter = load(Case("zoo:gqa2-mini", "native"), "float32")
    for found in (kv.logit_attribution, kv.logit_lens):
        nothing = found(adapter, [list(PROMPT)], max_new_tokens=1)
        assert any("no step was decoded after the prefill" in line.lower() for line in nothing.sentences())
        assert nothing.figures() == {}
        assert "<" in nothing._repr_html_()
        assert "layer" in nothing.overview().columns


def test_a_bench_takes_hook_names_and_refuses_layers_that_are_not_there(load: Any) -> None:
    bench = kv.PatchBench(load(Case("zoo:gqa2-mini", "native"), "float32"), 3)
    one = bench.ask(list(PROMPT), "blocks.1.hook_resid_post")
    other = bench.ask(list(PROMPT), "resid_post", layer=1)
    assert (one.asked, one.d_after) == (other.asked, other.d_after)
    with pytest.raises(kv.InputError):
        bench.ask(list(PROMPT), layer=99)
    assert "nan" not in repr(bench.ask(list(PROMPT), donor="zero"))


def test_a_bracket_that_is_not_closed_is_said() -> None:
    with pytest.raises(kv.InputError, match="the bracket is not closed"):
        kv.load_prompts("gsm8k(")


def test_two_answers_are_two_tokens(load: Any) -> None:
    with pytest.raises(kv.InputError, match="are one token"):
        kv.logit_attribution(load(Case("zoo:gqa2-mini", "native"), "float32"), [list(PROMPT)], answers=("7", "7"))
