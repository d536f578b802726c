"""Results as objects: kept as the command keeps them, read again to the bit, shown small, and damaged ones told in a sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.auditing.verdict import Verdict
from kvinterp.commands.keeping import keeper_of
from kvinterp.common.result import Result
from kvinterp.comparison import Comparison
from kvinterp.errors import InputError
from synthetic import comparison, failed, prompts
from writing import changed

MODEL = "zoo:gqa2-mini"
OTHER = "recompute[kernels=split_k(4,float16)]"
"""A path that differs by construction, whatever the processor's kernels do."""

pytestmark = pytest.mark.xdist_group("kept")


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model(MODEL, kind="native")


@pytest.fixture(scope="module")
def found(model: Any) -> dict[str, Result]:
    """One of each."""
    asked, how = kv.load_prompts("arithmetic:2"), {"max_new_tokens": 3, "progress": "none"}
    return {
        "compare": kv.compare(model, asked, b=OTHER, **how),
        "patch": kv.sweep(model, asked, "kv", direction="into-cached", recompute=OTHER, controls="quick", **how),
        "patch without controls": kv.sweep(model, asked, controls="none", **how),
        "decompose": kv.decompose(model, asked, recompute=OTHER, **how),
        "which-run": kv.which_run(model, asked, max_new_tokens=3),
        "localise": kv.localise(model, asked[0], recompute=OTHER),
        "localise nothing": kv.localise(model, asked[0], dtype="float64"),
        "kernels": kv.kernels_table(model, sizes=(1, 2)),
    }


ALL = ("compare", "patch", "patch without controls", "decompose", "which-run", "localise", "localise nothing", "kernels")


PLACED = ("VERB", "folder", "files", "settings", "choices", "experiment", "_own", "_of")
"""What a result says of where it is kept, and what was added to its own tables."""


def same(one: Result, other: Result) -> None:
    """Everything but where it is kept is the same, to the bit, with dtypes and NaN."""
    assert type(one) is type(other)
    for name, value in vars(one).items():
        held = getattr(other, name)
        if isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(value, held, check_exact=True, obj=name)
        elif name not in ("origin", "logits", "_tables", *PLACED):
            assert held == value, name


@pytest.mark.parametrize("which", ALL)
def test_what_is_saved_is_read_again_to_the_bit(found: dict[str, Result], which: str, tmp_path: Path) -> None:
    """Twice: what was read is written as it was, choices included."""
    made = found[which]
    read = kv.load(made.save(tmp_path / "once"))
    same(made, read)
    again = kv.load(read.save(tmp_path / "twice"))
    same(made, again)
    one, other = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("once", "twice"))
    assert one["settings"] == other["settings"]
    assert one["choices"] == other["choices"]
    assert sorted(path.name for path in (tmp_path / "once").iterdir() if path.name[0] != ".") == sorted(
        [
            *(f"{name}.parquet" for name in made.written()[0]),
            *["findings.parquet"] * (made.VERB != "localise"),
            "summary.json",
            *["prompts.jsonl"] * (which == "compare"),
        ]
    )


@pytest.mark.parametrize(
    "which",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("compare", "patch") else name for name in ALL],
)
def test_it_is_shown_in_a_line_a_card_and_a_page(found: dict[str, Result], which: str, tmp_path: Path) -> None:
    made = found[which]
    assert re.fullmatch(r"<\w+ .{10,220}>", repr(made)), repr(made)
    assert MODEL in repr(made)
    card = made._repr_html_()
    assert len(card) < 250_000
    assert card.count("<img") == min(1, len(made.figures()))
    assert "<table" not in card
    assert made.sentences()[0].replace("'", "&#39;") in card
    page = made.report(tmp_path / "page")
    assert page == tmp_path / "page" / "report.html"
    # A comparison's own first sentence says before its headline what was compared, which a page has elsewhere.
    headline = keeper_of(made).headline(made) or made.sentences()
    assert headline[0].replace("'", "&#39;") in page.read_text()
    assert "runs/*" not in page.read_text()
    assert "functions that are no commands" not in page.read_text()
    drawn = {path.stem for path in (tmp_path / "page").glob("figures/*.png")}
    assert drawn == set(made.figures())
    same(made, kv.load(tmp_path / "page"))


# What cannot be read ---------------------------------------------------------------------------------------------------


def test_what_is_no_result_is_told_in_a_sentence(tmp_path: Path) -> None:
    whole = comparison((0, 1)).save(tmp_path / "whole")

    def broken(name: str, change: Any) -> Path:
        shutil.copytree(whole, tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    def saying(**more: Any) -> Any:
        return lambda folder: changed(folder / "summary.json", **more)

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    settings = {"verb": "compare"}
    for given, said in {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "file": "is no folder",
        tmp_path / "empty": "holds no result",
        "": "expected the name of a folder",
        None: "expected the name of a folder",
        broken("other tool", saying(settings=None)): "does not say what wrote it",
        broken("no json", lambda folder: (folder / "summary.json").write_text("{")): "holds no readable summary.json",
        broken("odd verb", saying(settings={"verb": "../x"})): "unknown experiment",
        broken("earlier", lambda folder: (folder / "summary.json").write_text("{}")): "by kvinterp before",
        broken("odd table", saying(files=["../whole/steps.parquet"])): "steps.parquet is not among its tables",
        broken("odd files", saying(files=5)): "holds no readable result",
        broken("no provenance", saying(provenance=[])): "holds no readable result",
        broken("damaged", lambda folder: (folder / "steps.parquet").write_bytes(b"PAR1")): "holds no readable result",
        broken("of no table", saying(files=[])): "steps.parquet is not among its tables",
        broken("later", saying(files=[], settings=settings, provenance={"kvinterp": "99.0"})): "read it with kvinterp 99.0",
        broken("no table", lambda folder: (folder / "heads.parquet").unlink()): "heads.parquet",
    }.items():
        with pytest.raises(InputError, match=re.escape(said)) as told:
            kv.load(given)
        assert "\n" not in str(told.value)
        assert len(str(told.value)) < 600
    assert isinstance(kv.load(whole), Comparison)


def test_a_result_without_a_measurement_has_no_page_and_says_so(tmp_path: Path) -> None:
    none = failed(0)
    with pytest.raises(kv.KvinterpError, match="none of the 1 prompts could be compared"):
        none.sentences()
    with pytest.raises(InputError, match="nothing was measured; see the failures"):
        none.report(tmp_path / "none")


def test_markup_in_names_and_prompts_stays_text(tmp_path: Path) -> None:
    made = comparison((0,), model="<script>alert(1)</script>")
    made.prompts = prompts(1, "<img src=x onerror=alert(2)>")
    for text in (made._repr_html_(), made.report(tmp_path / "out").read_text()):
        assert "<script>alert" not in text
        assert "<img src=x" not in text
    assert kv.load(tmp_path / "out").prompts == made.prompts


# The audit -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_verdict_is_kept_with_a_page_of_its_own(model: Any, tmp_path: Path) -> None:
    """The JSON is the round trip: what is read says the very same; its page is the command's but for the blocks."""
    found = kv.audit(
        model, rungs=("float32", "float64"), lengths=(5,), steps=2, sweep="no", checks="none", detail="everything"
    )
    for made, name in ((found, "all"), (found.verdict, "verdict")):
        read = kv.load(made.save(tmp_path / name))
        assert read.to_json() == found.verdict.to_json()
        assert read.verdict == found.verdict.verdict
        assert read.sentences() == found.sentences() == made.sentences()
        assert read.report() == tmp_path / name / "report.html"
        assert (f"{read.provenance['weights']}" in read.report().read_text()) == (made.sentences()[0] in made._repr_html_())
        assert list(made.figures()) == list(read.figures()) == ["precision_ladder"]
        assert len(made.overview()) == len(read.overview()) == 3
    whole, alone = ((tmp_path / name / "report.html").read_text() for name in ("all", "verdict"))
    cut = "Block by block"
    assert whole.partition(cut)[0] == alone.partition(cut)[0]
    assert "This page was made of the verdict alone" in alone


def test_a_verdicts_json_has_every_field_but_the_tokens() -> None:
    tokens = pd.DataFrame({"sequence": [0], "position": [3], "part": ["tokens"], "token": [7], "engine": [-0.5]})
    made = Verdict("rounding", None, None, "", "", {}, (), ("a note",), "PASS  rounding", tokens=tokens)
    told = json.loads(made.to_json())
    assert told.keys() == {field.name for field in dataclasses.fields(Verdict)} - {"tokens"} | {"exit_code"}
    assert made.tokens is tokens


# Asking ----------------------------------------------------------------------------------------------------------------


def test_an_experiment_is_asked_from_python(tmp_path: Path) -> None:
    """In memory and in a folder it gives what load reads; a name and an option that are none are said with the near one."""
    how = {"model": MODEL, "prompts": "arithmetic:1", "max_new_tokens": 3, "progress": "none"}
    found = kv.experiment("compare", **how)
    same(found, kv.experiment("compare", out=tmp_path / "out", **how))
    same(found, kv.load(tmp_path / "out"))
    same(found, kv.experiment("compare", out=tmp_path / "out", existing="use", **how))
    for name, choices, said in (
        ("compere", {}, "did you mean 'compare'"),
        ("compare", {"modle": MODEL}, "did you mean 'model'"),
        ("compare", {"model": 3}, "model=3 was given: expected a text"),
        ("behaviour", {"models": 3}, "models=3 was given: expected a list"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            kv.experiment(name, **choices)
