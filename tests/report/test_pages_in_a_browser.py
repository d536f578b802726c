"""Pages as a reader has them before them: in a browser, wide and narrow, in light and dark, with hostile names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from browser import EVIL, IN_A_BROWSER, Opened, check_markup, check_page, check_sorting, faults_of

from kvinterp.report.experiment import write_experiment
from kvinterp.report.page import Column, Table, render

pytestmark = IN_A_BROWSER

CELLS = ["1.6 × 10⁻⁷", "–", "3,652", "1.2 (0.8 to 1.5)", "1e-03", "1.2 (0.9 to 1.4)", "-0.5", "5 of 8", "12%"]


def experiment(folder: Path, **changed: Any) -> Path:
    told = {
        "question": f"Measure {EVIL}.\n\nAnd why.",
        "sentences": [f"{EVIL} is 3.", "It holds for 2 prompts."],
        "tables": {"many": pd.DataFrame({"step": range(30), "kl": 0.5, "word": EVIL, "same": True})},
        "figures": [],
        "chosen": {"prompts": EVIL, "sizes": (1, 2), "device": None},
        "about": {"model": f"zoo:{EVIL}", "dtype": "float16", "kernel_flags": {"tf32": False}},
    }
    return write_experiment(folder, **{**told, **changed})


def test_the_page_of_an_experiment(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    page = experiment(tmp_path)
    check_page(page_opened, page)
    opened = page_opened(page)
    check_sorting(opened)
    check_markup(opened)
    opened.quiet()


def test_numbers_are_put_in_order_as_numbers(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    rows = [[cell, f"float{2 ** (n % 3 + 3)}"] for n, cell in enumerate(CELLS)]
    path = tmp_path / "page.html"
    path.write_text(render("report", "x", [Table([Column("number"), Column("text")], rows)]), encoding="utf-8")
    opened = page_opened(path)
    by_number = ["-0.5", "1.6 × 10⁻⁷", "1e-03", "1.2 (0.8 to 1.5)", "1.2 (0.9 to 1.4)", "5 of 8", "12%", "3,652", "–"]
    assert _column(opened, 0) == by_number
    # Equal ones stay as they stood, and what is no number stays last.
    turned = ["3,652", "12%", "5 of 8", "1.2 (0.8 to 1.5)", "1.2 (0.9 to 1.4)", "1e-03", "1.6 × 10⁻⁷", "-0.5", "–"]
    assert _column(opened, 0) == turned
    assert _column(opened, 1) == ["float8"] * 3 + ["float16"] * 3 + ["float32"] * 3


def _column(opened: Opened, number: int) -> list[str]:
    opened.page.locator("th").nth(number).click()
    cells: list[str] = opened.page.locator("tbody tr").locator(f"td:nth-child({number + 1})").all_text_contents()
    return cells


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
    path, whole = tmp_path / "page.html", render("report", "x")
    path.write_text(whole, encoding="utf-8")
    opened = page_opened(path, 420, "dark")
    assert faults_of(opened) == []
    for fault, body in FAULTS.items():
        opened.page.set_content(whole.replace("</main>", f"{body}</main>"))
        found = faults_of(opened)
        assert any(fault in said for said in found), f"{fault}: {found}"
