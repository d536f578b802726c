"""What is shown of long work: one bar at a time, and nothing where nobody looks."""

from __future__ import annotations

import io
from typing import Any

import pytest

from kvinterp.commands.cells import Cell, run_cells
from kvinterp.common.progress import counting, each


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def inner(x: Any) -> dict[str, Any]:
    """A cell's function that counts its own work."""
    list(each("ab", "within", "step"))
    return {}


def other(x: int) -> dict[str, Any]:
    """Another kind of cell."""
    return {}


def test_what_is_counted_within_something_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    for _ in each("ab", "patching", "prompt"):
        list(each("xyz", "within", "step"))
    run_cells([Cell(f"c-{n}", inner, {"x": "one \x1b]0;title\x07"}) for n in range(2)])
    shown = screen.getvalue()
    assert "patching: 100%" in shown
    assert "within" not in shown
    assert "2/2" in shown
    assert r"one \x1b]0;title\x07" in shown
    assert "\x1b]0;" not in shown, "a name commands no terminal"
    list(each("ab", "afterwards", "prompt"))
    assert "afterwards" in screen.getvalue(), "the bar is free again"


def test_nothing_is_shown_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with counting(2, "silent", "prompt", "none") as bar:
        list(each("ab", "within", "step"))
        bar.update()
    monkeypatch.setattr("sys.stderr", lines := io.StringIO())
    list(each("ab", "to a file", "prompt"))
    assert screen.getvalue() == lines.getvalue() == ""


def staged(tell: Any) -> dict[str, Any]:
    """A cell's function that says what runs."""
    for text in ("float16", "float32", "programs of the cache", "program 1 of 100", "program 2 of 100"):
        tell(text)
    return {}


def test_stages_are_said_in_a_line_each_where_no_terminal_shows_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A piped audit said nothing for a minute; what is counted within a stage adds no line."""
    caplog.set_level("INFO", "kvinterp")
    for screen, progress, lines in ((io.StringIO(), "bar", 3), (io.StringIO(), "none", 0), (Terminal(), "bar", 0)):
        caplog.clear()
        monkeypatch.setattr("sys.stderr", screen)
        run_cells([Cell("one", staged)], progress=progress)
        assert [message for message in caplog.messages if message.startswith("now: ")] == [
            f"now: {stage}" for stage in ("float16", "float32", "programs of the cache")[:lines]
        ]


def test_work_of_many_kinds_has_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with counting(4, "alike", "prompt", done=1) as bar:
        bar.update(1)
    assert "2/4" in screen.getvalue()
    assert "<" in screen.getvalue()
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    run_cells([Cell("one", inner, {"x": 1}), Cell("two", other, {"x": 1})])
    assert "2/2" in screen.getvalue()
    assert "<" not in screen.getvalue()
