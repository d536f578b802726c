"""The page of comparisons says what the tables say, asks the network for nothing, and shows every text as text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvinterp.commands.base import Experiment
from kvinterp.common.numbers import number
from kvinterp.comparison import Comparison
from kvinterp.data import Prompt
from pages import Page
from synthetic import comparison, comparison_page, failed, result

ATTACK = "<script>alert('x')</script> & <img src=http://example.com/x.png> \"quoted\""


def made(size: float = 1e-3, flip: int | None = None, **changed: Any) -> Comparison:
    return result(comparison(size=size, flip=flip, **changed), Path("-".join(["run", *map(str, changed.values())])))


def page(folder: Path, one: Comparison, **more: Any) -> Page:
    return Page(comparison_page(folder, one, **more).read_text(encoding="utf-8"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures: for tests of words, which are most of the page."""
    monkeypatch.setattr(Experiment, "figures", lambda *_: {})


def test_the_answer_of_an_ordinary_run(tmp_path: Path, quick: None) -> None:
    one = made()
    text = page(tmp_path, one).text
    steps = one.steps
    assert "cached and recompute give different logits at 8 of 10 steps" in text
    assert number(steps["max_abs_logit"].max()) in text
    assert "No token changes in 2 decodes." in text
    assert f"{number(steps['margin_a'].min())} logits" in text


def test_texts_of_models_and_prompts_are_text(tmp_path: Path) -> None:
    """A prompt is whatever someone found on the web; it must not run in the reader's browser."""
    whole = comparison(model=ATTACK, strategy=ATTACK)
    whole.examples[["text_a", "text_b"]] = ATTACK
    bad = dataclasses.replace(whole, failures=failed(1).failures.assign(message=ATTACK, id=ATTACK))
    hostile = [Prompt("p0", ATTACK), Prompt("p1", ATTACK)]
    shown = page(tmp_path, result(bad), prompts=hostile, left_out={"pattern": ATTACK})
    assert shown.tags.count("script") == 1, "the page's own"
    drawn = sum(("class", "interval") in attributes.items() for _, attributes in shown.elements)
    assert shown.tags.count("svg") == drawn
    assert sum("data-chart" in attributes for _, attributes in shown.elements) == 4
    assert shown.text.count("<script>alert('x')</script>") >= 5


@pytest.mark.slow
def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    path = comparison_page(tmp_path, made(flip=1))
    shown = Page(path.read_text(encoding="utf-8"))
    assert shown.wanted
    # Marks and pictures of points within the figures, and links to the files beside the page.
    assert all(value.startswith(("data:image/png;base64,", "#", "./")) for value in shown.wanted)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    # The page's one script, which its policy names, asks for nothing: tests/test_pages_in_a_browser.py.
    html = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(
        r"https?:(?!//www\.w3\.org/2000/svg\")|url\((?!#)|@import|<link|<script|<iframe", re.sub(r"base64,[^\"]*", "", html)
    )
    assert "default-src 'none'" in html.replace("&#39;", "'")
    assert 'name="viewport"' in html


def test_where_nothing_could_be_compared_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        comparison_page(tmp_path, failed(0))
    assert not list(tmp_path.iterdir())
