"""`kvinterp show`: the page of a folder, opened or named."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from command_line import kvinterp, wrong
from kvinterp.common.files import write_whole


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(asked.append(address)) or True)
    return asked


def paged(folder: Path, name: str) -> Path:
    """A page that kvinterp wrote."""
    write_whole(folder / name, "x")
    return folder / name


def test_the_page_is_opened_and_named(tmp_path: Path, browser: list[str]) -> None:
    page = paged(tmp_path / "a folder", "report.html")
    made = kvinterp("show", page.parent)
    assert (made.exit_code, made.stdout) == (0, f"{page}\n")
    assert browser == [page.as_uri()]
    made = kvinterp("show", page.parent, "--no-open", "--json")
    found = json.loads(made.stdout)
    assert (found["page"], found["opened"], found["exit_code"]) == (str(page), False, 0)
    assert len(browser) == 1


def test_a_folder_without_a_page(tmp_path: Path, browser: list[str]) -> None:
    wrong("holds no result: give one that kvinterp wrote", "show", tmp_path)
    wrong("does not exist: give one that kvinterp wrote", "show", tmp_path / "none")
    assert browser == []


def test_a_page_that_is_gone_is_written_again_without_a_model(
    tmp_path: Path, browser: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every kind of result comes back as is tests/test_kept.py's; here the command, with all that it says."""
    out = tmp_path / "out"
    made = kvinterp("kernels", "zoo:gqa2-mini", "--sizes", "1,2", "--device", "cpu", "--out", out)
    assert made.exit_code == 0, made.output
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    wrong("holds a result without a page: kvinterp show --rewrite makes one", "show", out)
    monkeypatch.setattr("kvinterp.auditing.commands.audit.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    made = kvinterp("show", out, "--rewrite", "--no-open", "--json")
    assert made.exit_code == 0, made.output
    assert (out / "report.html").read_text() == page
    found = json.loads(made.stdout)
    assert found["page"] == str(out / "report.html")
    assert found["reading"][0] in made.stderr
    (out / "kernels.parquet").write_bytes(b"other")
    wrong("holds no readable result", "show", out, "--rewrite")
    assert browser == []
