"""Pages as a reader has them before them: in a browser, wide and narrow, in light and dark, with hostile names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import EVIL, IN_A_BROWSER, Opened, check_markup, check_page, check_sorting, faults_of
from kvinterp.auditing.audit import audit
from kvinterp.data import Prompt
from kvinterp.models import wrap
from kvinterp.report.page import render
from support import Case
from synthetic import comparison, comparison_page, experiment_page

pytestmark = IN_A_BROWSER


def test_the_page_of_an_experiment(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    page = experiment_page(tmp_path, EVIL, 30)
    check_page(page_opened, page)
    opened = page_opened(page)
    check_sorting(opened)
    check_markup(opened)
    opened.quiet()


def test_the_page_of_a_comparison(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    """Lines, maps and hatching in light and dark; names, prompts and texts that are markup, and one that is long."""
    whole = comparison(flip=3, layers=4, heads=8, model=EVIL)
    whole.examples[["text_a", "text_b"]] = EVIL, "long" * 200
    page = comparison_page(tmp_path, whole, prompts=[Prompt("p0", EVIL), Prompt("p1", "x" * 500)])
    check_page(page_opened, page)
    opened = page_opened(page)
    check_sorting(opened)
    check_markup(opened)
    opened.quiet()


@pytest.mark.slow
def test_the_page_of_an_audit(page_opened: Callable[..., Opened], load: Any, tmp_path: Path) -> None:
    model = wrap(load(Case("zoo:gqa2-mini", "native"), "float32").model, name=EVIL)
    audit(model, [[*range(3, 30)]], lengths=(9,), steps=2, rungs=("float32", "float64"), checks="none", out=tmp_path)
    page = tmp_path / "report.html"
    check_page(page_opened, page)
    opened = page_opened(page)
    check_sorting(opened)
    check_markup(opened)
    links = opened.page.evaluate("() => [...document.links].map((link) => link.getAttribute('href'))")
    assert sorted(links) == sorted(
        f"./{file.name}" for file in tmp_path.iterdir() if file.suffix in (".parquet", ".json") and file.name[0] != "."
    )
    opened.quiet()


FAULTS = {
    "leaves the window": '<p style="width:2000px">wide</p>',
    "spills out": '<p style="width:5em;white-space:nowrap">spilled over the edge of its box</p>',
    "is cut off": '<p style="width:5em;overflow:hidden;white-space:nowrap">longer than its box is wide</p>',
    "light ground": '<p style="background:#fff;color:#000">a card</p>',
    "contrast 1.7": '<p style="color:#3a4048">faint</p>',
    "leaves its figure": '<svg viewBox="0 0 90 90" width="90"><text x="60" y="50" fill="#fff">beyond</text></svg>',
    "in a figure": '<svg viewBox="0 0 90 90" width="90"><text x="9" y="50">black</text></svg>',
    "a line": '<svg viewBox="0 0 9 9" width="90"><path d="M0 0L9 9" stroke="#333" stroke-width="2"/></svg>',
    "overlaps": '<svg viewBox="0 0 90 90" width="90" fill="#fff"><text y="50">one</text><text y="52">two</text></svg>',
}


def test_what_is_wrong_with_a_page_is_found(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    path, whole = tmp_path / "page.html", render("x", [])
    path.write_text(whole, encoding="utf-8")
    opened = page_opened(path, 420, "dark")
    assert faults_of(opened) == []
    for fault, body in FAULTS.items():
        opened.page.set_content(whole.replace("</main>", f"{body}</main>"))
        found = faults_of(opened)
        assert any(fault in said for said in found), f"{fault}: {found}"
