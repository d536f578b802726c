"""The comparison that writes a folder: what it records unasked, what it does when cut off, and with NaN."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvinterp.common.store import Store
from kvinterp.comparison import TABLES, Comparison
from kvinterp.errors import InputError
from kvinterp.models.hooks import Tap
from kvinterp.models.native import NativeAdapter
from kvinterp.models.native_sites import NativeSites
from kvinterp.study.experiments.compare import Compare
from kvinterp.study.experiments.registry import experiment_named, experiments
from kvinterp.study.results import read_summary

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
        assert len(frame) > 0 or name in ("heads", "kv", "routing")
        pd.testing.assert_frame_equal(frame, found, check_exact=True, obj=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run of SMALL."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run(SMALL, folder)
    return folder


def cut_after(count: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``count`` prompts finish and then raises."""
    keep, seen = Store.keep, []

    def keeping(self: Store, key: str, *part: Any) -> None:
        keep(self, key, *part)
        seen.append(key)
        if len(seen) == count:
            raise error

    monkeypatch.setattr(Store, "keep", keeping)


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
        cut_after(3, MemoryError, patch)
        with pytest.raises(MemoryError):
            run(SMALL, tmp_path)
    added: list[str] = []
    keep = Store.keep
    with monkeypatch.context() as patch:
        patch.setattr(Store, "keep", lambda self, key, *part: (added.append(key), keep(self, key, *part))[1])
        run(SMALL, tmp_path)
    assert len(added) == 1
    same(tmp_path, whole)


def test_the_batch_size_is_no_reason_to_start_anew(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        cut_after(1, KeyboardInterrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            run(SMALL, tmp_path)
    run(dataclasses.replace(SMALL, batch_size=2), tmp_path)
    same(tmp_path, whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 6}, "seed: 5, now 6"),
        ({"max_new_tokens": 3}, "max_new_tokens: 4, now 3"),
        ({"protocol": "free"}, 'protocol: "matched", now "free"'),
        ({"b": "recompute@float32"}, 'b: "recompute", now "recompute@float32"'),
        ({"prompts": "arithmetic:3"}, "prompts.count: 4, now 3"),
        ({"dtype": "float32"}, "made_with.weights"),
        ({"record": "resid_post"}, "record"),
        ({"layers": (0,)}, "layers"),
    ],
)
def test_every_choice_that_changes_numbers_is_held_against_what_is_there(
    whole: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError) as error:
        run(dataclasses.replace(SMALL, **change), whole, "use")
    assert named in str(error.value)


def test_a_finished_result_is_read_where_that_is_asked(whole: Path) -> None:
    result = run(SMALL, whole, "use")
    held = read_summary(whole)
    assert result.settings == held["settings"]
    assert {name: said for name, said in result.written()[1].items() if held[name] != said} == {}


def test_a_finished_result_is_refused_before_the_model_is_loaded(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvinterp.models.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match="already holds a result"):
        dataclasses.replace(SMALL, seed=6).run(whole)
    shutil.copytree(whole, tmp_path / "told")
    (tmp_path / "told" / "report.html").write_text("the report")
    with pytest.raises(InputError, match="already holds a result"):
        SMALL.run(tmp_path / "told")


def test_cut_off_before_its_page_it_is_not_made_again(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off between tables and report, the same command said "already holds a result", and there was never a report."""

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvinterp.study.report.experiment.write_experiment", cut)
        with pytest.raises(KeyboardInterrupt):
            SMALL.run(tmp_path, progress="none")
    monkeypatch.setattr("kvinterp.comparison.compare", lambda *_, **__: pytest.fail("it was made again"))
    run(SMALL, tmp_path)
    same(tmp_path, whole)
    assert read_summary(tmp_path) == read_summary(whole)


def test_a_prompt_file_in_the_folder_itself_is_left_alone(tmp_path: Path) -> None:
    """It was rewritten, and deleted where the run was cut off or refused before its first prompt was done."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "q1", "prompt": "2+2?", "source": "mine"}\n')
    with pytest.raises(InputError, match=r"holds 'prompts.jsonl', which is of no result of ours"):
        run(dataclasses.replace(SMALL, prompts=str(file), max_new_tokens=1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert "mine" in file.read_text()


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


def test_a_site_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="site 'q' cannot be compared"):
        run(dataclasses.replace(SMALL, record="resid_post,q"), tmp_path / "out")


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


def test_the_registry_finds_every_experiment() -> None:
    assert experiment_named("compare") is Compare
    for name in experiments():
        found = experiment_named(name)
        assert found.verb() == name
        assert dataclasses.is_dataclass(found), name
        assert found.__doc__
        found()  # every choice has a default


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
