"""What the page and the notebook draw with, in a real browser: the heatmap says its numbers, and is used by mouse and keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import IN_A_BROWSER, Opened
from kvinterp.report.page import script, styles

pytestmark = IN_A_BROWSER

EVIL = "<img src=x onerror=document.body.remove()></script>"
MAP = {
    "rows": ["0", "1"],
    "columns": ["0", "1", EVIL],
    "values": [[0.0, 1e-7, None], [2.5, 0.03, 1e-3]],
    "title": EVIL,
    "unit": "nats",
    "rowName": "layer",
    "columnName": "head",
}


@pytest.fixture
def drawn(page_opened: Callable[..., Opened], tmp_path: Path) -> Iterator[Any]:
    """An empty page with the functions of draw.js in sight; whatever it logs as an error fails the test."""
    names = ("heatmap", "scaleOf", "shade", "number")
    code = script("draw") + f"\nObject.assign(globalThis, {{ {', '.join(names)} }}); globalThis.picked = [];"
    path = tmp_path / "page.html"
    style = f"<meta charset='utf-8'><style>{styles('draw')}</style>"
    path.write_text(
        f'<!DOCTYPE html>{style}<div id="root">before</div><script type="module">{code}</script>', encoding="utf-8"
    )
    opened = page_opened(path)
    opened.page.wait_for_function("globalThis.picked !== undefined")
    yield opened.page
    opened.quiet()


def heatmap(page: Any, **more: Any) -> None:
    page.evaluate(
        "(given) => { globalThis.map = heatmap(document.getElementById('root'),"
        " {...given, onpick: (row, column) => picked.push([row, column])}); }",
        {**MAP, **more},
    )


def test_a_heatmap_says_every_number_with_its_unit(drawn: Any) -> None:
    heatmap(drawn, scale="log")
    cells = drawn.locator("[role=gridcell]")
    assert [cells.nth(at).get_attribute("aria-label") for at in (0, 1, 3)] == [
        "layer 0, head 0: 0 nats",
        "layer 0, head 1: 1.00e-7 nats",
        "layer 1, head 0: 2.5 nats",
    ]
    legend = drawn.locator(".kv-legend").inner_text()
    assert re.sub(r"\s+", " ", legend) == "1.00e-7 2.5 (nats, log scale) exactly 0 (1) no value (1)"
    assert "before" not in drawn.locator("#root").inner_text()


def test_mouse_and_keyboard_pick_the_same_cells(drawn: Any) -> None:
    heatmap(drawn, chosen=[0, 1])
    assert drawn.locator("[aria-selected=true]").get_attribute("data-at") == "0 1"
    drawn.locator("[data-at='1 0']").click()
    drawn.locator("[data-at='1 0']").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowUp", "Enter"):
        drawn.keyboard.press(key)
    assert drawn.evaluate("picked") == [[1, 0], [0, 2]]
    assert drawn.locator("[aria-selected=true]").get_attribute("data-at") == "0 2"
    assert drawn.locator(".kv-said").inner_text() == f"layer 0, head {EVIL}: no value"
    assert drawn.locator("[tabindex='0']").count() == 1
