"""Charts that a page draws itself: their data are the table's numbers, and every kind on every scale is legible at both widths."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from browser import EVIL, Opened, check_markup, check_page
from kvinterp.findings import Chart, Panel
from kvinterp.report.page import render
from kvinterp.report.panels import drawing

SCALES = ("zero", "linear", "share", "signed", "log")
KINDS = ("line", "points", "step", "medians", "dots")
TABLE = pd.DataFrame(
    {
        "x": [0, 1, 2, 0, 1, 2],
        "y": [0.5, 0.0, 0.25, 0.75, 3.0, np.nan],
        "low": [0.25, 0.0, 0.125, 0.5, 1.0, np.nan],
        "high": [1.0, 0.5, 0.5, 1.0, 4.0, np.nan],
        "arm": ["cached"] * 3 + [EVIL] * 3,
        "model": ["m"] * 3 + ["a name that is longer than a phone is wide, and then some"] * 3,
        "why": [""] * 5 + ["there are no observations"],
        "first": [False, True, False, False, False, False],
    }
)


def panel(kind: str, scale: str, facet: str = "", **more: Any) -> Panel:
    given = {"x": "y", "y": "model"} if kind == "dots" else {"x": "x", "y": "y"}
    return Panel(TABLE, **given, kind=kind, scale=scale, color="arm", facet=facet, label="size (nats)", why="why",
                 mark=("first", "first flipped token"), **more)  # fmt: skip


def cells(rows: int, columns: int, scale: str) -> Panel:
    made = [
        {"layer": row, "head": column, "size": (row - 1) * (column + 1) / rows / columns if row + column else np.nan}
        for row in range(rows)
        for column in range(columns)
    ]
    return Panel(pd.DataFrame(made), "head", "layer", "map", "size", scale=scale, label="share of it", level=1)


def data_of(chart: Chart) -> Any:
    return json.loads(gzip.decompress(drawing(chart).packed))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_data_are_the_tables_numbers(kind: str, scale: str) -> None:
    (shown,) = data_of(Chart("What there is", [panel(kind, scale)]))["panels"]
    (facet,) = shown["facets"]
    values = [value for line in facet["lines"] for value in line["value"]]
    assert (
        values == [min(value, 1.05) if scale == "signed" else value for value in (0.5, 0.0, 0.25, 0.75, 3.0)]
        or kind == "medians"
    )
    assert len(shown["names"]) == 2
    said = [text for line in facet["lines"] for text in line["beyond"] if text]
    assert said == (["300\u202f%"] if scale == "signed" else [])
    if kind == "medians":
        assert facet["lines"][0]["marked"] == [[1.0], [0.0]]
        assert facet["lines"][0]["faint"][1] == [0.5, 0.0, 0.25]
    else:
        assert facet["lines"][0]["low"] == [0.25, 0.0, 0.125]


def test_a_map_keeps_what_has_no_value_apart_from_zero() -> None:
    (shown,) = data_of(Chart("Cells", [cells(2, 3, "zero")]))["panels"]
    assert shown["facets"][0]["cells"][0][0] is None
    assert shown["facets"][0]["cells"][1] == [0.0, 0.0, 0.0]
    assert shown["facets"][0]["written"][1] == ["0", "0", "0"]
    assert (shown["rows"], shown["across"], shown["level"]) == (["0", "1"], ["0", "1", "2"], 1)
    assert data_of(Chart("Many", [cells(40, 8, "zero")]))["panels"][0]["facets"][0]["written"] == []
    assert drawing(Chart("Cells", [cells(2, 3, "zero")])) == drawing(Chart("Cells", [cells(2, 3, "zero")]))


def test_a_page_needs_no_matplotlib() -> None:
    """It takes as long to import and to draw with as a small comparison takes in all."""
    code = "import sys, kvinterp.report.experiment, kvinterp.report.panels; print([n for n in ('matplotlib', 'scipy.stats') if n in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_every_kind_on_every_scale_is_legible(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    charts = [
        Chart(f"{kind}, {EVIL}", [panel(kind, scale, facet) for scale in SCALES])
        for kind in KINDS
        for facet in ("", "model")
    ]
    charts += [
        Chart("maps", [cells(rows, columns, scale)])
        for rows, columns in ((2, 3), (40, 200))
        for scale in ("zero", "signed", "linear")
    ]
    charts += [
        Chart("ends", [panel("line", "linear", ends="band", xscale=xscale)])
        for xscale in ("linear", "doubling", "share", "log")
    ]
    charts += [
        Chart("level", [panel("points", "linear", level="equal", xscale="linear"), panel("line", "zero", level=0.5)])
    ]
    path = tmp_path / "page.html"
    path.write_text(render("Charts", [*map(drawing, charts)]), encoding="utf-8")
    opened = page_opened(path)
    opened.page.wait_for_function(
        "() => [...document.querySelectorAll('.kv-chart')].every((root) => root.querySelector('svg'))"
    )
    count = opened.page.evaluate("() => document.querySelectorAll('.kv-panels > svg').length")
    assert count == sum(len(each["facets"]) for chart in charts for each in data_of(chart)["panels"])
    check_markup(opened)
    opened.quiet()
    check_page(page_opened, path)
