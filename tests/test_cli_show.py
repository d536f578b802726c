"""`kvinterp show`: the page of a folder, opened or named."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from command_line import kvinterp, wrong


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(asked.append(address)) or True)
    return asked


@pytest.mark.parametrize("name", ["report.html", "audit.html"])
def test_the_page_is_opened_and_named(tmp_path: Path, browser: list[str], name: str) -> None:
    page = tmp_path / "a folder" / name
    page.parent.mkdir()
    page.write_text("x")
    made = kvinterp("show", page.parent)
    assert (made.exit_code, made.stdout) == (0, f"{page}\n")
    assert browser == [page.as_uri()]
    made = kvinterp("show", page.parent, "--no-open", "--json")
    found = json.loads(made.stdout)
    assert (found["page"], found["opened"], found["exit_code"]) == (str(page), False, 0)
    assert len(browser) == 1


def test_without_a_browser_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("x")
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    made = kvinterp("show", tmp_path)
    assert made.exit_code == 0
    assert made.stdout == f"{tmp_path / 'report.html'}\n"
    assert "no browser could be started" in made.stderr


def test_a_folder_without_a_page(tmp_path: Path, browser: list[str]) -> None:
    wrong("holds no page (report.html or audit.html): give one that kvinterp wrote", "show", tmp_path)
    wrong("is not there: give one that kvinterp wrote", "show", tmp_path / "none")
    assert browser == []
