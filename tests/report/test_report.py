"""The report says what the tables say, asks the network for nothing, and shows every text as text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvinterp.common.numbers import number
from kvinterp.comparison import Comparison
from kvinterp.data import Prompt
from kvinterp.errors import InputError
from kvinterp.study.reading.precision import fall_of
from kvinterp.study.reading.results import right_answers
from kvinterp.study.report import compare
from kvinterp.study.report.compare import file_name, ladder_of, overview_of, write_report
from kvinterp.study.report.page import Picture
from kvinterp.study.results import Result
from pages import Page
from synthetic import comparison, failed, prompts, result

ATTACK = "<script>alert('x')</script> & <img src=http://example.com/x.png> \"quoted\""


def page(tmp_path: Path, *results: Result) -> Page:
    return Page(write_report(results, tmp_path).read_text(encoding="utf-8"))


def made(size: float = 1e-3, flip: int | None = None, **changed: Any) -> Result:
    return result(comparison(size=size, flip=flip, **changed), Path("-".join(["run", *map(str, changed.values())])))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are files of one line: for tests of words, which are most of the page."""

    monkeypatch.setattr(compare, "pictured", lambda folder, name, figure, caption: Picture(caption, b"a figure"))


def test_the_answer_of_an_ordinary_run(tmp_path: Path, quick: None) -> None:
    one = made()
    text = page(tmp_path, one).text
    steps = one.comparison.steps
    assert "Does decoding from the KV cache compute the same thing as recomputing the whole prefix at every step?" in text
    assert "The two paths give different logits at 8 of 10 steps" in text
    assert number(steps["max_abs_logit"].max()) in text
    assert "No token changes in 2 decodes." in text
    assert f"{number(steps['margin_a'].min())} logits" in text


def test_the_answer_when_nothing_differs(tmp_path: Path, quick: None) -> None:
    text = page(tmp_path, made(size=0.0)).text
    assert "The two paths give the same logits, bit for bit, at all 10 steps." in text
    assert "different logits" not in text


def test_the_answer_when_tokens_flip(tmp_path: Path, quick: None) -> None:
    text = page(tmp_path, made(flip=3, protocol="free")).text
    assert "In 2 of 2 decodes another token is chosen, the earliest at step 3." in text
    assert "each path is fed its own tokens" in text
    assert "No token changes" not in text
    assert "answer 0 other" in text


def test_the_answer_in_higher_precision(tmp_path: Path, quick: None) -> None:
    rungs = [made(), made(size=1e-7, dtype="float32"), made(size=1e-15, dtype="float64")]
    text = page(tmp_path / "falls", *rungs).text
    assert "It falls at every step up in precision, as rounding does" in text
    stuck = [made(), made(size=1e-7, dtype="float32"), made(size=1e-6, dtype="float64")]
    text = page(tmp_path / "stuck", *stuck).text
    assert "it does not fall from float32 (" in text
    assert "as rounding does" not in text


def test_other_paths_get_their_own_question(tmp_path: Path, quick: None) -> None:
    text = page(tmp_path, made(paths={"a": "cached@float64", "b": "cached"})).text
    assert "Does the path cached@float64 compute the same thing as the path cached?" in text


def test_texts_of_models_and_prompts_are_text(tmp_path: Path) -> None:
    """A prompt is whatever someone found on the web; it must not run in the reader's browser."""
    whole = comparison(model=ATTACK, strategy=ATTACK)
    whole.examples[["text_a", "text_b"]] = ATTACK
    hostile = [Prompt("p0", ATTACK), Prompt("p1", ATTACK)]
    bad = dataclasses.replace(whole, failures=failed(1).failures.assign(message=ATTACK, id=ATTACK))
    shown = page(tmp_path, result(bad, Path(ATTACK), prompts=hostile, left_out={"pattern": ATTACK}))
    assert shown.tags.count("script") == 1, "the page's own"
    drawn = sum(("class", "interval") in attributes.items() for _, attributes in shown.elements)
    assert shown.tags.count("svg") == drawn + len(list((tmp_path / "figures").glob("*.png")))
    assert shown.text.count("<script>alert('x')</script>") >= 5


@pytest.mark.slow
def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    shown = page(tmp_path, made(), made(kind="hooked"), made(protocol="free"))
    assert shown.wanted
    # Marks and pictures of points within the figures, and links to the files beside the page.
    assert all(value.startswith(("data:image/png;base64,", "#", "./")) for value in shown.wanted)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    # The page's one script, which its policy names, asks for nothing: tests/report/test_pages_in_a_browser.py.
    html = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(
        r"https?:(?!//www\.w3\.org/2000/svg\")|url\((?!#)|@import|<link|<script|<iframe", re.sub(r"base64,[^\"]*", "", html)
    )
    assert "default-src 'none'" in html.replace("&#39;", "'")
    assert 'name="viewport"' in html


@pytest.mark.slow
def test_every_figure_is_on_the_page_and_on_disk(tmp_path: Path) -> None:
    shown = page(tmp_path, made(), made(protocol="free"), made(kind="hooked"), made(dtype="float32", size=1e-7))
    names = {p.name for p in (tmp_path / "figures").glob("*.png")}
    kinds = [f"mistral-mini-{k}-{f}.png" for k in ("native", "hooked") for f in ("kl_by_step", "attention_by_head")]
    assert {*kinds, "mistral-mini-drift_by_layer.png", "precision_ladder.png"} <= names
    assert shown.tags.count("svg") == len(names) + sum(
        ("class", "interval") in attributes.items() for _, attributes in shown.elements
    )


def test_one_result_has_plain_figure_names(tmp_path: Path) -> None:
    page(tmp_path, made())
    names = sorted(p.stem for p in (tmp_path / "figures").glob("*.png"))
    assert names == ["attention_by_head", "drift_by_layer", "kl_by_step", "kv_by_position"]


def test_what_could_not_be_recorded_is_said(tmp_path: Path, quick: None) -> None:
    whole = comparison()
    bare = dataclasses.replace(whole, heads=whole.heads.iloc[:0])
    text = page(tmp_path, result(bare, left_out={"pattern": "Site 'pattern' does not exist under 'sdpa'."})).text
    assert "mistral-mini, native: pattern is not recorded, because site 'pattern' does not exist under 'sdpa'." in text


def test_sections_without_data_are_left_out(tmp_path: Path, quick: None) -> None:
    whole = comparison()
    empty = {name: getattr(whole, name).iloc[:0] for name in ("layers", "heads", "kv_steps", "kv_positions", "kv")}
    text = page(tmp_path, result(dataclasses.replace(whole, **empty))).text
    assert "KL by step" in text
    assert not any(title in text for title in ("Drift of the", "Attention by", "K and V by", "Left out"))


def test_failures_are_listed(tmp_path: Path, quick: None) -> None:
    whole = comparison()
    text = page(tmp_path, result(dataclasses.replace(whole, failures=failed(7).failures))).text
    assert "path cached: NaN first appeared in layer 1" in text


def test_nothing_to_report_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompt could be compared"):
        write_report([result(failed(0))], tmp_path)


def test_equal_provenance_is_told_once_and_the_rest_by_comparison(tmp_path: Path, quick: None) -> None:
    text = page(tmp_path, made(), made(kind="hooked", weights="fedcba9876543210")).text
    assert text.count("kernel_flags.allow_tf32_cudnn") == 1
    assert text.count("0123456789abcdef") == 1
    assert "run-hooked-fedcba9876543210 hooked fedcba9876543210" in text


def test_the_overview_wants_all_four_tables() -> None:
    whole = comparison()
    bare = dataclasses.replace(whole, heads=whole.heads.iloc[:0], provenance={**whole.provenance, "kind": "native"})
    hooked = dataclasses.replace(whole, provenance={**whole.provenance, "kind": "hooked"})
    titles = [axes.get_title(loc="left").replace("\n", " ") for axes in overview_of([result(bare), result(hooked)]).axes]
    assert "Mean attention KL by layer and head, mistral-mini hooked" in titles
    with pytest.raises(InputError, match="the four figures need all of them"):
        overview_of([result(bare)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (float("nan"), "–"),
        (0.015625, "0.0156"),
        (3652.4, "3,652"),
        (1.57e-7, "1.6\u00a0×\u00a010⁻⁷"),
        (4.4e12, "4.4\u00a0×\u00a010¹²"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_a_person_can_read(value: float, text: str) -> None:
    assert number(value) == text


def test_the_ladder_takes_the_same_prompts_only() -> None:
    base = result(comparison((0, 1, 2)), prompts=prompts(3))
    rung = result(comparison((0, 1), size=1e-7, dtype="float32"))
    other = result(comparison((0, 1), size=1e-7, dtype="float32", model="zoo:gemma2-mini"))
    ladder = ladder_of([base, rung, other], "float16")
    assert list(ladder) == ["mistral-mini"]
    assert [sorted(c.examples["example"]) for c in ladder["mistral-mini"]] == [[0, 1], [0, 1]]
    assert [c.provenance["dtype"] for c in ladder["mistral-mini"]] == ["float16", "float32"]


def test_falling_orders_by_precision_and_knows_equality() -> None:
    def rungs(*sizes: float) -> list[Comparison]:
        return [comparison(size=s, dtype=d) for s, d in zip(sizes, ("float64", "bfloat16", "float32"), strict=True)]

    assert fall_of("a", rungs(1e-15, 1e-1, 1e-6)).falls
    assert fall_of("a", rungs(0.0, 1e-1, 0.0)).falls
    assert not fall_of("a", rungs(1e-6, 1e-1, 1e-6)).falls
    # Equal in the coarsest dtype: it does not fall, and it is not stuck either.
    equal = fall_of("a", rungs(1e-15, 0.0, 1e-6))
    assert not equal.falls
    assert not equal.stuck
    assert [(coarse[0], fine[0]) for coarse, fine in equal.begins] == [("bfloat16", "float32")]


def test_answers_are_judged_by_the_prompts_own_task() -> None:
    whole = comparison()
    whole.examples["text_a"] = [" 1 + 1 = 2. #### 2<eos>", " #### 3"]
    whole.examples["text_b"] = [" #### 1", " #### 3"]
    judged = [Prompt("p0", "?", "arithmetic", "2"), Prompt("p1", "?", "arithmetic", "3")]
    assert right_answers(result(whole, prompts=judged)) == (2, 1)
    assert right_answers(result(whole, prompts=[judged[0], Prompt("p1", "?")])) is None


def test_file_names_are_safe() -> None:
    two = [made(), made(kind="hooked")]
    assert file_name("some/Org Model:1", "native", "kl", two) == "Org-Model-1-native-kl"
    assert file_name("../../etc/x", "native", "kl", two) == "x-native-kl"
