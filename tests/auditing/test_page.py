"""Every part of a page shows what it is given as text, and the template comes with the package."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvinterp.auditing.page import page
from kvinterp.auditing.verdict import Verdict
from kvinterp.report.page import Answer, Column, Links, Packed, Picture, Table, Text, fragment, render
from kvinterp.report.tokens import tokens_fragment
from synthetic import comparison

EVIL = "<script>alert('x')</script>&\"quoted\""
HEAD = [Column(EVIL, kind) for kind in ("", "number", "text", "code")]
PARTS = [
    *(Text(EVIL, look) for look in ("", "note", "h2", "h3", "frame")),
    Answer([EVIL]),
    Picture(EVIL, b"a figure"),
    Table(HEAD, [[EVIL] * 4], EVIL, EVIL, EVIL),
    Table([Column(EVIL)], [[Links({EVIL: EVIL})]], EVIL, EVIL, EVIL),
    Packed(EVIL, {EVIL: b"data"}),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{type(part).__name__} {getattr(part, 'look', '')}")
def test_every_part_is_text(part: Any) -> None:
    shown = fragment(part)
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert EVIL not in shown
    # The page's own script, and no other.
    assert render(EVIL, [part], heading=EVIL, kicker=EVIL).count("<script") == 1


def test_only_the_scripts_that_are_named_may_run() -> None:
    """Those of the page's parts, by their hash."""
    shown = render("x", [])
    (code,) = re.findall(r'<script type="module">(.*?)</script>', shown, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'\">" in shown
    assert "unsafe-inline'; script-src" in shown
    assert "default-src 'none'" in shown
    assert "#kv-changes" not in code
    assert "#kv-changes" in render("x", [Packed("kv-changes", {})])


def test_the_texts_of_a_comparison_are_a_page_in_a_frame() -> None:
    """What docs/compare.md gives for a notebook: it once took the paths of the comparison for a template, and showed nothing."""
    shown = tokens_fragment(comparison(steps=3))
    assert "&lt;h1&gt;cached against recompute&lt;/h1&gt;" in shown
    assert "kv-changes" in shown


def test_links_go_to_files_beside_the_page_whatever_their_names() -> None:
    names = ["runs/x/steps.parquet", "javascript:alert(1)", '//a.b/"c d']
    verdict = Verdict("equal", None, None, "", "", {}, (), (), "PASS  equal", provenance={"model": "x"})
    assert re.findall('href="([^"]*)"', page(verdict, names)) == [
        "./runs/x/steps.parquet",
        "./javascript%3Aalert%281%29",
        ".///a.b/%22c%20d",
        "./verdict.json",
    ]


def test_the_templates_are_installed_with_the_package() -> None:
    for name in ("page", "parts", "experiment", "audit", "engine", "attention", "panel"):
        assert resources.files("kvinterp.report").joinpath(f"{name}.html.j2").is_file()
    # tomllib is there from Python 3.11 on.
    settings = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'package-data\]\nkvinterp = \[[^\]]*"report/\*\.j2", "report/static/\*"', settings)
