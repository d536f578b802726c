"""The comparison that writes a folder: what it records unasked, what it does when cut off, and with NaN."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvinterp.commands.compare import Compare
from kvinterp.commands.results import read_summary
from kvinterp.common.store import CellStore
from kvinterp.comparison import TABLES, Comparison
from kvinterp.models.native import NativeAdapter
from kvinterp.models.native_sites import NativeSites
from kvinterp.models.taps import Tap

pytestmark = pytest.mark.xdist_group("compare")
SMALL = Compare(
    "zoo:mistral-mini", "arithmetic:4", max_new_tokens=4, strategy="top_p(0.99,3.0)", seed=5, stop="length", device="cpu"
)


def run(asked: Compare, folder: Path, existing: str = "error") -> Comparison:
    """Its tables, without a page."""
    made: Comparison = asked.run(folder, existing, "none", figures="none")
    return made


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}


def same(one: Path, other: Path) -> None:
    for (name, frame), found in zip(tables(one).items(), tables(other).values(), strict=True):
        assert len(frame) > 0 or name in ("heads", "kv")
        pd.testing.assert_frame_equal(frame, found, check_exact=True, obj=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run of SMALL."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run(SMALL, folder)
    return folder


def cut_after(count: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``count`` prompts finish and then raises."""
    keep, seen = CellStore.keep, []

    def keeping(self: CellStore, key: str, *part: Any) -> None:
        keep(self, key, *part)
        seen.append(key)
        if len(seen) == count:
            raise error

    monkeypatch.setattr(CellStore, "keep", keeping)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.long)])
def test_interrupted_and_gone_on_with_gives_the_uninterrupted_tables(
    tmp_path: Path, whole: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/laws.md, law 8, with sampling: the random numbers belong to the example and not to the place in the rest."""
    with monkeypatch.context() as patch:
        cut_after(count, KeyboardInterrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            run(SMALL, tmp_path)
    partly = read_summary(tmp_path)
    assert partly["interrupted"] is True
    assert partly["counts"]["examples"] == count
    assert partly["counts"]["planned"] == 4
    run(SMALL, tmp_path)
    same(tmp_path, whole)
    assert read_summary(tmp_path) == read_summary(whole)


def test_only_what_is_missing_is_run_again(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        cut_after(3, KeyboardInterrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            run(SMALL, tmp_path)
    added: list[str] = []
    keep = CellStore.keep
    with monkeypatch.context() as patch:
        patch.setattr(CellStore, "keep", lambda self, key, *part: (added.append(key), keep(self, key, *part))[1])
        run(SMALL, tmp_path)
    assert len(added) == 1
    same(tmp_path, whole)


def test_unasked_it_records_what_the_model_can_give(
    whole: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    summary = read_summary(whole)
    assert summary["settings"]["record"] == ["resid_post", "pattern", "cache_k", "cache_v"]
    assert not summary["settings"]["left_out"]
    find = NativeSites.find

    def blind(self: NativeSites, site: str, layer: int) -> Tap:
        if site == "pattern":
            raise self.lacks(site, "it has no attention")
        return find(self, site, layer)

    monkeypatch.setattr(NativeSites, "find", blind)
    with caplog.at_level(logging.INFO, "kvinterp"):
        result = run(dataclasses.replace(SMALL, prompts="arithmetic:1"), tmp_path)
    assert not len(result.heads)
    assert "pattern is not recorded" in caplog.text
    assert "no attention" in result.settings["left_out"]["pattern"]


def test_nan_in_one_prompt_leaves_the_others_as_they_are(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_second_prompt(monkeypatch)
    result = run(SMALL, tmp_path)
    assert result.written()[1]["counts"] == {"examples": 3, "steps": 12, "failed": 1, "planned": 4}
    (failure,) = result.written()[1]["failures"]
    assert failure["id"] == "arithmetic-0-1"
    assert "NaN first appeared" in failure["message"]
    for (name, frame), found in zip(tables(whole).items(), tables(tmp_path).values(), strict=True):
        expected = frame[frame["example"] != 1].reset_index(drop=True)
        pd.testing.assert_frame_equal(expected, found, check_exact=True, obj=name)


def poison_second_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the logits NaN wherever the second arithmetic problem is in the context."""
    from kvinterp.data import load_prompts

    forward, second = NativeAdapter.forward, load_prompts("arithmetic:4")[1].text

    def poisoned(self: NativeAdapter, tokens: torch.Tensor, store: Any = None) -> torch.Tensor:
        logits = forward(self, tokens, store)
        prompt = self.encode(second)
        return logits * torch.nan if tokens[0, : len(prompt)].tolist() == prompt else logits

    monkeypatch.setattr(NativeAdapter, "forward", poisoned)


@pytest.mark.slow
def test_a_pattern_that_was_asked_for_leaves_the_kernel_as_it_is(whole: Path, tmp_path: Path) -> None:
    """It brought eager attention, under which the difference that was looked for may be gone."""
    result = run(dataclasses.replace(SMALL, record="pattern"), tmp_path / "out")
    assert result.provenance["attention"] == "sdpa"
    assert set(result.heads["pattern"]) == {"derived"}
    bare = run(dataclasses.replace(SMALL, record=""), tmp_path / "bare")
    pd.testing.assert_frame_equal(result.steps, bare.steps, check_exact=True)
    eager = run(dataclasses.replace(SMALL, record="pattern", attention="eager"), tmp_path / "eager")
    assert eager.provenance["attention"] == "eager"
    assert set(eager.heads["pattern"]) == {"recorded"}
