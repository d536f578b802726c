"""A study is its experiments, each cell done once; its report is made from what is in the folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from matplotlib.figure import Figure

import kvinterp.study.experiments.study as study
from command_line import kvinterp, wrong
from cutting import same
from kvinterp.common.result import Result
from kvinterp.common.store import Made, Store
from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.models.inputs import encode
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.of_models import OfModels
from kvinterp.study.experiments.registry import experiment_named
from kvinterp.study.experiments.study import Study
from kvinterp.study.report.latex import latex_number, latex_of, latex_text, markdown_of
from kvinterp.study.report.style import sheet
from writing import cells_of, change_cell, resealed

MODEL = "zoo:gqa2-mini"
SUFFIXES = ("png", "svg", "pdf")
pytestmark = pytest.mark.xdist_group("study")


def tokens_of(model: Mapping[str, Any], prompts: str, plus: int, example: int) -> pd.DataFrame:
    """A cell's function."""
    adapter = loaded(model)
    ids = encode(adapter, load_prompts(prompts)[example], 1)
    return pd.DataFrame({"model": [adapter.facts.name], "example": [example], "tokens": [len(ids) + plus], "small": [1e-7]})


@dataclasses.dataclass(frozen=True)
class Lengths(OfModels):
    """How long is each prompt?"""

    TABLES: ClassVar = ("lengths",)
    plus: int = 0

    @classmethod
    def verb(cls) -> str:
        return "lengths"

    def cells(self) -> list[Cell]:
        settings = {"model": self.named(self.models[0]), "prompts": self.prompts, "plus": self.plus}
        count = len(load_prompts(self.prompts))
        return [Cell(f"lengths-{n}", f"{__name__}:tokens_of", settings | {"example": n}) for n in range(count)]

    def tables(self, made: Mapping[str, Made]) -> dict[str, pd.DataFrame]:
        return {self.TABLES[0]: joined(made)["table"]}

    def reduce(self, made: Mapping[str, Made]) -> Result:
        tables = self.tables(made)
        return Result(tables, {"reading": [f"{len(tables[self.TABLES[0]])} <b>rows</b>."]})

    def drawings(self, outcome: Result) -> dict[str, Figure]:
        with sheet(2, 1) as figure:
            figure.subplots().plot(outcome.tables[self.TABLES[0]]["tokens"])
        return {f"root_cause_{self.TABLES[0]}": figure}


@dataclasses.dataclass(frozen=True)
class Longest(Lengths):
    """And the longest, with the same cells and one more?"""

    TABLES: ClassVar = ("longest",)

    @classmethod
    def verb(cls) -> str:
        return "longest"

    def then(self, made: Mapping[str, Made]) -> list[Cell]:
        example = int(joined(made)["table"].nlargest(1, "tokens")["example"].iloc[0])
        settings = {"model": self.named(self.models[0]), "prompts": self.prompts, "plus": 100, "example": example}
        return [Cell("longest-0", f"{__name__}:tokens_of", settings)]

    def tables(self, made: Mapping[str, Made]) -> dict[str, pd.DataFrame]:
        return {"longest": made["longest-0"][0]["table"]}


@pytest.fixture(scope="module", autouse=True)
def _of_two() -> Iterator[None]:
    """A study of two short experiments, which have cells in common."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "EXPERIMENTS", ("lengths", "longest"))
        patch.setattr(study, "experiment_named", {"lengths": Lengths, "longest": Longest}.get)
        patch.setitem(study.PRESETS, "quick", study.PRESETS["quick"] | {"more": {}, "prompts": "arithmetic:2"})
        yield


def small(**more: Any) -> Study:
    return Study(**{"preset": "quick", "models": (MODEL,), "kinds": ("native", "hooked"), "device": "cpu", **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "out"
    small().run(folder, progress="none")
    return folder


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvinterp.study.cells.Local.__call__", lambda *_: pytest.fail("a cell was done"))


# What is in it ---------------------------------------------------------------------------------------------------------


def test_every_experiment_on_every_kind_in_one_folder(whole: Path) -> None:
    """Cells that two experiments have in common are done once; a second stage is among them."""
    tables = {path.stem: pd.read_parquet(path) for path in whole.glob("*.parquet")}
    assert {"lengths", "longest", "cells"} <= set(tables)
    for name, rows in (("lengths", 2), ("longest", 1)):
        assert list(tables[name]["model"]) == [f"{MODEL} (native)"] * rows + [f"{MODEL} (hooked)"] * rows
    assert list(tables["longest"]["tokens"]) == [tables["lengths"]["tokens"].max() + 100] * 2
    keys = {"lengths": ["lengths-0", "lengths-1"], "longest": ["lengths-0", "lengths-1", "longest-0"]}
    for (name, kind), rows in tables["cells"].groupby(["experiment", "kind"]):
        assert list(rows["key"].str.replace(r"-[0-9a-f]{8}-", "-", regex=True)) == [f"{kind}-{key}" for key in keys[name]]
    assert tables["cells"]["finished"].all()
    drawn = {path.name for path in (whole / "figures").iterdir()}
    names = itertools.product(("native", "hooked"), ("lengths", "longest"), SUFFIXES)
    assert drawn == {f"{kind}-root_cause_{name}.{suffix}" for kind, name, suffix in names}
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["counts"] == {"cells": 6, "finished": 6}
    assert summary["interrupted"] is False


def test_the_page_leads_from_each_claim_to_what_it_rests_on(whole: Path) -> None:
    page = (whole / "report.html").read_text()
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(names)
    for name in ("figure-native-root_cause_lengths", "table-longest", "cells-lengths-hooked"):
        assert name in names
    assert "http" not in page.replace("http-equiv", "")
    assert "<b>rows" not in page
    markdown = (whole / "study.md").read_text()
    shown = re.findall(r"\]\((figures/[^)]+)\)", markdown)
    assert len(shown) == 4
    assert all((whole / path).is_file() for path in shown)


def test_a_second_run_does_no_cell_and_says_the_same(whole: Path, nothing_runs: None) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    again = small().run(whole, progress="none")
    assert {path: path.read_bytes() for path in before} == before
    assert again.summary["reading"] == json.loads((whole / "summary.json").read_text())["reading"]


def test_the_report_is_made_again_without_a_model(
    whole: Path, tmp_path: Path, nothing_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvinterp.models.load.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr("kvinterp.models.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    shutil.rmtree(out / "figures")
    for name in ("report.html", "study.md", "tables.tex"):
        (out / name).unlink()
    made = kvinterp("report", out)
    assert made.exit_code == 0, made.output
    same(out, whole)


@pytest.mark.slow
def test_the_report_judges_the_claims_anew(whole: Path, tmp_path: Path) -> None:
    """Tables that an earlier version wrote are judged by today's rules, and what that changes is said."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    claims = pd.read_parquet(out / "claims.parquet")
    claims.loc[0, "verdict"] = "holds here"
    claims.iloc[:-1].to_parquet(out / "claims.parquet", index=False)
    resealed(out / "summary.json")
    made = kvinterp("report", out)
    assert made.exit_code == 0, made.output
    first, last = claims["id"].iloc[0], claims["id"].iloc[-1]
    said = f"2 verdicts other than in claims.parquet, which keeps those that were written with the tables: {first} (holds here before"
    for text in (made.output, (out / "report.html").read_text()):
        assert said in text
        assert f"{last} (new)" in text


def test_the_prompts_are_kept(whole: Path) -> None:
    kept, given = load_prompts(str(whole / "prompts.jsonl")), load_prompts("arithmetic:2")
    assert [(prompt.id, prompt.text) for prompt in kept] == [(prompt.id, prompt.text) for prompt in given]


# Cut off, changed, damaged ---------------------------------------------------------------------------------------------


def stopping(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    keep, kept = Store.keep, list[str]()

    def cut(self: Store, key: str, *part: Any) -> None:
        keep(self, key, *part)
        kept.append(key)
        if len(kept) == count:
            raise error

    monkeypatch.setattr(Store, "keep", cut)


@pytest.mark.slow
def test_interrupted_it_leaves_what_is_finished_and_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of the experiment that is whole, a page on demand, and after all the same folder."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping(patch, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            small().run(out, progress="none")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["left_out"] == ["longest, hooked"]
    assert "Interrupted: 5 of 6 known cells are finished; not among the tables yet: longest, hooked." in summary["reading"]
    made = kvinterp("report", out)
    assert made.exit_code == 0, made.output
    assert "Interrupted: 5 of 6" in (out / "report.html").read_text()
    with monkeypatch.context() as patch:
        stopping(patch, 2, AssertionError("more than one cell was done"))
        small().run(out, progress="none")
    same(out, whole)


def test_a_full_disk_stops_it_with_one_sentence_and_it_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping(
            patch, 2, InputError("folder 'out' cannot be written (No space left on device): choose another with --out.")
        )
        with pytest.raises(InputError, match="No space left"):
            small().run(out, progress="none")
    assert not (out / "summary.json").exists()
    small().run(out, progress="none")
    same(out, whole)


def test_a_damaged_cell_is_done_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping(patch, 2, InputError("stop"))
        with pytest.raises(InputError):
            small().run(out, progress="none")
    (key, *_) = (key for key in cells_of(out) if re.fullmatch(r"native-.*-lengths-0", key))
    change_cell(out, key, lambda content: content[:-1])
    small().run(out, progress="none")
    assert f"part {key} in {out} is damaged: it is made again" in caplog.text
    same(out, whole)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"prompts": "arithmetic:3"}, "prompts"), ({"more": ("lengths.plus=1",)}, "more")],
)
def test_changed_choices_reuse_nothing(whole: Path, nothing_runs: None, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"made with other settings.*{said}"):
        small(**changed).run(whole, progress="none")


def test_a_folder_of_another_version_says_what_differs(
    whole: Path, nothing_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvinterp.models.provenance.__version__", "99.0")
    with pytest.raises(InputError, match=r'kvinterp: "[\d.]+", now "99\.0"'):
        small().run(whole, progress="none")


# What was given --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--preset", "zo"), "did you mean 'zoo'"),
        (("--only", "flip"), "unknown experiment of a study 'flip'"),
        (("--set", "lengths"), "expected EXPERIMENT.CHOICE=VALUE"),
        (("--set", "lengths.promts=arithmetic:1"), "did you mean 'prompts'"),
        (("--kind", "native("), "expected native, hooked or bridge"),
        (("--kind", "nativ"), "did you mean 'native'"),
        (("--set", "lengths.kind=hoked"), "did you mean 'hooked'"),
        (("--model", "zoo:nope"), "nope"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--engine", "rai"), "unknown engine 'rai'"),
        (("--prompts", "/no/such.jsonl"), "/no/such.jsonl"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    wrong(said, "study", "--preset", "quick", *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", ["zoo", "quick", "real"])
def test_a_preset_is_one_that_root_cause_takes(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    monkeypatch.setattr(study, "EXPERIMENTS", ("root-cause",))
    monkeypatch.setattr(study, "experiment_named", experiment_named)
    Study(preset=preset).settled().check()


def test_a_choice_of_an_experiment_keeps_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "EXPERIMENTS", ("root-cause",))
    monkeypatch.setattr(study, "experiment_named", experiment_named)
    for choice, said in (("flip_steps=-3", "expected at least 1"), ("models=x", "unknown choice of root-cause 'models'")):
        with pytest.raises(InputError, match=said) as raised:
            Study(preset="quick", only=("root-cause",), more=(f"root-cause.{choice}",)).run(tmp_path / "out")
        assert "known are models" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_report_of_what_is_no_study(tmp_path: Path, whole: Path) -> None:
    wrong("is not there", "report", tmp_path / "nothing")
    wrong("holds no result", "report", tmp_path)
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    table = pd.read_parquet(out / "lengths.parquet")
    table.head(2).to_parquet(out / "lengths.parquet")
    wrong("lengths.parquet is not the one", "report", out)
    settings = json.loads((whole / "summary.json").read_text())["settings"]
    resealed(out / "summary.json", settings={**settings, "invented": 1})
    wrong("made by another version of kvinterp, which has other choices (invented)", "report", out)


# Tables for a paper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1e-7, r"$1.00\times10^{-7}$"),
        (-3.25e-12, r"$-3.25\times10^{-12}$"),
        (0.0, "0"),
        (7, "7"),
        (-2.0, "$-2$"),
        (0.0195, "$0.0195$"),
        (1234.5, "$1234$"),
        (float("nan"), "--"),
        (float("inf"), r"$\infty$"),
    ],
)
def test_small_numbers_survive_in_latex(value: float, said: str) -> None:
    assert latex_number(value) == said


def test_no_text_is_a_command_or_markup() -> None:
    table = pd.DataFrame({"a_b": ["$x^2$ & \\input{/etc/passwd} <b>|"], "p": [1e-7]})
    text = latex_of("t", table, "50% of {it}")
    assert r"\$x\textasciicircum{}2\$ \& \textbackslash{}input\{/etc/passwd\}" in text
    assert r"$1.00\times10^{-7}$" in text
    assert r"50\% of \{it\}" in text
    assert latex_text("plain") == "plain"
    assert r"\<b\>\|" in markdown_of(table)
    assert "1.0\u00a0×\u00a010⁻⁷" in markdown_of(table)
